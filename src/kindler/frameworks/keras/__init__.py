"""Keras 3 on TensorFlow, JAX and PyTorch, and Keras 2 as `tf_keras`.

Which backend Keras computes with is fixed by its first import in a process, so `backends.py` decides that
first, and the other modules import Keras only when they are used. What differs between backends is in
`on_tensorflow.py`, `on_jax.py` and `on_torch.py`; everything else is the same for all of them.
"""
