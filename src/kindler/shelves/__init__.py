"""Models, datasets and scripts in a store: the verbs that users call, and how objects become files and back.

A kind of object is a row of a table (`registry.py`) whose code is in `kinds/` and loads on first use. Files
of others are looked through (`scan/`) before any framework opens them.
"""
