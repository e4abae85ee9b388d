"""`bigdl.util`."""
