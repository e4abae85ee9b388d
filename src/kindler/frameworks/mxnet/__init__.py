"""Apache MXNet: Gluon blocks."""

from kindler.frameworks.mxnet.config import create_config

__all__ = ["create_config"]
