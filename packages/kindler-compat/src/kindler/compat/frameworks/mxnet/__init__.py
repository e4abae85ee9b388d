"""Apache MXNet: Gluon blocks."""

from kindler.compat.frameworks.mxnet.config import create_config

__all__ = ["create_config"]
