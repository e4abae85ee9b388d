"""`bigdl.nn`: layers, criteria and ways to initialize weights."""
