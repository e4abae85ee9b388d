"""omega|ml's interface: `import kindler.compat.omegaml as om`.

Translates its arguments to those of `kindler.om`. Where omega|ml gave None for what is not there, this
raises.
"""

from __future__ import annotations

from typing import Any

from kindler.compat.omegaml.omega import Omega, virtualobj

__all__ = ["Omega", "datasets", "models", "runtime", "scripts", "setup", "store", "virtualobj"]

_default = Omega()


def setup(
    url: str | None = None, *, bucket: str = "default", broker: str | None = None, trusted: bool = False
) -> Omega:
    """Use this store from now on."""
    global _default
    _default.close()
    _default = Omega(url, bucket=bucket, broker=broker, trusted=trusted)
    return _default


def __getattr__(name: str) -> Any:
    if name not in ("datasets", "models", "runtime", "scripts", "store"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_default, name)
