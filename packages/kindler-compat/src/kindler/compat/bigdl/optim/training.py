"""BigDL's `Optimizer`: trains a model of its layers on an RDD of `Sample`s, or on arrays.

The optimizer's method holds what goes on from one `optimize` to the next, and to another program through
`OptimMethod.save`: counters, and what it keeps beside parameters. Training itself is Kindler's.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np

from kindler.compat.bigdl.optim.methods import SGD, OptimMethod
from kindler.compat.bigdl.optim.summaries import Summary
from kindler.compat.bigdl.optim.triggers import EveryEpoch, MaxEpoch, Trigger
from kindler.compat.bigdl.optim.validation import Top1Accuracy, ValidationMethod, named_all
from kindler.compat.bigdl.util.arrays import Sample
from kindler.compat.zoo.tfpark.rows import ArrayRows, Columns, RddRows, TensorMeta, Unpack
from kindler.data.paths import absolute
from kindler.errors import ConfigError, DataError
from kindler.train.callbacks import Callback, Run
from kindler.train.triggers import Progress

__all__ = ["BaseOptimizer", "DistriOptimizer", "LocalOptimizer", "Optimizer"]


class BaseOptimizer:
    """Trains a model until a trigger fires. Made by `Optimizer.create`."""

    def __init__(
        self, model: Any, data: Any, criterion: Any, end_trigger: Any, batch_size: int, optim_method: Any
    ) -> None:
        method = SGD() if optim_method is None else optim_method
        if not isinstance(method, OptimMethod):
            raise ConfigError(
                "optim_method must be one optimizer of bigdl.optim.optimizer, such as Adam(), for the whole"
                f" model; received {method!r}."
            )
        self._model, self._data, self._criterion = model, data, criterion
        self._method: OptimMethod = method
        self._end = _trigger("end_trigger", MaxEpoch(1) if end_trigger is None else end_trigger)
        self._batch_size, self._base = batch_size, (0, 0)
        self._methods: list[ValidationMethod] = []
        self._summaries: dict[str, Summary] = {}
        self._validation: Any = None
        self._checkpoints: Any = None
        self._limits: Any = None
        self._clip_norm: float | None = None
        self._core: Any = None

    def optimize(self) -> Any:
        """Train; returns the model.

        `MaxEpoch` and `MaxIteration` count from when the optimizer's method was new: after an `optimize`
        until `MaxEpoch(5)`, `set_end_when(MaxEpoch(10))` trains five epochs more.
        """
        from kindler.compat.zoo.tfpark.training import Since

        if self._core is None:
            state = self._method.state
            self._core, self._base = self._made(), (state["epoch"] - 1, state["neval"] - 1)
        core, end = self._core, Since(self._end, *self._base)
        core.train_summary, core.val_summary = self._summaries.get("train"), self._summaries.get("val")
        epochs, steps = core.counters
        if steps + self._base[1] and end(Progress(epoch=epochs + 1, step=steps)):
            return self._model
        columns = _columns(self._data)
        core.fit(
            columns.data,
            batch_size=self._batch_size,
            validation_data=None if self._validation is None else _columns(self._validation).data,
            end_trigger=end,
            callbacks=[] if self._checkpoints is None else [self._checkpoints(*self._base)],
            **columns.options(),
        )
        core.get_model()
        epochs, steps = core.counters
        self._method.state.update(epoch=self._base[0] + epochs + 1, neval=self._base[1] + steps + 1)
        self._method.kept = core.optimizer.kept()
        return self._model

    def set_model(self, model: Any) -> None:
        """Train another model, from the beginning: the counters of the optimizer's method start anew."""
        self._model, self._core = model, None
        self._method.state.update(epoch=1, neval=1)
        self._method.kept = []

    def set_criterion(self, criterion: Any) -> None:
        self._criterion, self._core = criterion, None

    def set_end_when(self, end_when: Any) -> BaseOptimizer:
        self._end = _trigger("set_end_when", end_when)
        return self

    def set_checkpoint(
        self, checkpoint_trigger: Any, checkpoint_path: str, isOverWrite: bool = True
    ) -> BaseOptimizer:
        """Write `model.N` and `optimMethod.N` to a folder whenever the trigger fires, N being the steps made.

        `Model.load` and `OptimMethod.load` read them. `isOverWrite` replaces existing files.
        """
        trigger = _trigger("set_checkpoint", checkpoint_trigger)
        self._checkpoints = partial(
            _Checkpoints, trigger, absolute(checkpoint_path), isOverWrite, self._method
        )
        return self

    def set_gradclip_const(self, min_value: float, max_value: float) -> None:
        """Clip every element of a gradient between two limits."""
        if not min_value < max_value:
            raise ConfigError(f"set_gradclip_const: {min_value} is not below {max_value}.")
        self._limits, self._core = (float(min_value), float(max_value)), None

    def set_gradclip_l2norm(self, clip_norm: float) -> None:
        """Clip the gradient of all parameters together to a norm."""
        if not clip_norm > 0:
            raise ConfigError(f"set_gradclip_l2norm: the norm must be above 0; received {clip_norm}.")
        self._clip_norm, self._core = float(clip_norm), None

    def disable_gradclip(self) -> None:
        self._limits = self._clip_norm = self._core = None

    def set_train_summary(self, summary: Summary) -> BaseOptimizer:
        """Write loss, learning rate and throughput of every iteration to a `TrainSummary`."""
        self._summaries["train"] = summary
        return self

    def set_val_summary(self, summary: Summary) -> BaseOptimizer:
        """Write the metrics of every validation to a `ValidationSummary`."""
        self._summaries["val"] = summary
        return self

    def prepare_input(self) -> None:
        """Nothing: rows are read when training begins."""

    def _validate(self, data: Any, trigger: Any, val_method: Any) -> None:
        if not isinstance(_trigger("set_validation", trigger), EveryEpoch):
            warnings.warn(f"set_validation: validation is after each epoch, not {trigger!r}.", stacklevel=3)
        self._validation, self._core = data, None
        self._methods = named_all([Top1Accuracy()] if val_method is None else val_method)

    def _made(self) -> Any:
        from kindler.compat.bigdl.optim.rules_torch import TorchRule, torch_metrics
        from kindler.compat.zoo.orca.learn.base import workers_of
        from kindler.compat.zoo.orca.learn.bigdl.shapes import ShapedModel
        from kindler.compat.zoo.tfpark.training import TFParkEstimator

        return TFParkEstimator.from_torch(
            model=ShapedModel(self._model, None),
            loss=self._criterion,
            optimizer=TorchRule(self._method, self._limits, resume=True),
            metrics=torch_metrics(self._methods, self._criterion) or None,
            clip_norm=self._clip_norm,
            workers=1 if isinstance(self._data, tuple) else workers_of(1),
        )


class Optimizer(BaseOptimizer):
    """Trains a model on an RDD of `Sample`s.

    `batch_size` are the rows of a step over all workers; it need not be a multiple of the cores. The default
    of `optim_method` is `SGD()`.
    """

    def __init__(
        self,
        model: Any,
        training_rdd: Any,
        criterion: Any,
        end_trigger: Any,
        batch_size: int,
        optim_method: Any = None,
        bigdl_type: str = "float",
    ) -> None:
        _require_rdd(training_rdd)
        super().__init__(model, training_rdd, criterion, end_trigger, batch_size, optim_method)

    @staticmethod
    def create(
        model: Any,
        training_set: Any,
        criterion: Any,
        end_trigger: Any = None,
        batch_size: int = 32,
        optim_method: Any = None,
        cores: int | None = None,
        bigdl_type: str = "float",
    ) -> Any:
        """An optimizer for these data: an RDD of `Sample`s, or a pair (features, labels) of arrays.

        The default of `end_trigger` is `MaxEpoch(1)`, that of `optim_method` is `SGD()`. `cores` are ignored:
        one process computes with all.
        """
        common = (criterion, end_trigger, batch_size, optim_method)
        if isinstance(training_set, tuple) and len(training_set) == 2:
            return LocalOptimizer(*training_set, model, *common)
        return DistriOptimizer(model, training_set, *common)

    def set_validation(self, batch_size: int, val_rdd: Any, trigger: Any, val_method: Any = None) -> None:
        """Judge an RDD of `Sample`s after each epoch; None as the method is `Top1Accuracy()`."""
        _require_rdd(val_rdd)
        self._validate(val_rdd, trigger, val_method)

    def set_traindata(self, training_rdd: Any, batch_size: int) -> None:
        _require_rdd(training_rdd)
        self._data, self._batch_size = training_rdd, batch_size


class DistriOptimizer(Optimizer):
    """`Optimizer`, under the name that `Optimizer.create` returns."""


class LocalOptimizer(BaseOptimizer):
    """Trains a model on arrays, in one process, with all its cores; a list of arrays are several inputs."""

    def __init__(
        self,
        X: Any,
        Y: Any,
        model: Any,
        criterion: Any,
        end_trigger: Any,
        batch_size: int,
        optim_method: Any = None,
        cores: int | None = None,
        bigdl_type: str = "float",
    ) -> None:
        super().__init__(model, (X, Y), criterion, end_trigger, batch_size, optim_method)

    def set_validation(
        self, batch_size: int, X_val: Any, Y_val: Any, trigger: Any, val_method: Any = None
    ) -> None:
        """Judge arrays after each epoch; None as the method is `Top1Accuracy()`."""
        self._validate((X_val, Y_val), trigger, val_method)


class _Checkpoints(Callback):
    """Writes `model.N` and `optimMethod.N` when a trigger fires."""

    def __init__(
        self, trigger: Trigger, folder: str, over_write: bool, method: OptimMethod, epochs: int, steps: int
    ) -> None:
        self._trigger, self._folder, self._over_write = trigger, folder, over_write
        self._method, self._base = method, (epochs, steps)  # where the run goes on from
        self._written = -1

    def on_step_end(self, run: Run) -> None:
        self._write(run, ended=False)

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        self._write(run, ended=True, loss=logs.get("loss"))

    def _write(self, run: Run, *, ended: bool, loss: float | None = None) -> None:
        from kindler.compat.bigdl.nn.files import write_layer

        epoch, step = self._base[0] + run.epoch, self._base[1] + run.step
        fires = self._trigger(Progress(epoch=epoch, step=step, epoch_ended=ended, loss=loss))
        if run.rank or not fires or step == self._written:
            return
        self._written = step
        model: Any = run.model
        self._method.state.update(epoch=epoch + ended, neval=step + 1)
        self._method.kept = run.optimizer.kept()
        write_layer(model.model, f"{self._folder}/model.{step}", over_write=self._over_write)
        self._method.save(f"{self._folder}/optimMethod.{step}", self._over_write)


def _trigger(argument: str, value: Any) -> Trigger:
    if not isinstance(value, Trigger):
        raise ConfigError(f"{argument} takes a trigger such as MaxEpoch(5); received {value!r}.")
    return value


def _require_rdd(data: Any) -> None:
    if not hasattr(data, "mapPartitions"):
        raise ConfigError(
            f"the data must be an RDD of Samples; received {type(data).__qualname__}.\n"
            "Hint: Optimizer.create also takes a pair (features, labels) of arrays."
        )


def _columns(data: Any) -> Columns:
    """Samples or arrays as data that an estimator takes."""
    if isinstance(data, tuple):
        x, y = ([np.asarray(array) for array in (p if isinstance(p, list) else [p])] for p in data)
        return ArrayRows([*x, *y]).columns(_metas(x), _metas(y))
    first = data.take(1)
    if not first or not isinstance(first[0], Sample):
        raise DataError(
            f"the RDD must hold Samples of bigdl.util.common; its first element is {first!r:.80}."
        )
    features, labels = (_metas([t.to_ndarray() for t in p]) for p in (first[0].features, first[0].labels))
    leaves = tuple(("float32", meta.shape, meta.name) for meta in (*features, *labels))
    return RddRows(data.map(_flat), Unpack(None, leaves, flat=True)).columns(features, labels)


def _metas(arrays: list[Any]) -> list[TensorMeta]:
    return [TensorMeta("float32", f"input_{number}", np.shape(array)) for number, array in enumerate(arrays)]


def _flat(sample: Sample) -> list[Any]:
    return [tensor.to_ndarray() for tensor in (*sample.features, *sample.labels)]
