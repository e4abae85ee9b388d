"""Hooks into a run. They run on every worker, with figures that are already merged over all of them."""

from __future__ import annotations

from typing import Any

__all__ = ["Callback", "Run"]


class Run:
    """The run as a callback sees it.

    Attributes:
        rank: This worker's number; write files where it is 0.
        size: How many workers there are.
        model: This worker's replica of the model.
        optimizer: Its optimizer.
        epoch: The epoch that runs or has just ended, counted from 1.
        step: Optimizer steps since the model was new.
    """

    def __init__(self, *, rank: int, size: int, replica: Any) -> None:
        self.rank = rank
        self.size = size
        self.model = replica.model
        self.optimizer = replica.optimizer
        self.epoch = 0
        self.step = 0
        self._reason: str | None = None

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after this epoch, on all workers."""
        self._reason = reason

    @property
    def stopping(self) -> str | None:
        """Why the run is to end, or None."""
        return self._reason


class Callback:
    """Override what you need; all hooks run on every worker."""

    def on_run_begin(self, run: Run) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, run: Run) -> None:
        """Before each epoch."""

    def on_step_end(self, run: Run) -> None:
        """After each optimizer step."""

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        """After each epoch, validation included; `logs` is the epoch's row of the history."""

    def on_run_end(self, run: Run) -> None:
        """After the last epoch."""
