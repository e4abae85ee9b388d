"""The table of syncs: one is a row, and its code loads on first use. What it promises is in `contract.py`."""

from __future__ import annotations

from dataclasses import dataclass

from kindler.registry import Registry, Spec
from kindler.sync.contract import SyncConfig

__all__ = ["SYNCS", "SyncSpec", "servers_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSpec(Spec):
    """A sync, and what it needs besides workers.

    Attributes:
        server: Whether its workers need parameter servers: ranks of the role "ps" that run beside them.
        divides: Whether it divides the optimizer between workers, which a framework must know how to do.
        cuts: Whether it cuts parameters in parts for that, whatever the optimizer.
    """

    server: bool = False
    divides: bool = False
    cuts: bool = False


SYNCS: Registry[Spec] = Registry(
    "sync",
    [
        SyncSpec(name="allreduce", target="kindler.sync.allreduce:AllReduce"),
        SyncSpec(name="async", target="kindler.sync.asynchronous:Asynchronous", server=True),
        SyncSpec(name="rounds", target="kindler.sync.rounds:Rounds"),
        SyncSpec(name="fsdp", target="kindler.sync.fsdp:Fsdp", divides=True, cuts=True),
        SyncSpec(name="sharded", target="kindler.sync.sharded:Sharded", divides=True),
    ],
    group="kindler.syncs",
)


def servers_of(config: SyncConfig) -> int:
    """How many parameter servers a run with this sync has beside its workers."""
    row = SYNCS.spec(config.name)
    return int(config.options.get("shards", 1)) if isinstance(row, SyncSpec) and row.server else 0
