"""Keras 3 on TensorFlow, JAX and PyTorch, and Keras 2 as `tf_keras`.

The first import of Keras fixes its backend, so `backends.py` comes first and other modules import it late.
"""
