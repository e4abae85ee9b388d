"""The options of `fit`, `evaluate` and `predict` as values.

An `Estimator` builds one from the keywords of a call, checks it once on the driver and sends it to the
workers as it is. Rules that need more than the options themselves (the model, the data, the estimator's
folder) are in `kindler.estimator.checks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, TypeAlias, get_args

from kindler.data.column_options import ColumnOptions
from kindler.data.preparation import Preparation
from kindler.errors import ConfigError
from kindler.sync.contract import SyncConfig
from kindler.train.loss_guard import OnNan, on_nan_complaints
from kindler.train.metric_names import parse
from kindler.train.triggers import Trigger

Ingest: TypeAlias = Literal["auto", "inline", "direct"]
Runtime: TypeAlias = Literal["openvino"]

ENDLESS = 2**31  # epochs, where only steps or a trigger end the run


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What all three calls have.

    Attributes:
        batch_size: Rows per step, over all workers together.
        columns: Which columns are read, and as what.
        ingest: How the rows of a Spark DataFrame reach the workers: "direct" (the workers read its Parquet
            files), "inline" (Spark sends them), or "auto": direct where the DataFrame is a plain scan of
            files.
        verbose: 0 shows neither progress nor the output of the workers.
        preparation: What is done to rows between the data and the model; the estimator's own.
    """

    batch_size: int
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    ingest: Ingest = "auto"
    verbose: int = 1
    preparation: Preparation | None = None

    def complaints(self) -> Iterator[str]:
        """What is wrong with these options, one sentence each."""
        yield from at_least_one(batch_size=self.batch_size)
        if self.ingest not in get_args(Ingest):
            yield f"ingest must be 'auto', 'inline' or 'direct'; received {self.ingest!r}."


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RunOptions):
    """How to evaluate; `Estimator.evaluate` has the same keywords."""

    batch_size: int = 256


@dataclass(frozen=True, kw_only=True)
class PredictOptions(RunOptions):
    """How to predict; `Estimator.predict` has the same keywords.

    Attributes:
        output_cols: Names of the output columns. None is "prediction" ("prediction_0", ... for several
            outputs), or the keys if the model returns a dict.
        output_path: The folder that the scored rows of Parquet files are written to.
        finish: Makes the columns of the model's outputs, batch by batch; None takes the outputs as they are.
        runtime: What computes the model: "openvino", or None for its own framework.
        precision: The precision to compute in, where the framework has several: "fp32", "bf16" or "fp16".
            None is the one that the model was given.
    """

    batch_size: int = 1024
    output_cols: tuple[str, ...] | None = None
    output_path: str | PathLike[str] | None = None
    finish: Callable[[list[Any]], list[Any]] | None = None
    runtime: Runtime | None = None
    precision: str | None = None

    def complaints(self) -> Iterator[str]:
        yield from super().complaints()
        if self.precision is not None and self.runtime is not None:
            yield f"precision={self.precision!r} is for the model's own framework, not for a runtime."
        if self.runtime is not None and self.runtime not in get_args(Runtime):
            yield f"runtime must be 'openvino', or None for the model's framework; received {self.runtime!r}."


@dataclass(frozen=True, kw_only=True)
class FitOptions(RunOptions):
    """How to train; `Estimator.fit` has the same keywords.

    Attributes:
        epochs: Number of epochs to train. None trains one, or as many as it takes until `max_steps` or
            `end_trigger` ends the run.
        callbacks: `kindler.Callback` objects; for a Keras model, callbacks of Keras. They run on the workers.
        max_steps: Optimizer steps after which training ends, also in the middle of an epoch.
        shuffle: Whether each epoch takes the rows in a new order, which the seed decides.
        steps_per_epoch: Steps of an epoch; the next epoch continues with the rows that follow. None is one
            pass over all rows.
        end_trigger: Ends training when it fires, unless `epochs` or `max_steps` ends it earlier.
        checkpoint_trigger: When a checkpoint is written to `model_dir`. None is after every epoch.
        keep_checkpoints: How many of the newest checkpoints to keep, whichever run wrote them, besides the
            newest that was written at the end of an epoch. None keeps all.
        best_metric: A metric of the history, such as "val_loss" or "max:val_gain"; the checkpoint of its best
            epoch is kept, too.
        resume: Continue from the newest complete checkpoint in `model_dir`, with any number of workers, to
            where the run that wrote it would have ended. Starts from the beginning if there is none.
        initial_epoch: As in Keras: the epoch to start counting from; `epochs` is then the number of the last
            epoch.
        validation_freq: Validate every so many epochs, or after the epochs with these numbers.
        class_weight: The weight of a row by its label.
        on_nan: What to do about a training loss that is NaN or infinite: "raise", "warn" or "skip".
        sync: How workers agree, with the options of that sync.
    """

    batch_size: int = 32
    epochs: int | None = None
    callbacks: tuple[Any, ...] = ()
    max_steps: int | None = None
    shuffle: bool = True
    steps_per_epoch: int | None = None
    end_trigger: Trigger | None = None
    checkpoint_trigger: Trigger | None = None
    keep_checkpoints: int | None = 3
    best_metric: str | None = None
    resume: bool = False
    initial_epoch: int | None = None
    validation_freq: int | tuple[int, ...] = 1
    class_weight: Mapping[int, float] | None = None
    on_nan: OnNan = "raise"
    sync: SyncConfig = field(default_factory=SyncConfig)

    @property
    def endless(self) -> bool:
        """Whether only steps or a trigger end the run."""
        return self.epochs is None and (self.max_steps is not None or self.end_trigger is not None)

    @property
    def epochs_to_train(self) -> int:
        """The most epochs this run trains."""
        return self._last_epoch - (self.initial_epoch or 0)

    @property
    def _last_epoch(self) -> int:
        return ENDLESS if self.endless else self.epochs or 1

    def validates(self, epoch: int) -> bool:
        """Whether the model is validated after this epoch."""
        freq = self.validation_freq
        return epoch % freq == 0 if isinstance(freq, int) else epoch in freq

    def complaints(self) -> Iterator[str]:
        yield from at_least_one(
            epochs=self.epochs,
            max_steps=self.max_steps,
            steps_per_epoch=self.steps_per_epoch,
            keep_checkpoints=self.keep_checkpoints,
        )
        yield from super().complaints()
        yield from self._epoch_complaints()
        yield from on_nan_complaints(self.on_nan)
        if self.on_nan == "skip" and self.sync.name != "allreduce":
            yield (
                f"on_nan='skip' leaves a step out on all workers, which takes sync='allreduce'; received"
                f" sync={self.sync.name!r}.\nHint: on_nan='raise' and on_nan='warn' work with every sync."
            )
        yield from self._weight_complaints()
        for name in ("checkpoint_trigger", "end_trigger"):
            trigger = getattr(self, name)
            if trigger is not None and not isinstance(trigger, Trigger):
                yield f"{name} must be a trigger such as kindler.EveryEpoch(); received {trigger!r}."
        if self.best_metric is not None:
            try:
                parse(self.best_metric)
            except ConfigError as exc:
                yield f"best_metric: {exc}"

    def _weight_complaints(self) -> Iterator[str]:
        rule = "class_weight must be a dict of class numbers to finite weights of at least 0"
        weights = {} if self.class_weight is None else self.class_weight
        if not isinstance(weights, Mapping):
            yield f"{rule}, such as {{0: 1.0, 1: 5.0}}; received {weights!r}."
            return
        for label, weight in weights.items():
            if not isinstance(label, Integral) or label < 0 or not _is_weight(weight):
                yield f"{rule}; received {label!r}: {weight!r}."

    def _epoch_complaints(self) -> Iterator[str]:
        first, last, freq = self.initial_epoch, self._last_epoch, self.validation_freq
        if first is not None and not 0 <= first < last:
            yield f"initial_epoch={first} must be less than epochs={last}, the number of the last epoch."
        numbers = [freq] if isinstance(freq, int) else list(freq)
        if not all(isinstance(number, int) and number >= 1 for number in numbers):
            yield f"validation_freq must be at least 1, or a list of epoch numbers; received {freq!r}."


def _is_weight(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(float(value)) and float(value) >= 0


def at_least_one(**options: int | None) -> Iterator[str]:
    """A complaint about each of these that is neither None nor a positive whole number."""
    for name, value in options.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name} must be a whole number of at least 1; received {value!r}."
