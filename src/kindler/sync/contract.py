"""The contract of a sync: how the replicas of a run agree.

`registry.py` has a row for each sync. A sync knows only the `Replica` below, so it works with every
framework. What travels, and through what, is in `kindler/collective.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kindler.collective import Array, Collective, GradientExchange, Gradients
from kindler.config import RunSettings
from kindler.group import Group
from kindler.sync.host_group import HostGroup


class Replica(Protocol):
    """What a sync needs of a replica; `kindler.frameworks.contract` has all of it."""

    epoch: int
    step: int

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state; state other than parameters is merged through this collective."""

    def fuse(
        self, worker: Group, settings: RunSettings, strategy: str, **options: Any
    ) -> GradientExchange | None:
        """Let `train_step` exchange gradients itself from now on; None if the framework cannot."""

    def train_step(self, batch: Any) -> None:
        """A whole step: alone, or fused."""

    def names(self) -> list[str]:
        """The names of the trained parameters."""

    def read(self) -> list[Array]:
        """Copies of the trained parameters, in the order of `names`."""

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters."""

    def read_into(self, arrays: Sequence[Array]) -> None:
        """Copy the trained parameters into these arrays."""

    def gradients(self, batch: Any) -> Gradients:
        """The gradients of this rank's rows; moves no parameter."""

    def apply(self, gradients: Sequence[Any]) -> None:
        """One optimizer step with these gradients; None leaves a parameter alone, if supported."""

    def pass_step(self) -> None:
        """Advance a per-step schedule when others step and this rank has no rows."""

    def rates(self) -> list[float]:
        """The learning rates."""

    def set_rates(self, rates: Sequence[float]) -> None: ...

    def end_epoch(self, logs: Any = None) -> None:
        """Advance a per-epoch schedule."""

    def state(self) -> bytes:
        """Everything that training continues from."""

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Continue from `state`, or take only the model's weights from it."""


class Sync:
    """How the replicas of one run agree. Each worker creates and closes one per run.

    At the end of an epoch all ranks meet, whatever the sync. This base class averages gradients at every
    step, as numpy arrays.

    Attributes:
        in_step: Whether all ranks meet at every step. If not, checkpoints are written only between epochs,
            and a callback's request for one waits until then.
        regroups: Whether each rank has all of the run's state but what is its own within an epoch, so that
            any can hand it to a process that takes another's place (`Group.regroup`).
        ends_at: Optimizer steps after which the run ends, set before `attach`. None if steps do not end it.
    """

    in_step = True
    regroups = False
    ends_at: int | None = None

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._collective: Collective | None = None

    def connect(self, worker: Group) -> Collective:
        """Create the collective of all workers; every rank calls it.

        The default uses shared memory between ranks of one host, and a ring between hosts.
        """
        settings = self.settings
        return HostGroup(worker, timeout_s=settings.sync_timeout_s, shared_memory=settings.shared_memory)

    @property
    def collective(self) -> Collective:
        """What ranks meet through between steps; set by `attach`."""
        assert self._collective is not None, "attach comes first"
        return self._collective

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return self.collective.waited_s

    def attach(self, replica: Any, worker: Group) -> None:
        """Join the other ranks from rank 0's state; all ranks call it once, before their first step."""
        self._collective = self.connect(worker)
        replica.join(self._collective)

    def attach_again(self, replica: Any, worker: Group, join: Callable[[Collective], None]) -> None:
        """If it `regroups`: as `attach`, on all ranks, when another process has taken the place of one.

        Args:
            replica: This rank's replica.
            worker: This worker.
            join: Makes the replicas continue from one state, through the new collective.
        """
        self.close()
        self._collective = self.connect(worker)
        join(self._collective)

    def share_steps(self, replica: Any) -> None:
        """After `attach`: make a framework's own loop (`Fitter`) step like this sync."""
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
        """Called after each step that a framework's own loop made on `rows` rows of this rank."""

    def catch_up(self, replica: Any) -> None:
        """At the end of an epoch: leave all ranks with the same parameters."""

    def figures(self) -> dict[str, Any]:
        """After `catch_up`: the epoch's figures for the history; the same on all ranks."""
        return {}

    def next_epoch(self, replica: Any, logs: Mapping[str, Any]) -> None:
        """After an epoch's callbacks, with its row of the history; all ranks call it."""

    def whole(self, replica: Any) -> Any:
        """The source of checkpoints and of the result; has `epoch`, `step`, `state` and `freeze`.

        The replica itself, unless the run's state is elsewhere. All ranks call it together, and the first one
        uses it before its next step.
        """
        return replica

    def close(self) -> None:
        """Leave the others. Idempotent."""
        if self._collective is not None:
            self._collective.close()


Lockstep = Sync  # the name that plug-ins know
