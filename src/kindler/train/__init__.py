"""One run of training: the loop on a worker, and what the driver shows and keeps of it."""
