"""Callbacks: hooks that run on every worker, with metrics that are already merged over all of them.

The training loop calls them and acts on what they request through `Run`.
"""

from __future__ import annotations

import string
import warnings
from os import PathLike
from typing import Any, Literal

from kindler.errors import ConfigError
from kindler.files import folder_at, place, split
from kindler.train.checkpoint_file import Header, write_checkpoint
from kindler.train.metric_names import Direction, improves, parse

Mode = Literal["auto", "min", "max"]


class Run:
    """The run as a callback sees it.

    Attributes:
        rank: This worker's number, from 0; write files on rank 0 only.
        size: The number of workers.
        model: This worker's replica of the model.
        optimizer: The replica's optimizer.
        replica: The replica itself, of a class of its framework's.
        epoch: The current epoch, counted from 1.
        step: Optimizer steps since the model was created.
        steps: Steps per epoch; None if not known before the epoch ends.
    """

    def __init__(
        self, *, rank: int, size: int, replica: Any, steps: int | None = 0, framework: str = "torch"
    ) -> None:
        self.rank = rank
        self.size = size
        self.model = replica.model
        self.optimizer = replica.optimizer
        self.epoch = 0
        self.step = 0
        self.steps = steps
        self.replica = replica
        self._framework = framework
        self._reason: str | None = None
        self._save = False

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, for the first parameter group."""
        return float(self.replica.learning_rate())

    def stop(self, reason: str = "requested by a callback") -> None:
        """Stop training after this epoch, on all workers."""
        self._reason = reason

    @property
    def stopping(self) -> str | None:
        """The reason passed to `stop`, or None."""
        return self._reason

    def save_checkpoint(self) -> None:
        """Request a checkpoint in `model_dir` after this step; one worker's request is enough."""
        self._save = True

    def take_save_request(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        asked, self._save = self._save, False
        return asked

    def weights(self) -> bytes:
        """The model's current weights, in the format that `Estimator.load` reads."""
        weights: bytes = self.replica.weights()
        return weights

    def load_weights(self, weights: bytes) -> None:
        """Load weights that `weights` returned; call it with the same weights on every worker."""
        self.replica.load_weights(weights)

    def write_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write the full training state to a file that `Estimator.load_checkpoint` reads."""
        header = Header(framework=self._framework, epoch=self.epoch, step=self.step)
        write_checkpoint(path, header, self.replica.state())


class Callback:
    """Base class of callbacks. Override the hooks you need; they run on every worker."""

    def on_run_begin(self, run: Run) -> None:
        """Called before the first epoch."""

    def on_epoch_begin(self, run: Run) -> None:
        """Called before each epoch."""

    def on_step_begin(self, run: Run) -> None:
        """Called before each optimizer step."""

    def on_step_end(self, run: Run) -> None:
        """Called after each optimizer step."""

    def on_validation_begin(self, run: Run) -> None:
        """Called before validation."""

    def on_validation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Called after validation; the names in `logs` begin with "val_"."""

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Called after each epoch and its validation; `logs` is the epoch's row of the history."""

    def on_run_end(self, run: Run) -> None:
        """Called after the last epoch."""

    def state_dict(self) -> dict[str, Any]:
        """State to save in checkpoints: numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class EarlyStopping(Callback):
    """Stops training when a metric stops improving.

    Args:
        monitor: The metric to watch, by its name in the history. Epochs without validation are not counted.
        patience: Epochs in a row without improvement after which training stops; as in Keras, 0 means 1.
        min_delta: The smallest change that counts as an improvement.
        mode: "min" if lower is better, "max" if higher is; "auto" infers it from the name.
        restore_best: Whether to end with the weights of this run's best epoch instead of the last.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 0,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:
        self.monitor, self.way = _monitored("EarlyStopping", monitor, mode)
        _refuse_negative("EarlyStopping", patience=patience, min_delta=min_delta)
        self.patience = patience
        self.min_delta = min_delta
        self.restore_best = restore_best
        self.best: float | None = None
        self.best_epoch = 0
        self.wait = 0
        self._weights: bytes | None = None

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Compare this epoch with the best one so far."""
        value = watched_value("EarlyStopping", self.monitor, logs)
        if value is None:
            return
        if improves(value, self.best, self.way, min_delta=self.min_delta):
            self.best, self.best_epoch, self.wait = value, run.epoch, 0
            if self.restore_best:
                self._weights = run.weights()
            return
        self.wait += 1
        if self.wait >= self.patience:
            best = "never a number" if self.best is None else f"{self.best:.6g} in epoch {self.best_epoch}"
            run.stop(f"{self.monitor} did not improve for {self.wait} epochs; best: {best}")

    def on_run_end(self, run: Run) -> None:
        """Restore the best weights if `restore_best` is set."""
        if not self.restore_best or self.best_epoch in (0, run.epoch):
            return
        if self._weights is not None:
            run.load_weights(self._weights)
        elif run.rank == 0:
            warnings.warn(
                f"EarlyStopping(restore_best=True): the best epoch ({self.best_epoch}) is from before the run"
                " resumed from a checkpoint, and its weights are not kept; using those of the last epoch.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """The best value, its epoch, and the epochs since then; not the weights."""
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self.wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from a checkpoint."""
        self.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]


class ModelCheckpoint(Callback):
    """Saves the model to a file after each epoch, from the first worker only.

    A file is either complete or absent. On a cluster, use a path that the first worker's machine shares with
    whoever reads the file, or a URL.

    Args:
        path: The file; may contain the epoch and its metrics: "run/{epoch:03d}-{val_loss:.3f}.pt".
        monitor: The metric that decides with `save_best_only`.
        mode: "min" if lower is better, "max" if higher is; "auto" infers it from the name.
        save_best_only: Whether to save only epochs that improve on all earlier ones.
        save_weights_only: Whether to save weights alone, for `Estimator.load`, instead of the full training
            state, for `Estimator.load_checkpoint`.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        monitor: str | None = None,
        mode: Mode = "auto",
        save_best_only: bool = False,
        save_weights_only: bool = False,
    ) -> None:
        if save_best_only and monitor is None:
            raise ConfigError(
                "ModelCheckpoint(save_best_only=True) requires monitor=...\n"
                "Hint: ModelCheckpoint(path, monitor='val_loss', save_best_only=True)."
            )
        self.path = place(path)  # workers may stand elsewhere
        self.monitor: str | None = None
        self.way: Direction = "min"
        if monitor is not None:
            self.monitor, self.way = _monitored("ModelCheckpoint", monitor, mode)
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.best: float | None = None

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Write the file, unless only better epochs are saved and this is none."""
        if not self._improved(logs) or run.rank != 0:
            return
        path = _filled(self.path, {**logs, "epoch": run.epoch, "step": run.step})
        if self.save_weights_only:
            folder, name = split(path)
            folder_at(folder).write(name, [run.weights()])
        else:
            run.write_checkpoint(path)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue comparing from a checkpoint."""
        self.best = state["best"]

    def _improved(self, logs: dict[str, Any]) -> bool:
        if not self.save_best_only or self.monitor is None:
            return True
        value = watched_value("ModelCheckpoint", self.monitor, logs)
        if value is None or not improves(value, self.best, self.way):
            return False
        self.best = value
        return True


class LearningRateMonitor(Callback):
    """Adds "lr" to the history: the learning rate at the beginning of each epoch."""

    def __init__(self) -> None:
        self._rate = 0.0

    def on_epoch_begin(self, run: Run) -> None:
        """Read the rate before schedules change it."""
        self._rate = run.learning_rate

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Add it to the epoch's logs."""
        logs["lr"] = self._rate


def _monitored(who: str, monitor: str, mode: str) -> tuple[str, Direction]:
    if mode == "min":
        return monitor, "min"
    if mode == "max":
        return monitor, "max"
    if mode != "auto":
        raise ConfigError(f"{who}(mode={mode!r}): mode must be 'auto', 'min' or 'max'.")
    return parse(monitor)


def _refuse_negative(who: str, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{who}({name}={value!r}): {name} must be 0 or more.")


def watched_value(who: str, name: str, logs: dict[str, Any]) -> float | None:
    """The metric of that name; None in an epoch without validation."""
    if name in logs:
        return float(logs[name])
    validated = any(known.startswith("val_") for known in logs)
    if name.startswith("val_") and not validated:
        return None
    raise ConfigError(f"{who}(monitor={name!r}): no such metric; available: {sorted(logs)}.")


def _filled(path: str, values: dict[str, Any]) -> str:
    try:
        return string.Formatter().vformat(path, (), values)
    except (LookupError, ValueError) as exc:
        raise ConfigError(
            f"ModelCheckpoint(path={path!r}): cannot be filled in for this epoch ({exc});"
            f" available: {sorted(values)}."
        ) from exc
