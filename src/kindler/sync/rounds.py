"""Rounds: each worker trains alone for a while, then all continue from the mean of their weights.

Each keeps its own optimizer's momentum. A worker that dies is replaced by a process that repeats its work
since the end of the last epoch; the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.collective import Array, Collective
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.sync.host_group import MeanAtHub


class Rounds(Sync):
    in_step = False

    def __init__(self, settings: RunSettings, *, every_steps: int | None = None) -> None:
        super().__init__(settings)
        if every_steps is not None and (
            isinstance(every_steps, bool) or not isinstance(every_steps, int) or every_steps < 1
        ):
            raise ConfigError(
                "strategy='local_sgd': every_steps must be a whole number of at least 1, or None for one "
                "round an"
                f" epoch; received {every_steps!r}."
            )
        self._every = every_steps
        self._steps = self._rows = self._rounds = 0
        self._step = 0

    def connect(self, worker: Group) -> Collective:
        """Through the meeting point if ranks can be replaced; otherwise as all-reduce does."""
        return MeanAtHub(worker) if worker.replaceable else super().connect(worker)

    def attach(self, replica: Any, worker: Group) -> None:
        super().attach(replica, worker)
        self._worker, self._step = worker, replica.step

    def share_steps(self, replica: Any) -> None:
        """The framework's own loop steps alone, and only needs to know what a step without rows is."""
        if replica.may_idle:
            replica.share_steps(_OwnRows())

    def begin_epoch(self, replica: Any) -> None:
        self._rounds = 0
        self._step = replica.step

    def step(self, replica: Any, batch: Any) -> None:
        if batch.rows:
            replica.apply(replica.gradients(batch).arrays)
        else:
            replica.pass_step()
        self._step += 1
        replica.step = self._step  # all ranks are as far, also those that had no rows
        self._stepped(replica, batch.rows)

    def stepped(self, replica: Any, rows: int) -> None:
        self._step = replica.step
        self._stepped(replica, rows)

    def catch_up(self, replica: Any) -> None:
        """Also take part in the rounds of ranks that an interrupt found further in the epoch."""
        while self._meet(replica, ends=True):
            pass

    def figures(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def _stepped(self, replica: Any, rows: int) -> None:
        self._steps, self._rows = self._steps + 1, self._rows + rows
        if self._steps == self._every:
            self._meet(replica)

    def _meet(self, replica: Any, *, ends: bool = False) -> bool:
        """Continue from the mean; return whether some rank will meet the others again in this epoch."""
        going, rows = self._worker.total([not ends, self._rows])
        if rows:
            replica.write(self.collective.mean(replica.read(), float(self._rows)))
            self._rounds += 1
        self._steps = self._rows = 0
        return going > 0


class _OwnRows:
    """Stands in for the collective when a framework's loop steps alone: no rows, zero gradients."""

    rank, size, waited_s = 0, 2, 0.0

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        return [array if weight else np.zeros_like(array) for array in arrays]
