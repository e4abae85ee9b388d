"""Batch scoring: a resident model, batches of fixed size, outputs as columns."""
