"""`zoo.orca.common`: the same names as `zoo.orca`."""

from __future__ import annotations

from kindler.compat.zoo.orca import init_orca_context, stop_orca_context
from kindler.compat.zoo.orca.context import OrcaContext

__all__ = ["OrcaContext", "init_orca_context", "stop_orca_context"]
