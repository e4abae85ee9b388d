"""Kinds of models, one a module: how they become files and are read again. Loaded when first needed."""
