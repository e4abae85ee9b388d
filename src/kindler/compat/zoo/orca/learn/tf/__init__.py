"""`zoo.orca.learn.tf`: Orca's estimator for TensorFlow 1."""
