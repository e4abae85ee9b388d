"""The table of strategies; each row's code loads on first use. The contract is in `contract.py`."""

from __future__ import annotations

from dataclasses import dataclass

from kindler.registry import Registry, Spec
from kindler.strategies import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSpec(Spec):
    """A strategy, and what it needs besides workers.

    Attributes:
        server: Whether it needs parameter servers: ranks of the role "ps" beside the workers.
        divides: Whether it divides the optimizer between workers, which the framework must support.
        cuts: Whether it cuts parameters into parts for that, whatever the optimizer.
        together: Whether its workers must all run at once and end together.
        replaceable: Whether a worker that dies is replaced while the others wait.
    """

    server: bool = False
    divides: bool = False
    cuts: bool = False
    together: bool = True
    replaceable: bool = False


SYNCS: Registry[Spec] = Registry(
    "strategy",
    [
        SyncSpec(name="allreduce", target="kindler.sync.allreduce:AllReduce"),
        SyncSpec(name="async", target="kindler.sync.asynchronous:Asynchronous", server=True, together=False),
        SyncSpec(name="local_sgd", target="kindler.sync.rounds:Rounds", together=False, replaceable=True),
        SyncSpec(name="fsdp", target="kindler.sync.allreduce:Fsdp", divides=True, cuts=True),
        SyncSpec(name="zero1", target="kindler.sync.allreduce:Zero1", divides=True),
    ],
    group="kindler.strategies",
)


def sync_spec(strategy: Strategy) -> SyncSpec:
    """The row of a strategy; a plug-in's plain `Spec` gets the defaults."""
    row = SYNCS.spec(strategy.name)
    return row if isinstance(row, SyncSpec) else SyncSpec(name=row.name, target=row.target)


def servers_of(strategy: Strategy) -> int:
    """The number of parameter servers of a run with this strategy."""
    return int(strategy.options.get("shards", 1)) if sync_spec(strategy).server else 0
