"""`zoo.orca.learn.tf.estimator.Estimator`: a graph or a Keras model of TensorFlow 1 on Spark."""

from __future__ import annotations

import importlib
from os import PathLike
from typing import Any

from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.triggers import EveryEpoch
from kindler.compat.bigdl.optim.validation import Scores
from kindler.compat.zoo.orca.errors import as_orca
from kindler.compat.zoo.orca.learn.base import SparkEstimator
from kindler.compat.zoo.tfpark.keras_graph import KerasGraph, is_graph_model
from kindler.compat.zoo.tfpark.model import KerasFiles, keras_estimator, renamed
from kindler.compat.zoo.tfpark.optimizers import graph_optimizers
from kindler.compat.zoo.tfpark.rows import refuse_batched
from kindler.compat.zoo.tfpark.tf_optimizer import without_loss
from kindler.compat.zoo.tfpark.training import TFParkEstimator, graph_estimator
from kindler.data.arrays import is_spark_frame
from kindler.errors import ConfigError

__all__ = ["Estimator"]


class Estimator(SparkEstimator):
    """Trains, evaluates and scores a graph or a Keras model on Spark.

    Data is a Spark DataFrame, an XShards or, except to predict, a `tf.data.Dataset`.

    Create one with `Estimator.from_graph` or `Estimator.from_keras`.
    """

    _empty = "array"

    def __init__(
        self, core: TFParkEstimator, *, model_dir: Any = None, counts: bool = False, labelled: bool = True
    ) -> None:
        self._core = core
        self._model_dir = model_dir
        self._labelled = labelled  # whether the model has labels
        self._counts = counts  # whether epochs are those since the model was new
        self._loaded = False

    @staticmethod
    @as_orca
    def from_graph(
        *,
        inputs: Any,
        labels: Any = None,
        loss: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        model_dir: str | PathLike[str] | None = None,
        backend: str = "bigdl",
        **options: Any,
    ) -> Estimator:
        """Create an estimator from tensors of a graph.

        Args:
            inputs: The placeholders of the features.
            labels: The placeholders of the labels.
            loss: A scalar tensor.
            optimizer: Of `tf.train`, or of `bigdl.optim.optimizer`.
            metrics: A dict from names to scalar tensors; "loss" may be the loss itself.
            model_dir: A folder for checkpoints and summaries.
            backend: Must be "bigdl".
            options: `outputs`, `clip_norm`, `clip_value`, `updates`, `sess` and others of
                `kindler.Estimator.from_graph`.
        """
        _check_backend(backend)
        made = graph_estimator(
            inputs=inputs,
            labels=labels,
            loss=loss,
            optimizer=None if optimizer is None else graph_optimizers(optimizer),
            metrics=without_loss(metrics, loss) or None if metrics else None,
            model_dir=model_dir,
            **{"engine": "auto", **options},
        )
        counts = isinstance(optimizer, OptimMethod)
        return GraphEstimator(made, model_dir=model_dir, counts=counts, labelled=labels is not None)

    @staticmethod
    @as_orca
    def from_keras(
        keras_model: Any,
        metrics: Any = None,
        model_dir: str | PathLike[str] | None = None,
        optimizer: Any = None,
        backend: str = "bigdl",
    ) -> Estimator:
        """Create an estimator from a compiled Keras model, in a graph of TensorFlow 1 or not.

        Args:
            keras_model: The model.
            metrics: For models in graphs: more metrics, a dict from names to scalar tensors.
            model_dir: A folder for checkpoints and summaries.
            optimizer: An optimizer of `bigdl.optim.optimizer` to use instead of the model's.
            backend: Must be "bigdl".
        """
        _check_backend(backend)
        directory = None if model_dir is None else str(model_dir)
        options = {"metrics": metrics} if is_graph_model(keras_model) else {}
        made = keras_estimator(
            keras_model, model_dir=directory, optimizer=optimizer, engine="auto", **options
        )
        return KerasEstimator(
            keras_model, made, model_dir=model_dir, counts=isinstance(optimizer, OptimMethod)
        )

    @staticmethod
    @as_orca
    def load_keras_model(path: str) -> Estimator:
        """An estimator of a Keras model in a file."""
        keras: Any = importlib.import_module("tf_keras")
        return Estimator.from_keras(keras.models.load_model(path))

    @as_orca
    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int = 32,
        feature_cols: Any = None,
        label_cols: Any = None,
        validation_data: Any = None,
        session_config: Any = None,
        checkpoint_trigger: Any = None,
        auto_shard_files: bool = False,
        feed_dict: Any = None,
    ) -> Estimator:
        """Train; see `OrcaEstimator` for the arguments of data.

        With an optimizer of `bigdl.optim.optimizer`, and after `load_orca_checkpoint`, `epochs` counts from
        when the model was new, as in Orca: after a checkpoint of epoch 5, `epochs=5` trains nothing.
        Otherwise it is how many more epochs to train.

        Args:
            data: Also a `tf.data.Dataset` of single rows.
            epochs: Number of epochs.
            batch_size: Rows of a step over all workers.
            validation_data: Data of the same kind.
            checkpoint_trigger: When to write a checkpoint to `model_dir`; None is after every epoch.
            feed_dict: Must be None; pass `tensor_with_value` to `kindler.Estimator.from_graph`.
            session_config, auto_shard_files: Without effect.
        """
        if feed_dict is not None:
            raise ConfigError(
                "feed_dict: use kindler.Estimator.from_graph(tensor_with_value={tensor: (train, eval)})."
            )
        self._require_columns(data, feature_cols, label_cols, "training")
        if is_spark_frame(data) and isinstance(validation_data, list | tuple | dict):
            raise ConfigError(
                "train data and validation data should be both Spark DataFrame; received validation_data of"
                f" type {type(validation_data).__qualname__}."
            )
        rows = self._data(data, batch_size)
        checked = None if validation_data is None else self._data(validation_data, batch_size)
        done, _ = self._core.counters
        more = epochs - done if self._counts or self._loaded else epochs
        if more < 1:
            return self
        trigger = EveryEpoch() if checkpoint_trigger in (None, "EveryEpoch") else checkpoint_trigger
        options: dict[str, Any] = (
            {} if self._model_dir is None else {"checkpoint_trigger": trigger, "keep_checkpoints": None}
        )
        self._core.fit(
            rows,
            epochs=more,
            batch_size=batch_size,
            validation_data=checked,
            **self._columns(data, feature_cols, label_cols),
            **options,
        )
        self._core.get_model()
        return self

    @as_orca
    def evaluate(
        self,
        data: Any,
        batch_size: int = 32,
        feature_cols: Any = None,
        label_cols: Any = None,
        auto_shard_files: bool = False,
    ) -> Scores:
        """The loss and the metrics by name; every row counts once."""
        self._require_columns(data, feature_cols, label_cols, "evaluation")
        columns = self._columns(data, feature_cols, label_cols)
        rows = self._data(data, batch_size)
        return renamed(self._core.evaluate(rows, batch_size=batch_size, verbose=0, **columns))

    @as_orca
    def predict(
        self, data: Any, batch_size: int = 4, feature_cols: Any = None, auto_shard_files: bool = False
    ) -> Any:
        """The DataFrame or XShards with the outputs, as `prediction`."""
        self._require_columns(data, feature_cols, "", "prediction")
        columns = {} if feature_cols is None else {"feature_cols": feature_cols}
        return self._core.predict(data, batch_size=batch_size, **columns)

    def load_orca_checkpoint(
        self, path: str | PathLike[str], version: int | None = None, prefix: str | None = None
    ) -> Estimator:
        super().load_orca_checkpoint(path, version)
        self._loaded = True
        return self

    def _require_columns(self, data: Any, features: Any, labels: Any, where: str) -> None:
        missing = {"feature": features is None, "label": labels is None and self._labelled}
        for name, lacks in missing.items():
            if lacks and is_spark_frame(data):
                raise ConfigError(f"{name} columns is None; it should not be None in {where}.")

    def _data(self, data: Any, batch_size: int) -> Any:
        if hasattr(data, "element_spec"):
            refuse_batched(data)
            return data.batch(batch_size)
        return data

    def _columns(self, data: Any, features: Any, labels: Any) -> dict[str, Any]:
        columns = {"feature_cols": features, "label_cols": labels}
        return {name: value for name, value in columns.items() if value is not None}


class GraphEstimator(Estimator):
    """The estimator of a graph."""

    @property
    def sess(self) -> Any:
        return self._core.get_model()

    def save_tf_checkpoint(self, path: str) -> None:
        """Write the session's variables as `tf.train.Saver` does."""
        self._saver("save", path)

    def load_tf_checkpoint(self, path: str) -> None:
        """Read the session's variables from what `tf.train.Saver` wrote."""
        self._saver("restore", path)

    save = save_tf_checkpoint
    load = load_tf_checkpoint

    def _saver(self, method: str, path: str) -> None:
        import tensorflow.compat.v1 as tf

        session = self.sess
        with session.graph.as_default():
            getattr(tf.train.Saver(), method)(session, path)


class KerasEstimator(KerasFiles, Estimator):
    """The estimator of a Keras model."""

    def __init__(self, model: Any, core: TFParkEstimator, **options: Any) -> None:
        super().__init__(core, **options)
        self.model = model

    def get_model(self) -> Any:
        self._core.get_model()
        return self.model

    save = save_keras_model = KerasFiles.save_model
    save_keras_weights = KerasFiles.save_weights
    load_keras_weights = KerasFiles.load_weights

    def load(self, model_path: str) -> None:
        """Read the weights of a model in a file."""
        keras: Any = importlib.import_module("tf_keras")
        self.model.set_weights(keras.models.load_model(model_path).get_weights())

    def _columns(self, data: Any, features: Any, labels: Any) -> dict[str, Any]:
        found = super()._columns(data, features, labels)
        if not is_graph_model(self.model) or hasattr(data, "element_spec"):
            return found
        names = [labels] if isinstance(labels, str) else list(labels or ["y"])
        targets = self.model._feed_targets
        shapes = {
            n: (1,) for n, t in zip(names, targets, strict=False) if t.shape.rank == 2 and _scalar(data, n)
        }
        return {**found, **({"shapes": shapes} if shapes else {})}

    def _data(self, data: Any, batch_size: int) -> Any:
        made = super()._data(data, batch_size)
        if hasattr(data, "element_spec") and is_graph_model(self.model):
            return made.map(KerasGraph(self.model)._expanded)
        return made


def _check_backend(backend: str) -> None:
    if backend != "bigdl":
        raise ConfigError(f"backend={backend!r}: TensorFlow 1 has the backend 'bigdl'.")


def _scalar(data: Any, name: str) -> bool:
    """Whether a column of a DataFrame, or the labels of shards, are single numbers."""
    if is_spark_frame(data):
        return name in data.columns and not data.schema[name].dataType.simpleString().startswith(
            ("array", "vector")
        )
    first = data.first() if hasattr(data, "first") else data
    if hasattr(first, "columns") and name in first.columns:  # of pandas
        return bool(first[name].dtype.kind in "biuf")
    labels = first.get("y") if isinstance(first, dict) else None
    return labels is not None and getattr(labels, "ndim", 0) == 1
