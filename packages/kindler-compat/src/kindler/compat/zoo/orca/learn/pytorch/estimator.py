"""`zoo.orca.learn.pytorch.Estimator`: PyTorch models under Orca's names of backends."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from kindler.compat.bigdl.nn.base import regularized
from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.metrics_torch import torch_metrics
from kindler.compat.bigdl.optim.rules_torch import TorchRule, refuse_regularizers
from kindler.compat.bigdl.optim.summaries import TrainSummary, ValidationSummary
from kindler.compat.bigdl.optim.validation import ValidationMethod, tag_of
from kindler.compat.zoo.orca.errors import InvalidInput, as_orca
from kindler.compat.zoo.orca.learn.backends import check_backend, sync_of
from kindler.compat.zoo.orca.learn.limited import first_steps
from kindler.compat.zoo.orca.learn.nodes import workers_of
from kindler.compat.zoo.orca.learn.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from kindler.compat.zoo.orca.learn.pytorch.reports import ReportingEstimator
from kindler.compat.zoo.orca.learn.pytorch.runner import OrcaHooks, epoch_stats, refuse_fixed
from kindler.compat.zoo.tfpark import checkpoints
from kindler.data.column_options import ColumnOptions
from kindler.files import folder_at, split
from kindler.train.checkpoints import is_checkpoint
from kindler.train.options import PredictOptions

__all__ = ["Estimator", "PyTorchEstimator"]

_BACKENDS = ("bigdl", "spark", "ray", "torch_distributed", "horovod")


class Estimator:
    """Creates estimators of PyTorch models."""

    @staticmethod
    @as_orca
    def from_torch(
        *,
        model: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        backend: str | None = None,
        config: Mapping[str, Any] | None = None,
        workers_per_node: int = 1,
        scheduler_creator: Any = None,
        use_tqdm: bool = False,
        model_dir: str | PathLike[str] | None = None,
        sync_stats: bool = False,
        log_level: int = logging.INFO,
        log_to_driver: bool = True,
        scheduler_step_freq: str = "epoch",
        initialization_hook: Callable[[], Any] | None = None,
        training_operator_cls: Any = None,
    ) -> PyTorchEstimator:
        """Create an estimator from a PyTorch model.

        Args:
            model: An `nn.Module`, or a function of `config` that returns one.
            optimizer: An optimizer of torch, one of `orca.learn.optimizers`, or a function of
                `(model, config)`.
            loss: A loss module, a function of `(outputs, targets)`, or a function of `config`.
            metrics: Metrics of `orca.learn.metrics`, torchmetrics objects, or functions of
                `(outputs, targets)` that are means over rows.
            backend: "spark", "ray", "torch_distributed", "horovod" (all-reduce) or "bigdl" (each worker
                holds a slice of the optimizer's state). All compute the same. None is "bigdl" for a module
                and "spark" for a function, as the two generations of Orca have it.
            config: The argument of all creators; it must not contain "batch_size".
            workers_per_node: Workers of each node; a local session is one node.
            scheduler_creator: A function of `(optimizer, config)` that returns a schedule.
            use_tqdm: Without effect: progress is shown.
            model_dir: A folder for checkpoints.
            sync_stats: Without effect: figures are always those of all workers.
            log_level: Without effect: it changes what is logged only.
            log_to_driver: Without effect: what workers print is shown.
            scheduler_step_freq: Whether the schedule moves after each "epoch" or each "batch".
            initialization_hook: Must be None: use `callbacks` with `before_run`.
            training_operator_cls: Must be None: use `MainCallback`.
        """
        if training_operator_cls is not None or initialization_hook is not None:
            raise InvalidInput(
                "training_operator_cls and initialization_hook are not supported.\nHint: override"
                " on_iter_forward of a MainCallback, and before_run of a callback."
            )
        if scheduler_step_freq not in ("epoch", "batch"):
            raise InvalidInput(
                f"scheduler_step_freq must be epoch or batch; received {scheduler_step_freq!r}."
            )
        if config is not None and "batch_size" in config:
            raise InvalidInput(
                "Please do not specify batch_size in config. Input batch_size in fit/evaluate/predict"
                " function of the estimator instead."
            )
        if not callable(model):
            raise InvalidInput(f"Must provide a function for model_creator, or a model; received {model!r}.")
        if backend is None:
            backend = "bigdl" if isinstance(model, torch.nn.Module) else "spark"
        return PyTorchEstimator(
            backend=check_backend(backend, _BACKENDS),
            divide=_divide(optimizer, model),
            core={
                "model": model,
                "optimizer": TorchRule(optimizer) if isinstance(optimizer, OptimMethod) else optimizer,
                "loss": loss,
                "metrics": _metrics(metrics, loss),
                "scheduler_creator": scheduler_creator,
                "scheduler_step": "step" if scheduler_step_freq == "batch" else "epoch",
                "config": config,
                "model_dir": model_dir,
                "workers": workers_of(workers_per_node),
            },
        )

    @staticmethod
    @as_orca
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """The file `last.ckpt` that `ModelCheckpoint` wrote to a folder.

        Raises:
            InvalidInput: There is none.
        """
        path = ModelCheckpoint.get_latest_checkpoint(checkpoint_dir)
        folder, name = split(path)
        if name not in folder_at(folder).names():
            raise InvalidInput(f"The checkpoint {path} does not exist.")
        return path


class PyTorchEstimator:
    """Trains, evaluates and scores a PyTorch model. Made by `Estimator.from_torch`."""

    def __init__(self, *, backend: str, divide: str | None, core: Mapping[str, Any]) -> None:
        self.backend = backend
        self._sync = sync_of(backend, divide=divide)
        self._given = dict(core)
        self._clip_norm: float | None = None
        self._clip_value: float | None = None
        self._core = self._made()

    @as_orca
    def fit(
        self,
        data: Any,
        epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: Any = None,
        label_cols: Any = None,
        validation_data: Any = None,
        callbacks: Sequence[Any] | None = None,
        checkpoint_trigger: Any = None,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Train.

        Args:
            data: A Spark DataFrame, an `XShards`, a `DataLoader`, or a function of `(config, batch_size)`
                that returns one; it gets its worker's share of `batch_size`.
            epochs: Epochs to train.
            max_steps: Steps after which training ends, whatever `epochs` says.
            batch_size: Rows of a step over all workers; None is 32. A `DataLoader` has its own.
            profile: Whether stats have a "profile" with the seconds of the epoch.
            reduce_results: Whether figures are those of all workers; otherwise each epoch is a list with
                those of each worker.
            feature_cols: Columns of a DataFrame for the inputs.
            label_cols: Its columns for the labels.
            validation_data: Data to evaluate after each epoch.
            callbacks: Callbacks of `orca.learn.pytorch.callbacks`.
            checkpoint_trigger: When a checkpoint is written to `model_dir`.
            info: Without effect: only a `training_operator_cls` of Orca read it.

        Returns:
            With the backend "bigdl" the estimator; otherwise a list with the stats of each epoch.
        """
        several = list(callbacks or ())
        refuse_fixed(several)
        hooks = (
            [OrcaHooks(several, self._given["config"] or {}, None if max_steps else epochs)]
            if several
            else []
        )
        trigger = {} if checkpoint_trigger is None else {"checkpoint_trigger": checkpoint_trigger}
        rows = self._core.fit(
            data,
            epochs=None if max_steps is not None else epochs,
            max_steps=max_steps,
            batch_size=32 if batch_size is None else batch_size,
            feature_cols=feature_cols,
            label_cols=label_cols,
            validation_data=validation_data,
            callbacks=hooks,
            **trigger,
            **self._sync,
        )
        if isinstance(self._given["model"], torch.nn.Module):
            self._core.get_model()
        if self.backend == "bigdl":
            return self
        return [self._stats(row, reduce_results, profile) for row in rows]

    def _stats(self, row: Mapping[str, Any], reduce_results: bool, profile: bool) -> Any:
        more = {"profile": {"epoch_s": row["seconds"]}} if profile else {}
        if reduce_results:
            return epoch_stats(row, self._core.reports.last_loss(row)) | more
        return [
            epoch_stats(own, self._core.reports.last_loss(row, rank)) | more
            for rank, own in self._core.reports.by_worker(row)
        ]

    @as_orca
    def evaluate(
        self,
        data: Any,
        batch_size: int | None = None,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: Any = None,
        label_cols: Any = None,
        callbacks: Sequence[Any] | None = None,
        validation_metrics: Any = None,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Judge rows, each once.

        Args:
            data: Data as `fit` takes it.
            batch_size: Rows of a step over all workers; None is 32.
            num_steps: How many steps are judged; None is every row.
            profile: Without effect: nothing is measured.
            reduce_results: Whether figures are those of all workers; otherwise it is a list with those of
                each worker.
            feature_cols: Columns of a DataFrame for the inputs.
            label_cols: Its columns for the labels.
            callbacks: Must be empty.
            validation_metrics: Metrics to compute instead of the estimator's.
            info: Without effect: only a `training_operator_cls` of Orca read it.

        Returns:
            "num_samples", "val_loss", and each metric by its name.
        """
        if callbacks:
            raise InvalidInput("evaluate has no callbacks.\nHint: those of fit see each validation.")
        core, rows = self._core, 32 if batch_size is None else batch_size
        if validation_metrics is not None:
            core = self._remade(metrics=_metrics(validation_metrics, self._given["loss"]))
        found = core.evaluate(
            first_steps(data, num_steps, rows, "num_steps"),
            batch_size=rows,
            feature_cols=feature_cols,
            label_cols=label_cols,
        )
        if reduce_results:
            return _judgement(found)
        return [_judgement(own) for own in core.reports.judged()]

    @as_orca
    def predict(
        self,
        data: Any,
        batch_size: int = 32,
        feature_cols: Any = None,
        output_cols: Any = None,
        profile: bool = False,
        callbacks: Sequence[Any] | None = None,
    ) -> Any:
        """The data with the outputs, as `prediction`; axes of length 1 are taken out, as Orca does.

        Args:
            data: A Spark DataFrame or an `XShards`.
            batch_size: Rows per call of the model.
            feature_cols: Columns of a DataFrame for the inputs.
            output_cols: Names for several outputs.
            profile: Without effect: nothing is measured.
            callbacks: Must be empty.
        """
        if callbacks:
            raise InvalidInput("predict has no callbacks.\nHint: let the model return what is wanted.")
        names = (output_cols,) if isinstance(output_cols, str) else tuple(output_cols or ()) or None
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(feature_cols=feature_cols, allow_nan=True),
            output_cols=names,
            finish=None if self.backend == "bigdl" else _squeezed,
        )
        return self._core.predict_with(data, options)

    def get_model(self) -> Any:
        """The model with its trained weights."""
        return self._core.get_model()

    def get_state_dict(self) -> dict[str, Any]:
        """Epoch, and the state of the model in a list, as Orca has it."""
        return {"epoch": self._core.counters[0], "models": [self.get_model().state_dict()]}

    @as_orca
    def save(self, model_path: str, entire: bool = False) -> str:
        """Write the model's state dict; with `entire`, the module itself as a pickle."""
        if entire:
            torch.save(self.get_model(), model_path)
        else:
            self._core.save(model_path)
        return model_path

    @as_orca
    def load(self, model_path: str) -> None:
        """Read what `save`, `save_checkpoint` or `ModelCheckpoint` wrote, other than entire modules."""
        folder, name = split(model_path)
        if is_checkpoint(folder_at(folder).read(name, 64)):
            self._core.load_checkpoint(model_path)
        else:
            self._core.load_weights(model_path)

    @as_orca
    def save_checkpoint(self, model_path: str) -> None:
        """Write all that training goes on from."""
        self._core.save_checkpoint(model_path)

    load_checkpoint = load

    @as_orca
    def load_orca_checkpoint(
        self, path: str, version: int | None = None, prefix: str | None = None
    ) -> PyTorchEstimator:
        """Go on from a checkpoint in a `model_dir`; `version` is the step after which it was written."""
        self._core.load_checkpoint(checkpoints.find(path, version))
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Take the weights of what `get_state_dict` returned."""
        states = state_dict["models"][0] if "models" in state_dict else state_dict
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/weights.pt"
            torch.save(states, path)
            self._core.load_weights(path)

    def set_tensorboard(self, log_dir: str, app_name: str) -> None:
        """Write summaries to `<log_dir>/<app_name>/train` and `.../validation`."""
        self._core.train_summary = TrainSummary(log_dir, app_name)
        self._core.val_summary = ValidationSummary(log_dir, app_name)

    def get_train_summary(self, tag: str | None = None) -> Any:
        """(step, value, wall time) of "Loss", "LearningRate" or "Throughput"; None without a summary."""
        summary = self._core.train_summary
        return None if summary is None else _known(summary.read_scalar(tag or "Loss"))

    def get_validation_summary(self, tag: str | None = None) -> Any:
        """The same of a validation metric."""
        summary = self._core.val_summary
        if summary is None:
            return None
        return next(
            (
                found
                for name in (tag or "Loss", tag_of(tag or "Loss"))
                if (found := _known(summary.read_scalar(name))) is not None
            ),
            None,
        )

    def clear_gradient_clipping(self) -> None:
        """Do not clip gradients any more."""
        self._clip_norm = self._clip_value = None
        self._rebuild()

    @as_orca
    def set_constant_gradient_clipping(self, min: float, max: float) -> None:  # noqa: A002 - Orca's names
        """Clip every element of a gradient between -max and max; `min` must be -max."""
        if min != -max:
            raise InvalidInput(f"gradients are clipped between -c and c; received {min} and {max}.")
        self._clip_value = float(max)
        self._rebuild()

    @as_orca
    def set_l2_norm_gradient_clipping(self, clip_norm: float) -> None:
        """Clip the gradient of all parameters together to a norm."""
        self._clip_norm = float(clip_norm)
        self._rebuild()

    def shutdown(self, force: bool = False) -> None:
        """Release what the estimator holds: nothing."""

    def _made(self, **changes: Any) -> ReportingEstimator:
        made = ReportingEstimator.from_torch(
            **{**self._given, **changes}, clip_norm=self._clip_norm, clip_value=self._clip_value
        )
        assert isinstance(made, ReportingEstimator)
        return made

    def _rebuild(self) -> None:
        self._core = self._remade()

    def _remade(self, **changes: Any) -> ReportingEstimator:
        """Another estimator of the same model that goes on from where this one is."""
        before, made = self._core, self._made(**changes)
        made.train_summary, made.val_summary = before.train_summary, before.val_summary
        made.continue_from(before)
        return made


def _known(values: np.ndarray[Any, Any]) -> Any:
    return values if len(values) else None


def _judgement(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"val_loss" if name == "loss" else name: value for name, value in found.items()}


def _metrics(given: Any, loss: Any) -> Any:
    """Metrics of Orca by the names of their classes, and others as they are."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    if not any(isinstance(part, ValidationMethod) for part in several):
        return given
    made: dict[str, Any] = {}
    for part in several:
        if isinstance(part, ValidationMethod):
            (metric,) = torch_metrics([part], loss).values()
            made[type(part).__name__] = metric
        else:
            made[getattr(part, "__name__", type(part).__name__)] = part
    return made


def _divide(optimizer: Any, model: Any) -> str | None:
    """What the work of an optimizer can be divided into, as `sync_of` takes it."""
    if isinstance(optimizer, OptimMethod):
        # Regularizers know whole parameters only.
        whole = isinstance(model, torch.nn.Module) and any(True for _ in regularized(model))
        return None if whole else "elements"
    refuse_regularizers(model)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    known = issubclass(kind, torch.optim.Optimizer) and kind.__module__.startswith("torch.optim")
    return "" if known else None


def _squeezed(outputs: list[Any]) -> list[Any]:
    return [part.reshape(part.shape[0], *(n for n in part.shape[1:] if n != 1)) for part in outputs]
