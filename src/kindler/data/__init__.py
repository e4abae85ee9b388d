"""What the user hands in -> each worker's batches of numpy arrays. Arrow all the way: no rows, no pickle."""
