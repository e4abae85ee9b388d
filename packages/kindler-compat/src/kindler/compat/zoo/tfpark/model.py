"""`KerasModel`: a compiled Keras model, trained, evaluated and scored over a `TFDataset`."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.validation import Scores, tag_of
from kindler.compat.zoo.tfpark.keras_graph import KerasGraph, is_graph_model
from kindler.compat.zoo.tfpark.structures import flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.training import Arranged, TFParkEstimator, engine, predicted_rdd, stacked
from kindler.errors import ConfigError
from kindler.frameworks.keras.backends import flavour_of

__all__ = ["KerasModel"]


class KerasFiles:
    """Writes and reads a Keras model, and its weights alone."""

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

    Args:
        model: A compiled model: of `tf_keras` (in a graph of TensorFlow 1 or not), or of Keras 3.
        model_dir: A folder for checkpoints, one after each epoch of `fit` on a dataset.
        optimizer: An optimizer of `bigdl.optim.optimizer` to use instead of the model's.
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
        """A model from a file that `save_model` or `tf_keras` wrote."""
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
        """Train the model.

        Args:
            x, y: A `TFDataset`, or arrays of rows and labels.
            batch_size: Rows of a step, for arrays; default 32.
            epochs: How many more epochs to train.
            validation_data: (x, y), for arrays; a dataset has its own.
            distributed: Whether arrays are divided among all workers.
            kwargs: Arguments of Keras's own `fit`, for arrays; `session_config` for graphs.
        """
        if not isinstance(x, TFDataset) and not distributed:
            kwargs.pop("session_config", None)
            return self.model.fit(
                x, y, batch_size=batch_size, epochs=epochs, validation_data=validation_data, **kwargs
            )
        if isinstance(x, TFDataset):
            if validation_data is not None:
                raise ConfigError(
                    "validation_data must be None with a TFDataset.\n"
                    "Hint: give the rows to the dataset: from_rdd(..., val_rdd=...)."
                )
            dataset = x
        else:
            checked = validation_data[:2] if validation_data is not None else None
            dataset = TFDataset.from_ndarrays(
                (x, y), batch_size=batch_size or 32, val_tensors=None if checked is None else tuple(checked)
            )
        fit_keras(self.model, self.estimator, dataset, epochs, **kwargs)
        return self

    def evaluate(
        self, x: Any = None, y: Any = None, batch_per_thread: int | None = None, distributed: bool = False
    ) -> Scores:
        """The loss and the metrics, by name. For arrays, `batch_per_thread` is the rows of one call."""
        if isinstance(x, TFDataset):
            x.require_batch("used in KerasModel evaluate")
            return evaluate_keras(self.model, self.estimator, x)
        if not distributed:
            values = self.model.evaluate(x, y, batch_size=batch_per_thread, verbose=0)
            return Scores(zip(self.metrics_names, map(float, np.atleast_1d(values)), strict=True))
        dataset = TFDataset.from_ndarrays((x, y), batch_per_thread=batch_per_thread or 32)
        return evaluate_keras(self.model, self.estimator, dataset)

    def predict(self, x: Any, batch_per_thread: int | None = None, distributed: bool = False) -> Any:
        """The model's outputs: an RDD for a `TFDataset`, arrays for arrays; see `evaluate`."""
        if isinstance(x, TFDataset):
            x.require_batch("used in KerasModel predict")
            return predict_keras(self.estimator, x)
        if not distributed:
            return self.model.predict(x, batch_size=batch_per_thread, verbose=0)
        rows = predict_keras(
            self.estimator, TFDataset.from_ndarrays((x, None), batch_per_thread=batch_per_thread or 32)
        )
        return stacked(rows)

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
        """Keras's figures for one batch, here; `reset_metrics` must be True."""
        _refuse_kept_metrics(reset_metrics)
        return self.model.test_on_batch(x, y, sample_weight=sample_weight)

    def predict_on_batch(self, x: Any) -> Any:
        """Keras's outputs for one batch, here."""
        return self.model.predict_on_batch(x)


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
        model.compile(optimizer=optimizer.keras_optimizer(keras), loss=model.loss, metrics=_metrics_of(model))
    elif optimizer is not None:
        raise ConfigError(
            f"optimizer must be one of bigdl.optim.optimizer; received {type(optimizer).__qualname__}."
        )
    made = TFParkEstimator.from_keras(model, model_dir=model_dir, **options)
    assert isinstance(made, TFParkEstimator)
    return made


def fit_keras(
    model: Any, estimator: TFParkEstimator, dataset: TFDataset, epochs: int = 1, **options: Any
) -> Any:
    """Train over a dataset, and leave the trained weights in the user's model."""
    dataset.require_training("used in KerasModel fit")
    if not dataset.labels:
        raise ConfigError(
            "the dataset has no labels to train a Keras model with.\nHint: from_rdd(..., labels=...)."
        )
    options.pop("session_config", None)  # threads of workers are Kindler's to choose
    history = estimator.fit_dataset(dataset, _arranged(model), epochs=epochs, **options)
    estimator.get_model()
    return history


def evaluate_keras(model: Any, estimator: TFParkEstimator, dataset: TFDataset) -> Scores:
    """The loss and the metrics under TFPark's names."""
    if not dataset.labels:
        raise ConfigError("the dataset has no labels to evaluate with.\nHint: from_rdd(..., labels=...).")
    return renamed(estimator.evaluate_dataset(dataset, _arranged(model)))


def renamed(figures: dict[str, Any]) -> Scores:
    """Kindler's figures of an evaluation, under TFPark's names."""
    kept = {name: value for name, value in figures.items() if name != "num_samples"}
    return Scores({_shown(name): float(value) for name, value in kept.items()})


def predict_keras(estimator: TFParkEstimator, dataset: TFDataset) -> Any:
    if dataset.rows is None or not dataset.rows.predicts:
        raise ConfigError(
            "a tf.data.Dataset cannot be predicted.\nHint: use from_rdd, from_ndarrays or from_dataframe."
        )
    rdd = predicted_rdd(estimator, dataset.columns(), dataset.rows_per_call)
    source: Any = dataset.source
    return source.with_predictions(rdd) if hasattr(source, "with_predictions") else rdd


def _arranged(model: Any) -> Arranged:
    """What gives labels the shape that the targets of a model in a graph have."""
    return KerasGraph(model).columns if is_graph_model(model) else None


def _shown(name: str) -> str:
    tag = tag_of(name)
    if name == "loss" or tag == name:
        return name
    return f"{'acc' if tag == 'Top1Accuracy' else name} {tag}"


def _metrics_of(model: Any) -> Any:
    config: Any = model.get_compile_config() if hasattr(model, "get_compile_config") else None
    return flatten((config or {}).get("metrics")) or None


def _refuse_kept_metrics(reset_metrics: bool) -> None:
    if not reset_metrics:
        raise ConfigError("reset_metrics=False is not supported: figures are those of the batch alone.")
