"""Hooks into a run. They run on every worker, with figures that are already merged over all of them.

The loop calls them. What it does with the wishes that they leave in `Run` is its own business.
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

__all__ = ["Callback", "EarlyStopping", "LearningRateMonitor", "ModelCheckpoint", "Run"]

Mode = Literal["auto", "min", "max"]


class Run:
    """The run as a callback sees it.

    Attributes:
        rank: This worker's number; write files where it is 0.
        size: How many workers there are.
        model: This worker's replica of the model.
        optimizer: Its optimizer.
        epoch: The epoch that runs or has just ended, counted from 1.
        step: Optimizer steps since the model was new.
        steps: Steps of an epoch; None where that shows only at its end.
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
        self._replica = replica
        self._framework = framework
        self._reason: str | None = None
        self._save = False

    @property
    def learning_rate(self) -> float:
        """The rate of the next step (of the first parameter group)."""
        return float(self._replica.learning_rate())

    def stop(self, reason: str = "requested by a callback") -> None:
        """End the run after this epoch, on all workers."""
        self._reason = reason

    @property
    def stopping(self) -> str | None:
        """Why the run is to end, or None."""
        return self._reason

    def save_checkpoint(self) -> None:
        """Ask for a checkpoint in `model_dir` after this step; one worker that asks is enough."""
        self._save = True

    def take_save_request(self) -> bool:
        """Whether a checkpoint was asked for since this was last called."""
        asked, self._save = self._save, False
        return asked

    def weights(self) -> bytes:
        """The model's weights now, in the format that `Estimator.load` reads."""
        weights: bytes = self._replica.weights()
        return weights

    def load_weights(self, weights: bytes) -> None:
        """Give the model weights that `weights` returned; on every worker the same."""
        self._replica.load_weights(weights)

    def write_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write all that training goes on from to a file that `Estimator.load_checkpoint` reads."""
        header = Header(framework=self._framework, epoch=self.epoch, step=self.step)
        write_checkpoint(path, header, self._replica.state())


class Callback:
    """Override what you need; all hooks run on every worker."""

    def on_run_begin(self, run: Run) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, run: Run) -> None:
        """Before each epoch."""

    def on_step_begin(self, run: Run) -> None:
        """Before each optimizer step."""

    def on_step_end(self, run: Run) -> None:
        """After each optimizer step."""

    def on_validation_begin(self, run: Run) -> None:
        """Before the validation data is judged."""

    def on_validation_end(self, run: Run, logs: dict[str, Any]) -> None:
        """After it was; `logs` has its figures, with "val_" before their names."""

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        """After each epoch, validation included; `logs` is the epoch's row of the history."""

    def on_run_end(self, run: Run) -> None:
        """After the last epoch."""

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must remember; numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `state_dict` returned."""


class EarlyStopping(Callback):
    """Ends the run when a figure stops getting better.

    Args:
        monitor: The figure: a name of the history, as "val_loss". Epochs without validation do not count.
        patience: So many epochs in a row may pass without a better one; as in Keras, 0 is like 1.
        min_delta: A figure counts as better only if it is so by more than this.
        mode: "min" if less is better, "max" if more is; "auto" knows it from the name.
        restore_best: End with the weights of the best epoch of this run rather than those of the last.
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
        """Compare the epoch with the best one."""
        value = _figure("EarlyStopping", self.monitor, logs)
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
        """Bring back the best weights, if they are wanted."""
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
        """The best figure, its epoch, and how many epochs have passed since; not its weights."""
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self.wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        self.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]


class ModelCheckpoint(Callback):
    """Writes the model to a file after each epoch, once, from the first worker.

    The file appears whole or not at all. On a cluster the path must be one that the first worker's machine
    shares with whoever reads it.

    Args:
        path: Where; may name the epoch and its figures: "run/{epoch:03d}-{val_loss:.3f}.pt".
        monitor: With `save_best_only`, the figure that decides.
        mode: "min" if less of it is better, "max" if more is; "auto" knows it from the name.
        save_best_only: Write only after an epoch that is better than all before.
        save_weights_only: Write what `Estimator.load` reads, not what `Estimator.load_checkpoint` does.
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
        """Write the file, if this epoch deserves one."""
        if not self._deserved(logs) or run.rank != 0:
            return
        path = _filled(self.path, {**logs, "epoch": run.epoch, "step": run.step})
        if self.save_weights_only:
            folder, name = split(path)
            folder_at(folder).write(name, [run.weights()])
        else:
            run.write_checkpoint(path)

    def state_dict(self) -> dict[str, Any]:
        """The best figure so far."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on comparing with it."""
        self.best = state["best"]

    def _deserved(self, logs: dict[str, Any]) -> bool:
        if not self.save_best_only or self.monitor is None:
            return True
        value = _figure("ModelCheckpoint", self.monitor, logs)
        if value is None or not improves(value, self.best, self.way):
            return False
        self.best = value
        return True


class LearningRateMonitor(Callback):
    """Adds "lr" to the history: the rate with which each epoch began."""

    def __init__(self) -> None:
        self._rate = 0.0

    def on_epoch_begin(self, run: Run) -> None:
        """Note the rate before schedules move it."""
        self._rate = run.learning_rate

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        """Add it to the epoch's figures."""
        logs["lr"] = self._rate


def _monitored(who: str, monitor: str, mode: str) -> tuple[str, Direction]:
    if mode == "min":
        return monitor, "min"
    if mode == "max":
        return monitor, "max"
    if mode != "auto":
        raise ConfigError(f"{who}(mode={mode!r}): mode must be 'auto', 'min' or 'max'.")
    return parse(monitor)


def _refuse_negative(who: str, **given: float) -> None:
    for name, value in given.items():
        if not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{who}({name}={value!r}): {name} must be 0 or more.")


def _figure(who: str, name: str, logs: dict[str, Any]) -> float | None:
    """The figure of that name; None in an epoch without validation."""
    if name in logs:
        return float(logs[name])
    validated = any(known.startswith("val_") for known in logs)
    if name.startswith("val_") and not validated:
        return None
    raise ConfigError(f"{who}(monitor={name!r}): no such metric; available: {sorted(logs)}.")


def _filled(path: str, figures: dict[str, Any]) -> str:
    try:
        return string.Formatter().vformat(path, (), figures)
    except (LookupError, ValueError) as exc:
        raise ConfigError(
            f"ModelCheckpoint(path={path!r}): cannot be filled in for this epoch ({exc});"
            f" available: {sorted(figures)}."
        ) from exc
