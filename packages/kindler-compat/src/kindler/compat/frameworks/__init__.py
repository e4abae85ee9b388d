"""Frameworks that only programs of the old systems need; the rows are in `plugin.py`."""

from __future__ import annotations

import io
import pickle
from typing import Any


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Files from before kindler-compat name the folders that these frameworks were in then."""
        for folder in ("tf_graph", "mxnet"):
            module = module.replace(f"kindler.frameworks.{folder}", f"{__name__}.{folder}")
        return super().find_class(module.replace("mxnet.config", "mxnet"), name)


def loads(data: bytes) -> Any:
    """What `cloudpickle` packed, now or when these frameworks were the core's."""
    return _Unpickler(io.BytesIO(data)).load()
