"""`orca.learn.pytorch.callbacks`: hooks, each called with a runner; they run on every worker."""

from __future__ import annotations

import time
from numbers import Real
from typing import Any

from kindler.errors import ConfigError
from kindler.files import split
from kindler.train.summaries import EventFiles, log_folder

__all__ = ["Callback", "MainCallback", "MaxstepsCallback", "ModelCheckpoint", "TensorBoardCallback"]


def _calls(hook: str) -> Any:
    """A hook that by default calls the one of any kind."""
    return lambda self, runner: getattr(self, hook)(runner)


class Callback:
    """Base class of Orca's callbacks. See `runner.Runner` for their argument.

    Hooks of validation are called in `fit` alone, those of prediction never. `after_train_epoch` comes after
    the epoch's validation; `runner.epoch_stats` has its figures.
    """

    def before_run(self, runner: Any) -> None: ...
    def after_run(self, runner: Any) -> None: ...

    def before_epoch(self, runner: Any) -> None: ...
    def after_epoch(self, runner: Any) -> None: ...
    def before_iter(self, runner: Any) -> None: ...
    def after_iter(self, runner: Any) -> None: ...

    before_train_epoch = before_val_epoch = before_pred_epoch = _calls("before_epoch")
    after_train_epoch = after_val_epoch = after_pred_epoch = _calls("after_epoch")
    before_train_iter = before_val_iter = before_pred_iter = _calls("before_iter")
    after_train_iter = after_val_iter = after_pred_iter = _calls("after_iter")

    def every_n_epoch(self, runner: Any, n: int) -> bool:
        return n > 0 and runner.epochs % n == 0

    def every_n_iter(self, runner: Any, n: int) -> bool:
        return n > 0 and (runner.global_step + 1) % n == 0


class MainCallback(Callback):
    """Computes outputs and loss of a batch; override `on_iter_forward`, or those of training or validation.

    What is overridden sets `runner.output`, `runner.target` and `runner.loss`, a mean over the rows of
    `runner.batch`, which has the features and then the labels.
    """

    def on_iter_forward(self, runner: Any) -> None:
        *features, target = runner.batch
        runner.output, runner.target = runner.model(*features), target
        outputs = runner.output if isinstance(runner.output, tuple | list) else [runner.output]
        runner.loss = runner.criterion(*outputs, target)

    on_train_forward = on_val_forward = _calls("on_iter_forward")

    def on_pred_forward(self, runner: Any) -> None:
        """Cannot be overridden: change what the model returns, or the result of `predict`."""

    def on_iter_backward(self, runner: Any) -> None:
        """Cannot be overridden: workers exchange gradients while they are computed."""

    def on_lr_adjust(self, runner: Any) -> None:
        """Cannot be overridden: `scheduler_creator` makes the schedule."""


class MaxstepsCallback(Callback):
    """Ends training after the epoch in which so many steps are made; `fit(max_steps=...)` ends it there."""

    def __init__(self, max_step: int) -> None:
        self.max_step = max_step

    def after_train_iter(self, runner: Any) -> None:
        if runner.global_step >= self.max_step:
            runner.stop = True


class ModelCheckpoint(Callback):
    """Saves the model after epochs or steps, from the first worker, and as `last.ckpt` at the end."""

    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"

    def __init__(
        self, filepath: str = "", save_weights_only: bool = False, by_epoch: bool = True, interval: int = -1
    ) -> None:
        self.filepath, self.save_weights_only = str(filepath), save_weights_only
        self.by_epoch, self.interval = by_epoch, interval

    def after_train_epoch(self, runner: Any) -> None:
        if self.by_epoch and runner.epochs % max(1, self.interval) == 0:
            self._save(runner, f"{self._path(runner)}{self.FILE_EXTENSION}")

    def after_train_iter(self, runner: Any) -> None:
        if not self.by_epoch and self.interval > 0 and runner.global_step % self.interval == 0:
            self._save(runner, f"{self._path(runner)}-step={runner.global_step}{self.FILE_EXTENSION}")

    def after_run(self, runner: Any) -> None:
        self._save(runner, self.get_latest_checkpoint(split(self.filepath)[0]))

    def _path(self, runner: Any) -> str:
        return self.filepath.replace("{epoch}", f"epoch={runner.epochs}")

    def _save(self, runner: Any, path: str) -> None:
        if runner.rank == 0:
            runner.save_checkpoint(path, self.save_weights_only)

    @classmethod
    def get_latest_checkpoint(cls, checkpoint_dir: str) -> str:
        return f"{str(checkpoint_dir).rstrip('/')}/{cls.CHECKPOINT_NAME_LAST}{cls.FILE_EXTENSION}"


class TensorBoardCallback(Callback):
    def __init__(self, log_dir: str | None = None, freq: Any = "epoch", **kwargs: Any) -> None:
        if freq not in ("epoch", "batch") and not (isinstance(freq, int) and freq > 0):
            raise ConfigError(f"freq must be 'epoch', 'batch' or a number of steps; received {freq!r}.")
        self.log_dir, self.every = log_dir or "runs", 1 if freq == "batch" else freq
        self._open: Any = None
        self._board: Any = None

    def before_run(self, runner: Any) -> None:
        if runner.rank == 0:
            self._open = EventFiles(log_folder(self.log_dir))
            self._board = self._open.__enter__()

    def after_train_iter(self, runner: Any) -> None:
        if self._board is not None and self.every != "epoch" and runner.global_step % self.every == 0:
            self._add("train_loss", float(runner.loss), runner.global_step)

    def after_train_epoch(self, runner: Any) -> None:
        if self._board is not None:
            for name, value in runner.epoch_stats.items():
                if isinstance(value, Real) and name not in ("epoch", "batch_count"):
                    self._add(name, float(value), runner.epochs)
            self._board.flush()

    def after_run(self, runner: Any) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = self._board = None

    def _add(self, tag: str, value: float, step: int) -> None:
        part = "validation" if tag.startswith("val_") else "train"
        self._board.add(part, tag, value, step, time.time())
