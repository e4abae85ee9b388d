"""One module a kind: how such objects become files and are read again. Loaded when first needed."""
