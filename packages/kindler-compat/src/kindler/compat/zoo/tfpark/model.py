"""`KerasModel`: a compiled Keras model, trained, evaluated and scored over a `TFDataset`."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.validation import Scores, tag_of
from kindler.compat.zoo.tfpark.rows import Columns, flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.training import (
    Arranged,
    TFParkEstimator,
    engine,
    graph_estimator,
    predicted_rdd,
    stacked,
)
from kindler.errors import ConfigError
from kindler.frameworks.keras.backends import flavour_of

__all__ = ["KerasModel"]


class KerasFiles:
    model: Any

    def save_weights(self, filepath: str, overwrite: bool = True, save_format: str | None = None) -> None:
        options = {} if save_format is None else {"save_format": save_format}
        self.model.save_weights(filepath, overwrite=overwrite, **options)

    def load_weights(self, filepath: str, by_name: bool = False) -> None:
        self.model.load_weights(filepath, **({"by_name": True} if by_name else {}))

    def save_model(self, path: str, overwrite: bool = True) -> None:
        self.model.save(path, overwrite=overwrite)


class KerasModel(KerasFiles):
    """A Keras model on Spark. Data is a `TFDataset`, or arrays as Keras takes them.

    Arrays are for Keras itself in this process, unless `distributed`.
    """

    def __init__(self, model: Any, model_dir: str | None = None, optimizer: Any = None) -> None:
        if flavour_of(model) is None:
            raise ConfigError(f"KerasModel takes a Keras model; received {type(model).__qualname__}.")
        self.model = model
        self.model_dir = model_dir
        self.optimizer = optimizer
        self._estimator: TFParkEstimator | None = None
        self._compiled: Any = None

    @property
    def estimator(self) -> TFParkEstimator:
        """The estimator behind it; a new one if the model was compiled again."""
        compiled = getattr(self.model, "optimizer", None)
        if self._estimator is None or compiled is not self._compiled:
            self._estimator = keras_estimator(self.model, model_dir=self.model_dir, optimizer=self.optimizer)
            self._compiled = getattr(self.model, "optimizer", None)
        return self._estimator

    @property
    def metrics_names(self) -> list[str]:
        return list(self.model.metrics_names)

    def get_weights(self) -> list[Any]:
        return list(self.model.get_weights())

    def set_weights(self, weights: list[Any]) -> None:
        self.model.set_weights(weights)

    @staticmethod
    def load_model(path: str) -> KerasModel:
        if not os.path.exists(path):
            raise ConfigError(f"load_model: there is no file {path}.")
        keras: Any = importlib.import_module("tf_keras")
        return KerasModel(keras.models.load_model(path))

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        validation_data: Any = None,
        distributed: bool = False,
        **kwargs: Any,
    ) -> Any:
        """`kwargs` are of Keras's own `fit`, for arrays."""
        kwargs.pop("session_config", None)  # threads of workers are Kindler's to choose
        dataset = x
        if not isinstance(x, TFDataset):
            if not distributed:
                return self.model.fit(
                    x, y, batch_size=batch_size, epochs=epochs, validation_data=validation_data, **kwargs
                )
            checked = None if validation_data is None else tuple(validation_data[:2])
            dataset = TFDataset.from_ndarrays((x, y), batch_size=batch_size or 32, val_tensors=checked)
        elif validation_data is not None:
            raise ConfigError(
                "validation_data must be None with a TFDataset.\n"
                "Hint: pass the rows to the dataset: from_rdd(..., val_rdd=...)."
            )
        dataset.require_training("used in KerasModel fit")
        _require_labels(dataset, "train a Keras model")
        self.estimator.fit_dataset(dataset, self._arranged, epochs=epochs, **kwargs)
        self.estimator.get_model()
        return self

    def evaluate(
        self, x: Any = None, y: Any = None, batch_per_thread: int | None = None, distributed: bool = False
    ) -> Scores:
        """The loss and the metrics, by name. For arrays, `batch_per_thread` is the rows of one call."""
        if isinstance(x, TFDataset):
            x.require_batch("used in KerasModel evaluate")
        elif distributed:
            x = TFDataset.from_ndarrays((x, y), batch_per_thread=batch_per_thread or 32)
        else:
            values = self.model.evaluate(x, y, batch_size=batch_per_thread, verbose=0)
            return Scores(zip(self.metrics_names, map(float, np.atleast_1d(values)), strict=True))
        _require_labels(x, "evaluate")
        return renamed(self.estimator.evaluate_dataset(x, self._arranged))

    def predict(self, x: Any, batch_per_thread: int | None = None, distributed: bool = False) -> Any:
        """The model's outputs: an RDD for a `TFDataset`, arrays for arrays; see `evaluate`."""
        if isinstance(x, TFDataset):
            x.require_batch("used in KerasModel predict")
            return predict_keras(self.estimator, x)
        if not distributed:
            return self.model.predict(x, batch_size=batch_per_thread, verbose=0)
        dataset = TFDataset.from_ndarrays((x, None), batch_per_thread=batch_per_thread or 32)
        return stacked(predict_keras(self.estimator, dataset))

    @property
    def _arranged(self) -> Arranged:
        """What gives labels the shape that the targets of a model in a graph have."""
        return KerasGraph(self.model).columns if is_graph_model(self.model) else None

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        reset_metrics: bool = True,
    ) -> Any:
        """One step of Keras, here; `reset_metrics` must be True."""
        _refuse_kept_metrics(reset_metrics)
        return self.model.train_on_batch(x, y, sample_weight=sample_weight, class_weight=class_weight)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, reset_metrics: bool = True
    ) -> Any:
        _refuse_kept_metrics(reset_metrics)
        return self.model.test_on_batch(x, y, sample_weight=sample_weight)

    def predict_on_batch(self, x: Any) -> Any:
        return self.model.predict_on_batch(x)


def is_graph_model(model: Any) -> bool:
    """Whether the model lives in a graph, with a session, instead of executing eagerly."""
    return any(cls.__module__.endswith("engine.training_v1") for cls in type(model).__mro__)


class KerasGraph:
    """The graph of a model of `tf_keras`."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model = model
        self.given = optimizer

    @property
    def compiled(self) -> bool:
        return getattr(self.model, "optimizer", None) is not None and bool(
            getattr(self.model, "_is_compiled", False)
        )

    @property
    def session(self) -> Any:
        return self._backend.get_session(self.model.inputs)

    def estimator(
        self, *, model_dir: str | None = None, metrics: Any = None, **options: Any
    ) -> TFParkEstimator:
        from kindler.compat.zoo.tfpark.optimizers import graph_optimizers

        model = self.model
        training: dict[str, Any] = {}
        if self.compiled:
            optimizer = self.given if self.given is not None else model.optimizer
            training = {
                "labels": list(model._feed_targets),
                "loss": model.total_loss,
                "optimizer": graph_optimizers(optimizer),
                "metrics": {**self._metrics(), **(metrics or {})},
                "updates": list(model.updates),
            }
        return graph_estimator(
            inputs=list(model.inputs),
            outputs=list(model.outputs),
            sess=self.session,
            tensor_with_value=self._phase(),
            model_dir=model_dir,
            **training,
            **options,
        )

    def columns(self, columns: Columns) -> Columns:
        """Columns with labels of the shape that Keras's targets have: a scalar becomes (1,)."""
        if not self.compiled:
            return columns
        if not columns.has_columns:
            return replace(columns, data=columns.data.map(self.expanded))
        targets = self.model._feed_targets
        if len(targets) != len(columns.labels):
            raise ConfigError(
                f"the model has {len(targets)} targets, and the dataset {len(columns.labels)} labels."
            )
        shapes = dict(columns.shapes)
        for name, target in zip(columns.labels, targets, strict=True):
            if target.shape.rank == 2 and (shapes.get(name) == () or name not in shapes):
                shapes[name] = (1,)
        return replace(columns, shapes=shapes)

    def expanded(self, features: Any, labels: Any) -> tuple[Any, Any]:
        import tensorflow.compat.v1 as tf

        def wide(label: Any, target: Any) -> Any:
            return tf.expand_dims(label, -1) if target.shape.rank == label.shape.rank + 1 else label

        targets = self.model._feed_targets
        if len(targets) == 1:
            return features, wide(labels, targets[0])
        return features, tuple(wide(label, target) for label, target in zip(labels, targets, strict=True))

    @property
    def _backend(self) -> Any:
        return importlib.import_module("tf_keras.api._v1.keras").backend

    def _phase(self) -> dict[Any, tuple[bool, bool]] | None:
        """Keras's switch between training and inference, where the model has one."""
        phase = self._backend.learning_phase()
        if not hasattr(phase, "op") or phase.graph is not self.model.inputs[0].graph:
            return None
        return {phase: (True, False)}

    def _metrics(self) -> dict[str, Any]:
        """The metrics that are means over rows, as tensors."""
        import tensorflow.compat.v1 as tf

        model, found = self.model, {}
        per_output = getattr(model, "_per_output_metrics", None) or []
        for output, target, metrics in zip(model.outputs, model._feed_targets, per_output, strict=False):
            for name, metric in (metrics or {}).items():
                function = getattr(metric, "_fn", None)
                if function is None:
                    warnings.warn(
                        f"the metric {name!r} is not a mean over rows; it is left out.\n"
                        "Hint: evaluate it on what predict returns.",
                        stacklevel=2,
                    )
                    continue
                with output.graph.as_default():
                    found[name] = tf.reduce_mean(
                        function(target, output, **(getattr(metric, "_fn_kwargs", None) or {}))
                    )
        return found


def keras_estimator(
    model: Any, *, model_dir: str | None = None, optimizer: Any = None, **options: Any
) -> TFParkEstimator:
    """An estimator of a Keras model: of its graph, where it was made in one."""
    options.setdefault("engine", engine())
    if is_graph_model(model):
        return KerasGraph(model, optimizer).estimator(model_dir=model_dir, **options)
    options.pop("session_config", None)
    if isinstance(optimizer, OptimMethod):
        keras: Any = importlib.import_module(flavour_of(model) or "keras")
        config: Any = model.get_compile_config() if hasattr(model, "get_compile_config") else None
        metrics = flatten((config or {}).get("metrics")) or None
        model.compile(optimizer=optimizer.keras_optimizer(keras), loss=model.loss, metrics=metrics)
    elif optimizer is not None:
        raise ConfigError(
            f"optimizer must be one of bigdl.optim.optimizer; received {type(optimizer).__qualname__}."
        )
    made = TFParkEstimator.from_keras(model, model_dir=model_dir, **options)
    assert isinstance(made, TFParkEstimator)
    return made


def _require_labels(dataset: TFDataset, what: str) -> None:
    if not dataset.labels:
        raise ConfigError(f"the dataset has no labels to {what} with.\nHint: from_rdd(..., labels=...).")


def renamed(figures: dict[str, Any]) -> Scores:
    """Kindler's figures of an evaluation, under TFPark's names."""
    kept = {name: value for name, value in figures.items() if name != "num_samples"}
    return Scores({_shown(name): float(value) for name, value in kept.items()})


def predict_keras(estimator: TFParkEstimator, dataset: TFDataset) -> Any:
    rdd = predicted_rdd(estimator, dataset)
    source: Any = dataset.source
    return source.with_predictions(rdd) if hasattr(source, "with_predictions") else rdd


def _shown(name: str) -> str:
    tag = tag_of(name)
    if name == "loss" or tag == name:
        return name
    return f"{'acc' if tag == 'Top1Accuracy' else name} {tag}"


def _refuse_kept_metrics(reset_metrics: bool) -> None:
    if not reset_metrics:
        raise ConfigError("reset_metrics=False is not supported: metrics are those of the batch alone.")
