"""The options of `fit`, `evaluate` and `predict` as values, and the `Task` that workers get.

`Estimator` builds them from the keywords of a call, which document them, and checks them once on the driver.
Rules that need the model, the data or the folder are in `kindler.estimator.checks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from kindler.config import Checkpoints, Ingest, NanLoss, RunSettings
from kindler.data.column_options import ColumnOptions
from kindler.data.preparation import Prepare
from kindler.data.row_order import RowAssignment
from kindler.data.sources import Source
from kindler.errors import ConfigError
from kindler.strategies import AllReduce, Strategy
from kindler.train.loaders import StreamSource
from kindler.train.metric_names import parse
from kindler.train.triggers import Progress, Trigger

Engine: TypeAlias = Literal["auto", "local", "spark"]
Accelerator: TypeAlias = Literal["openvino"]
OnError: TypeAlias = Literal["raise", "null", "column"]

ENDLESS = 2**31  # epochs, where only steps or a trigger end the run

T = TypeVar("T")


def from_arguments(kind: type[T], arguments: Mapping[str, Any], **others: Any) -> T:
    """A dataclass made of those arguments of a call that are fields of it, and of `others`."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in arguments.items() if name in names} | others)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where and how an estimator runs; its constructors document each."""

    workers: int | None = None
    engine: Engine = "auto"
    device: str = "auto"
    share_gpus: bool = False
    seed: int = 0
    settings: RunSettings = field(default_factory=RunSettings)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What all three calls share; `preparation` is the estimator's."""

    batch_size: int
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    ingest: Ingest = "auto"
    verbose: int = 1
    preparation: Prepare | None = None

    def complaints(self) -> Iterator[str]:
        """What is wrong with these options, one sentence each."""
        yield from at_least_one(batch_size=self.batch_size)
        if self.ingest not in get_args(Ingest):
            yield f"ingest must be 'auto', 'inline' or 'direct'; received {self.ingest!r}."


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RunOptions):
    """The keywords of `Estimator.evaluate`."""

    batch_size: int = 256


@dataclass(frozen=True, kw_only=True)
class PredictOptions(RunOptions):
    """The keywords of `Estimator.predict`.

    Attributes:
        finish: Makes the columns of the model's outputs, batch by batch; None takes them as they are.
        types: Arrow types of the columns in `output_cols`; None finds them out by scoring a row.
    """

    batch_size: int = 1024
    output_cols: tuple[str, ...] | None = None
    output_path: str | PathLike[str] | None = None
    finish: Callable[[list[Any]], list[Any]] | None = None
    types: tuple[Any, ...] | None = None
    accelerator: Accelerator | None = None
    precision: str | None = None
    on_error: OnError = "raise"
    max_errors: int | None = None
    overwrite: bool = False

    def complaints(self) -> Iterator[str]:
        yield from super().complaints()
        if self.precision is not None and self.accelerator is not None:
            yield f"precision={self.precision!r} is for the model's own framework, not for an accelerator."
        if self.accelerator is not None and self.accelerator not in get_args(Accelerator):
            yield (
                "accelerator must be 'openvino', or None for the model's framework; received"
                f" {self.accelerator!r}."
            )
        if self.on_error not in get_args(OnError):
            yield f"on_error must be 'raise', 'null' or 'column'; received {self.on_error!r}."
        most = self.max_errors
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            yield f"max_errors must be a whole number of at least 0; received {most!r}."
        elif most is not None and self.on_error == "raise":
            yield (
                f"max_errors={most} has no effect with on_error='raise', which ends at the first error.\n"
                "Hint: on_error='null' or on_error='column'."
            )
        if self.overwrite and self.output_path is None:
            yield "overwrite=True has no effect without output_path."


@dataclass(frozen=True, kw_only=True)
class FitOptions(RunOptions):
    """The keywords of `Estimator.fit`."""

    batch_size: int = 32
    epochs: int | None = None
    callbacks: tuple[Any, ...] = ()
    max_steps: int | None = None
    shuffle: bool = True
    steps_per_epoch: int | None = None
    stop_when: Trigger | None = None
    checkpoint: Checkpoints | None = None
    resume: bool = False
    initial_epoch: int | None = None
    validation_freq: int | tuple[int, ...] = 1
    class_weight: Mapping[int, float] | None = None
    nan_loss: NanLoss = "raise"
    strategy: Strategy = field(default_factory=AllReduce)

    @property
    def endless(self) -> bool:
        return self.epochs is None and (self.max_steps is not None or self.stop_when is not None)

    @property
    def epochs_to_train(self) -> int:
        return self._last_epoch - (self.initial_epoch or 0)

    @property
    def _last_epoch(self) -> int:
        return ENDLESS if self.endless else self.epochs or 1

    def validates(self, epoch: int) -> bool:
        freq = self.validation_freq
        return epoch % freq == 0 if isinstance(freq, int) else epoch in freq

    def writes_checkpoint(self, progress: Progress) -> bool:
        every = None if self.checkpoint is None else self.checkpoint.every
        if callable(every):
            return every(progress)
        return progress.epoch_ended or (every is not None and progress.step % every == 0)

    def complaints(self) -> Iterator[str]:
        yield from at_least_one(
            epochs=self.epochs,
            max_steps=self.max_steps,
            steps_per_epoch=self.steps_per_epoch,
        )
        yield from super().complaints()
        first, last, freq = self.initial_epoch, self._last_epoch, self.validation_freq
        if first is not None and not 0 <= first < last:
            yield f"initial_epoch={first} must be less than epochs={last}, the number of the last epoch."
        numbers = [freq] if isinstance(freq, int) else list(freq)
        if not all(isinstance(number, int) and number >= 1 for number in numbers):
            yield f"validation_freq must be at least 1, or a list of epoch numbers; received {freq!r}."
        if self.nan_loss not in get_args(NanLoss):
            yield f"nan_loss must be 'raise', 'warn' or 'skip'; received {self.nan_loss!r}."
        if self.nan_loss == "skip" and self.strategy.name != "allreduce":
            yield (
                f"nan_loss='skip' skips a step on all workers, which needs strategy='allreduce';"
                f" received strategy={self.strategy.name!r}.\nHint: nan_loss='raise' and nan_loss='warn' work"
                " with every strategy."
            )
        yield from self._weight_complaints()
        function = "a function of `Progress` that returns True or False"
        if self.stop_when is not None and not _is_function(self.stop_when):
            yield f"stop_when must be {function}; received {self.stop_when!r}."
        if self.checkpoint is not None:
            yield from _checkpoint_complaints(self.checkpoint, function)

    def _weight_complaints(self) -> Iterator[str]:
        rule = "class_weight must be a dict of class numbers to finite weights of at least 0"
        weights = {} if self.class_weight is None else self.class_weight
        if not isinstance(weights, Mapping):
            yield f"{rule}, such as {{0: 1.0, 1: 5.0}}; received {weights!r}."
            return
        for label, weight in weights.items():
            is_weight = isinstance(weight, Real) and math.isfinite(float(weight)) and float(weight) >= 0
            if not isinstance(label, Integral) or label < 0 or not is_weight:
                yield f"{rule}; received {label!r}: {weight!r}."


def _checkpoint_complaints(checkpoint: Checkpoints, function: str) -> Iterator[str]:
    every = checkpoint.every
    if isinstance(every, int):
        yield from at_least_one(every=every)
    elif every is not None and not _is_function(every):
        yield f"Checkpoints(every=...) must be a number of steps or {function}; received {every!r}."
    yield from at_least_one(keep=checkpoint.keep)
    if checkpoint.best is not None:
        try:
            parse(checkpoint.best)
        except ConfigError as exc:
            yield f"Checkpoints(best=...): {exc}"


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)  # calling a class would always be true


def at_least_one(**options: int | None) -> Iterator[str]:
    for name, value in options.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name} must be a whole number of at least 1; received {value!r}."


@dataclass(frozen=True, slots=True)
class StateLimit:
    """The most bytes a trained state may have to come back to the driver, and why."""

    most: int
    why: str

    def check(self, size: int) -> None:
        if size > self.most:
            raise ConfigError(f"the trained state will have {size:,} bytes, and {self.most:,} {self.why}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run as its workers know it; built on the driver and pickled once."""

    framework: str
    options: FitOptions | EvaluateOptions
    data: Source | StreamSource
    validation: Source | StreamSource | None = None
    config: RunConfig = field(default_factory=RunConfig)
    dealing: RowAssignment | None = None  # None deals rows as for a run that starts with these workers
    process_group: bool = False  # whether `torch.distributed` joins the workers
    run_id: str = ""
    log_steps: bool = False
    watched: bool = False  # whether the driver follows an epoch even if it is not shown
    limit: StateLimit | None = None

    @property
    def trains(self) -> bool:
        return isinstance(self.options, FitOptions)

    @property
    def folder(self) -> str | None:
        """Where the run writes checkpoints."""
        checkpoint = self.options.checkpoint if isinstance(self.options, FitOptions) else None
        return None if checkpoint is None else str(checkpoint.folder)

    @property
    def training(self) -> FitOptions:
        if not isinstance(self.options, FitOptions):
            raise TypeError("an evaluation has no training options.")
        return self.options

    @property
    def show(self) -> bool:
        return self.watched or self.options.verbose > 0
