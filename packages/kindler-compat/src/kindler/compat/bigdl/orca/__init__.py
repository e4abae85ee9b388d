"""`bigdl.orca`: the same package as `zoo.orca`, under its later name."""

from __future__ import annotations

from kindler.compat.bigdl.alias import alias
from kindler.compat.zoo.orca import OrcaContext, init_orca_context, stop_orca_context

__all__ = ["OrcaContext", "init_orca_context", "stop_orca_context"]

alias(__name__, "kindler.compat.zoo.orca")
