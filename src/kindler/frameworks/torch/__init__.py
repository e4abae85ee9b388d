"""PyTorch replicas: building, stepping, saving and predicting."""
