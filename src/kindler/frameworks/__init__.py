"""How one replica of a model is built, stepped, saved and asked for predictions, one framework a module."""
