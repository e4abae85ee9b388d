"""PyTorch: what it takes to build, step, save and ask one replica of a module."""
