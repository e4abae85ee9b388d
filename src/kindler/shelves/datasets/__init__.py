"""Kinds of datasets, one a module, and the shelf that they stand on."""
