"""`TensorBoardCallback`."""

from __future__ import annotations

import time
from numbers import Real
from typing import Any

from kindler.compat.zoo.orca.learn.pytorch.callbacks.base import Callback
from kindler.errors import ConfigError
from kindler.train.tensorboard import TensorBoard, log_folder

__all__ = ["TensorBoardCallback"]


class TensorBoardCallback(Callback):
    """Writes event files for TensorBoard, from the first worker.

    Args:
        log_dir: The folder; None is "runs".
        freq: "epoch", "batch", or a number of steps; steps are counted over all epochs.
    """

    def __init__(self, log_dir: str | None = None, freq: Any = "epoch", **kwargs: Any) -> None:
        if freq not in ("epoch", "batch") and not (isinstance(freq, int) and freq > 0):
            raise ConfigError(f"freq must be 'epoch', 'batch' or a number of steps; received {freq!r}.")
        self.log_dir, self.every = log_dir or "runs", 1 if freq == "batch" else freq
        self._open: Any = None
        self._board: Any = None

    def before_run(self, runner: Any) -> None:
        """Open the file."""
        if runner.rank == 0:
            self._open = TensorBoard(log_folder(self.log_dir))
            self._board = self._open.__enter__()

    def after_train_iter(self, runner: Any) -> None:
        """Write the loss of a step."""
        if self._board is not None and self.every != "epoch" and runner.global_step % self.every == 0:
            self._add("train_loss", float(runner.loss), runner.global_step)

    def after_train_epoch(self, runner: Any) -> None:
        """Write the figures of an epoch."""
        if self._board is not None:
            for name, value in runner.epoch_stats.items():
                if isinstance(value, Real) and name not in ("epoch", "batch_count"):
                    self._add(name, float(value), runner.epochs)
            self._board.flush()

    def after_run(self, runner: Any) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = self._board = None

    def _add(self, tag: str, value: float, step: int) -> None:
        part = "validation" if tag.startswith("val_") else "train"
        self._board.add(part, tag, value, step, time.time())
