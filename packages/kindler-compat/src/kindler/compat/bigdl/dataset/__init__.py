"""`bigdl.dataset`: readers of known data sets."""
