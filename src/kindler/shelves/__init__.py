"""Models, datasets and scripts in a store: the verbs that users call, and how objects become files."""
