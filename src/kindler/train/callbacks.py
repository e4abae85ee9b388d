"""Callbacks: hooks that run on every worker, or once on the driver.

Worker callbacks get metrics merged over all workers, and the loop acts on what they request through `Run`.
Driver callbacks stay where `fit` was called, and live on when workers are lost.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from kindler.errors import ConfigError
from kindler.files import folder_at, place, split
from kindler.train.checkpoints import Header, write_checkpoint
from kindler.train.metric_names import Direction, improves, parse
from kindler.train.options import FitOptions
from kindler.train.summaries import log_folder

Mode = Literal["auto", "min", "max"]
RunStatus = Literal["finished", "failed", "killed"]
Plain = str | int | float | bool

_OF_OPTIONS = ("batch_size", "epochs", "steps_per_epoch", "max_steps", "shuffle")
_OF_SPEC = ("backend", "precision", "clip_norm", "clip_value", "accumulation_steps", "scheduler_step")


class Run:
    """The run as a callback sees it.

    Attributes:
        rank: This worker's number, from 0; write files on rank 0 only.
        size: The number of workers.
        model: This worker's replica of the model.
        optimizer: The replica's optimizer.
        replica: The replica itself, an object of its framework.
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
        """Request a checkpoint of `fit(checkpoint=...)` after this step; one worker's request is enough."""
        self._save = True

    def take_save_request(self) -> bool:
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
        restore_best_weights: Whether to end with the weights of this run's best epoch instead of the last.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 0,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best_weights: bool = False,
    ) -> None:
        self.monitor, self.way = _monitored("EarlyStopping", monitor, mode)
        for name, value in (("patience", patience), ("min_delta", min_delta)):
            if not isinstance(value, int | float) or value < 0:
                raise ConfigError(f"EarlyStopping({name}={value!r}): {name} must be 0 or more.")
        self.patience = patience
        self.min_delta = min_delta
        self.restore_best_weights = restore_best_weights
        self.best: float | None = None
        self.best_epoch = 0
        self.wait = 0
        self._weights: bytes | None = None

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        value = watched_value("EarlyStopping", self.monitor, logs)
        if value is None:
            return
        if improves(value, self.best, self.way, min_delta=self.min_delta):
            self.best, self.best_epoch, self.wait = value, run.epoch, 0
            if self.restore_best_weights:
                self._weights = run.weights()
            return
        self.wait += 1
        if self.wait >= self.patience:
            best = "never a number" if self.best is None else f"{self.best:.6g} in epoch {self.best_epoch}"
            run.stop(f"{self.monitor} did not improve for {self.wait} epochs; best: {best}")

    def on_run_end(self, run: Run) -> None:
        if not self.restore_best_weights or self.best_epoch in (0, run.epoch):
            return
        if self._weights is not None:
            run.load_weights(self._weights)
        elif run.rank == 0:
            warnings.warn(
                f"EarlyStopping(restore_best_weights=True): the best epoch ({self.best_epoch}) is from before"
                " the run resumed from a checkpoint, and its weights are not kept; using those of the last"
                " epoch.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self.wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]


class ModelCheckpoint(Callback):
    """Saves the model to a file after each epoch, from the first worker only.

    A file is either complete or absent. On a cluster, use a path that the first worker's machine shares with
    the reader of the file, or a URL.

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
        if not self._improved(logs) or run.rank != 0:
            return
        values = {**logs, "epoch": run.epoch, "step": run.step}
        try:
            path = self.path.format_map(values)
        except (LookupError, ValueError) as exc:
            raise ConfigError(
                f"ModelCheckpoint(path={self.path!r}): cannot be filled in for this epoch ({exc});"
                f" available: {sorted(values)}."
            ) from exc
        if self.save_weights_only:
            folder, name = split(path)
            folder_at(folder).write(name, [run.weights()])
        else:
            run.write_checkpoint(path)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        self._rate = run.learning_rate

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        logs["lr"] = self._rate


def _monitored(who: str, monitor: str, mode: Mode) -> tuple[str, Direction]:
    if mode not in get_args(Mode):
        raise ConfigError(f"{who}(mode={mode!r}): mode must be 'auto', 'min' or 'max'.")
    return parse(monitor) if mode == "auto" else (monitor, mode)


def watched_value(who: str, name: str, logs: dict[str, Any]) -> float | None:
    if name in logs:
        return float(logs[name])
    validated = any(known.startswith("val_") for known in logs)
    if name.startswith("val_") and not validated:
        return None
    raise ConfigError(f"{who}(monitor={name!r}): no such metric; available: {sorted(logs)}.")


class DriverCallback:
    """A callback that runs once, in the process that called `fit`, for models of any framework.

    Use it for what must happen once per run rather than on every worker: loggers, notifications, progress
    displays. Pass it to `fit(callbacks=[...])` along with other callbacks, and override the hooks you need.
    """

    def on_run_begin(self, params: Mapping[str, Any]) -> None:
        """Called before any worker starts, with the arguments of `fit`. An exception ends the run."""

    def on_workers_ready(self, workers: int) -> None:
        """Called when this many workers have started; again when lost workers were replaced."""

    def on_progress(self, fields: Mapping[str, Any]) -> None:
        """Called with what workers report in the middle of an epoch, several times a second.

        It must be quick. An exception ends the run at once, as one of `on_epoch_end` does.
        """

    def on_epoch_end(self, logs: Mapping[str, Any]) -> None:
        """Called once per epoch with its row of the history, even if a lost worker makes it run twice."""

    def on_run_end(self, status: RunStatus, error: BaseException | None, estimator: Any) -> None:
        """Called when the run ends.

        Args:
            status: "finished", "failed" (by an exception) or "killed" (by an interrupt).
            error: The exception that ended the run, or None.
            estimator: The estimator; it has the trained model if the status is "finished".
        """


class TensorBoard(DriverCallback):
    """Writes the metrics of a run to event files for TensorBoard, in `<log_dir>/train` and `/validation`.

    The driver writes them: also the loss and the learning rate of every step, which
    `get_train_summary("batch_loss")` then returns.

    Args:
        log_dir: A local folder.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        self.folder = log_folder(log_dir)


def split_callbacks(callbacks: Sequence[Any] | None) -> tuple[list[DriverCallback], list[Any]]:
    """The driver callbacks, and those that go to the workers."""
    driver = [callback for callback in callbacks or () if isinstance(callback, DriverCallback)]
    return driver, [callback for callback in callbacks or () if not isinstance(callback, DriverCallback)]


class DriverCallbackList:
    def __init__(self, callbacks: Sequence[DriverCallback]) -> None:
        self._callbacks = tuple(callbacks)
        self._epoch = 0

    @property
    def log_folder(self) -> Path | None:
        """Where event files are written."""
        return next((one.folder for one in self._callbacks if isinstance(one, TensorBoard)), None)

    @property
    def wants_progress(self) -> bool:
        return any(type(one).on_progress is not DriverCallback.on_progress for one in self._callbacks)

    @contextmanager
    def running(self, estimator: Any, params: Mapping[str, Any]) -> Iterator[DriverCallbackList]:
        """Callbacks whose `on_run_begin` returned get their `on_run_end`, whatever happens."""
        with ExitStack() as begun:
            for callback in self._callbacks:
                callback.on_run_begin(params)
                begun.push(functools.partial(_end_run, callback, estimator))
            yield self

    def report(self, fields: Mapping[str, Any]) -> None:
        if fields["name"] == "gang":
            for callback in self._callbacks:
                callback.on_workers_ready(int(fields["workers"]))
        elif fields["name"] == "epoch":
            self.finish([fields["row"]])
        elif fields["name"] == "progress":
            for callback in self._callbacks:
                callback.on_progress(fields)

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Call `on_epoch_end` for epochs that no report announced: some workers cannot reach the driver."""
        for row in rows:
            if int(row["epoch"]) > self._epoch:
                self._epoch = int(row["epoch"])
                for callback in self._callbacks:
                    callback.on_epoch_end(row)


def _end_run(
    callback: DriverCallback, estimator: Any, kind: Any, error: BaseException | None, trace: Any
) -> None:
    status: RunStatus = (
        "finished" if error is None else "failed" if isinstance(error, Exception) else "killed"
    )
    callback.on_run_end(status, error, estimator)


def run_params(spec: Any, options: FitOptions, **estimator: Plain | None) -> dict[str, Plain]:
    """The parameters of a run as plain values by name ("optimizer.lr", "config.width"), for loggers."""
    model = getattr(spec, "model", None)
    model = getattr(spec, "model_creator", None) if model is None else model
    optimizer = getattr(spec, "optimizer", None) or getattr(model, "optimizer", None)
    loss = getattr(spec, "loss", None) or getattr(model, "loss", None)
    parts = {"model": model, "optimizer": optimizer, "loss": loss}
    params: dict[str, Plain] = {name: _title(part) for name, part in parts.items() if part is not None}
    params |= _plain(_settings(optimizer), "optimizer.")
    params |= _plain(getattr(spec, "config", {}), "config.")
    params |= _plain({name: getattr(spec, name, None) for name in _OF_SPEC})
    params |= _plain({name: getattr(options, name) for name in _OF_OPTIONS})
    return params | _plain(estimator)


def _title(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, functools.partial):
        return _title(item.func)
    return str(getattr(item, "__qualname__", None) or type(item).__qualname__)


def _settings(optimizer: Any) -> Mapping[str, Any]:
    if isinstance(optimizer, functools.partial):
        return optimizer.keywords
    defaults = getattr(optimizer, "defaults", None)
    if isinstance(defaults, Mapping):  # as PyTorch's have
        return defaults
    config = getattr(optimizer, "get_config", None)  # as Keras's have
    settings = config() if callable(config) and not isinstance(optimizer, type) else {}
    return settings if isinstance(settings, Mapping) else {}


def _plain(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Plain]:
    return {prefix + name: value for name, value in settings.items() if isinstance(value, Plain)}
