"""The contracts of a sync: how the replicas of a run agree, and the collective that they agree through.

`registry.py` has a row for each sync. A sync knows of a replica only what `Replica` says here, so it works
with every framework. What travels, and through what, is in `kindler/collective.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kindler.collective import Array, Collective, Gradients
from kindler.config import RunSettings


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Which sync a run uses.

    Attributes:
        name: Its row in the registry.
        options: Keyword arguments of its own.
    """

    name: str = "allreduce"
    options: dict[str, Any] = field(default_factory=dict)


class Worker(Protocol):
    """The part of the engine's worker that every sync can rely on."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, data: bytes) -> list[bytes]: ...
    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]: ...


class Replica(Protocol):
    """What a sync needs of a replica; `kindler.frameworks.contract` has the whole of it.

    Attributes:
        device: Where it computes.
        fuses: The library whose gradients the replica can exchange within its own step ("torch"), or "".
    """

    device: Any
    fuses: str

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state; what training changes besides parameters is merged through this."""

    def fuse(self, exchange: Any) -> None:
        """From now on let `train_step` exchange gradients itself; only where `fuses` says so."""

    def divide(self, exchange: Any, asked: str | None, *, one_copy: bool = False) -> None:
        """As `fuse`, and let the optimizer move only what this rank owns; only where `fuses` says so."""

    def train_step(self, batch: Any) -> None:
        """A whole step: alone, or fused."""

    def names(self) -> list[str]:
        """What the trained parameters are called."""

    def read(self) -> list[Array]:
        """Copies of the trained parameters, in the order of `names`."""

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters."""

    def gradients(self, batch: Any) -> Gradients:
        """What this rank's rows say, without moving any parameter."""

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of the optimizer with these gradients."""

    def state(self) -> bytes:
        """All that training continues from."""


class Sync(Protocol):
    """How the replicas of one run agree. Made with the run's settings and the options of its `SyncConfig`.

    A run makes and closes one on each worker. At the end of an epoch all ranks meet, whatever the sync.

    Attributes:
        in_step: Whether all ranks meet at every step. Where they do not, checkpoints are written between
            epochs only, and a callback's request for one waits until then.
        collective: What ranks meet through between steps; there after `attach`.
        waited_s: Seconds that this rank has waited for others so far.
        ends_at: Optimizer steps after which the run ends; set before `attach`. None where steps end nothing.
    """

    in_step: bool
    ends_at: int | None

    @property
    def collective(self) -> Collective: ...
    @property
    def waited_s(self) -> float: ...

    def attach(self, replica: Any, worker: Any) -> None:
        """Join the other ranks; all of them call it, once, before their first step."""

    def share_steps(self, replica: Any) -> None:
        """After `attach`, for a framework with a loop of its own (`Fitter`): make it step like this."""

    def begin_epoch(self, replica: Any) -> None:
        """Before the first step of an epoch."""

    def step(self, replica: Any, batch: Any) -> None:
        """One step on this rank's rows, of which there may be none."""

    def stepped(self, replica: Any, rows: int) -> None:
        """After each step that a framework's own loop has made on so many rows of this rank."""

    def catch_up(self, replica: Any) -> None:
        """At the end of an epoch: leave all ranks with the same parameters."""

    def figures(self) -> dict[str, Any]:
        """After `catch_up`: what the history says of the sync in this epoch; the same on all ranks."""

    def next_epoch(self, replica: Any, logs: Mapping[str, Any]) -> None:
        """After the callbacks of an epoch, with its row of the history; all ranks call it."""

    def whole(self, replica: Any) -> Any:
        """What checkpoints and the result are made of: has `epoch`, `step`, `state`, `freeze`.

        The replica itself, unless the state of the run is elsewhere. All ranks call it together, and the
        first one uses it before its next step.
        """

    def close(self) -> None:
        """Leave the others. Idempotent."""


class Lockstep:
    """A base for syncs whose ranks average their gradients at every step; `connect` makes the collective.

    Args:
        settings: Time limits and the like.
    """

    in_step = True
    ends_at: int | None = None

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._collective: Collective | None = None

    def connect(self, worker: Any) -> Collective:
        """The collective of all workers; every rank calls it."""
        raise NotImplementedError

    @property
    def collective(self) -> Collective:
        """What ranks meet through."""
        assert self._collective is not None, "attach comes first"
        return self._collective

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return self.collective.waited_s

    def attach(self, replica: Replica, worker: Worker) -> None:
        """Join the other ranks, from rank 0's state on."""
        self._collective = self.connect(worker)
        replica.join(self._collective)

    def share_steps(self, replica: Any) -> None:
        """Where ranks meet at every step, they exchange gradients in the framework's own loop, too."""
        if self.in_step:
            replica.share_steps(self.collective)

    def begin_epoch(self, replica: Any) -> None:
        """Nothing is to be prepared."""

    def step(self, replica: Replica, batch: Any) -> None:
        """One step with the mean over the rows of all ranks."""
        if batch.global_rows:
            mine = replica.gradients(batch)
            replica.apply(self.collective.mean(mine.arrays, mine.weight))

    def stepped(self, replica: Any, rows: int) -> None:
        """The step was that of all ranks."""

    def catch_up(self, replica: Replica) -> None:
        """All ranks have made the same steps: nothing is left to do."""

    def figures(self) -> dict[str, Any]:
        """There is nothing to say."""
        return {}

    def next_epoch(self, replica: Any, logs: Mapping[str, Any]) -> None:
        """All ranks are the same."""

    def whole(self, replica: Any) -> Any:
        """Every replica has the state of the run."""
        return replica

    def close(self) -> None:
        """Leave the others. Idempotent."""
        if self._collective is not None:
            self._collective.close()
