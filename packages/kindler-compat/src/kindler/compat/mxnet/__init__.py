"""MXNet as its programs know it: `import kindler.compat.mxnet as mx`.

The package `mxnet` itself, imported after the names that it misses in numpy have been put back.
"""

from __future__ import annotations

from typing import Any

from kindler.compat.bigdl.alias import alias
from kindler.compat.frameworks.mxnet.library import mx

alias(__name__, "mxnet")


def __getattr__(name: str) -> Any:
    return getattr(mx, name)


def __dir__() -> list[str]:
    return dir(mx)
