"""`ModelCheckpoint`."""

from __future__ import annotations

from typing import Any

from kindler.compat.zoo.orca.learn.pytorch.callbacks.base import Callback
from kindler.files import split

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(Callback):
    """Saves the model after epochs or steps, from the first worker, and as `last.ckpt` at the end.

    Args:
        filepath: The file; "{epoch}" in it becomes "epoch=3". The suffix ".ckpt" is added.
        save_weights_only: Whether to save weights alone; otherwise it is all that training goes on from.
        by_epoch: Whether `interval` counts epochs; otherwise it counts steps.
        interval: How many of them; -1 is every epoch, or never for steps.
    """

    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"

    def __init__(
        self, filepath: str = "", save_weights_only: bool = False, by_epoch: bool = True, interval: int = -1
    ) -> None:
        self.filepath, self.save_weights_only = str(filepath), save_weights_only
        self.by_epoch, self.interval = by_epoch, interval

    def after_train_epoch(self, runner: Any) -> None:
        """Save after an epoch."""
        if self.by_epoch and runner.epochs % max(1, self.interval) == 0:
            self._save(runner, f"{self._named(runner)}{self.FILE_EXTENSION}")

    def after_train_iter(self, runner: Any) -> None:
        """Save after a step."""
        if not self.by_epoch and self.interval > 0 and runner.global_step % self.interval == 0:
            self._save(runner, f"{self._named(runner)}-step={runner.global_step}{self.FILE_EXTENSION}")

    def after_run(self, runner: Any) -> None:
        """Save the last state."""
        folder, _ = split(self.filepath)
        self._save(runner, f"{folder}/{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")

    def _named(self, runner: Any) -> str:
        return self.filepath.replace("{epoch}", f"epoch={runner.epochs}")

    def _save(self, runner: Any, path: str) -> None:
        if runner.rank == 0:
            runner.save_checkpoint(path, self.save_weights_only)

    @classmethod
    def get_latest_checkpoint(cls, checkpoint_dir: str) -> str:
        """The file `last.ckpt` of a folder."""
        return f"{str(checkpoint_dir).rstrip('/')}/{cls.CHECKPOINT_NAME_LAST}{cls.FILE_EXTENSION}"
