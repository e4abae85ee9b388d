"""The contract of a sync: how the replicas of a run agree.

`registry.py` has a row for each sync. A sync knows of a replica only what `Replica` says here, so it works
with every framework. What travels, and through what, is in `kindler/collective.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kindler.collective import Array, Collective, GradientExchange, Gradients
from kindler.config import RunSettings
from kindler.group import Group
from kindler.sync.host_group import HostGroup


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Which sync a run uses.

    Attributes:
        name: Its row in the registry.
        options: Keyword arguments of its own.
    """

    name: str = "allreduce"
    options: dict[str, Any] = field(default_factory=dict)


class Replica(Protocol):
    """What a sync needs of a replica; `kindler.frameworks.contract` has the whole of it."""

    epoch: int
    step: int

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state; what training changes besides parameters is merged through this."""

    def fuse(
        self, worker: Group, settings: RunSettings, strategy: str, **options: Any
    ) -> GradientExchange | None:
        """From now on let `train_step` exchange gradients itself; None where the framework cannot."""

    def train_step(self, batch: Any) -> None:
        """A whole step: alone, or fused."""

    def names(self) -> list[str]:
        """What the trained parameters are called."""

    def read(self) -> list[Array]:
        """Copies of the trained parameters, in the order of `names`."""

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters."""

    def read_into(self, arrays: Sequence[Array]) -> None:
        """Copy the trained parameters into these arrays."""

    def gradients(self, batch: Any) -> Gradients:
        """What this rank's rows say, without moving any parameter."""

    def apply(self, gradients: Sequence[Any]) -> None:
        """One step of the optimizer with these gradients; None leaves a parameter alone, where it can."""

    def pass_step(self) -> None:
        """Let a schedule that moves by steps go on, where others step and this rank has no rows."""

    def rates(self) -> list[float]:
        """The learning rates."""

    def set_rates(self, rates: Sequence[float]) -> None: ...

    def end_epoch(self, logs: Any = None) -> None:
        """Let a schedule that moves by epochs go on."""

    def state(self) -> bytes:
        """All that training continues from."""

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`, or take only the model's weights from it."""


class Sync:
    """How the replicas of one run agree. Made with the run's settings and the options of its `SyncConfig`.

    A run makes and closes one on each worker. At the end of an epoch all ranks meet, whatever the sync. As it
    stands here ranks average their gradients at every step, as numpy arrays.

    Attributes:
        in_step: Whether all ranks meet at every step. Where they do not, checkpoints are written between
            epochs only, and a callback's request for one waits until then.
        ends_at: Optimizer steps after which the run ends; set before `attach`. None where steps end nothing.
    """

    in_step = True
    ends_at: int | None = None

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._collective: Collective | None = None

    def connect(self, worker: Group) -> Collective:
        """The collective of all workers; every rank calls it.

        Through shared memory between ranks of one host, and a ring between hosts.
        """
        settings = self.settings
        return HostGroup(worker, timeout_s=settings.sync_timeout_s, shared_memory=settings.shared_memory)

    @property
    def collective(self) -> Collective:
        """What ranks meet through between steps; there after `attach`."""
        assert self._collective is not None, "attach comes first"
        return self._collective

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return self.collective.waited_s

    def attach(self, replica: Any, worker: Group) -> None:
        """Join the other ranks from rank 0's state on; all of them call it, once, before their first step."""
        self._collective = self.connect(worker)
        replica.join(self._collective)

    def share_steps(self, replica: Any) -> None:
        """After `attach`, for a framework with a loop of its own (`Fitter`): make it step like this."""
        if self.in_step:
            replica.share_steps(self.collective)

    def begin_epoch(self, replica: Any) -> None:
        """Before the first step of an epoch."""

    def step(self, replica: Any, batch: Any) -> None:
        """One step on this rank's rows, of which there may be none."""
        if batch.global_rows:
            mine = replica.gradients(batch)
            replica.apply(self.collective.mean(mine.arrays, mine.weight))

    def stepped(self, replica: Any, rows: int) -> None:
        """After each step that a framework's own loop has made on so many rows of this rank."""

    def catch_up(self, replica: Any) -> None:
        """At the end of an epoch: leave all ranks with the same parameters."""

    def figures(self) -> dict[str, Any]:
        """After `catch_up`: what the history says of the sync in this epoch; the same on all ranks."""
        return {}

    def next_epoch(self, replica: Any, logs: Mapping[str, Any]) -> None:
        """After the callbacks of an epoch, with its row of the history; all ranks call it."""

    def whole(self, replica: Any) -> Any:
        """What checkpoints and the result are made of: has `epoch`, `step`, `state`, `freeze`.

        The replica itself, unless the state of the run is elsewhere. All ranks call it together, and the
        first one uses it before its next step.
        """
        return replica

    def close(self) -> None:
        """Leave the others. Idempotent."""
        if self._collective is not None:
            self._collective.close()


Lockstep = Sync  # the name that plug-ins know
