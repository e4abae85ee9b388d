"""`zoo.orca.learn.tf`: a graph or a Keras model of TensorFlow 1 on Spark."""

from __future__ import annotations

import importlib
from typing import Any

from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.triggers import EveryEpoch
from kindler.compat.bigdl.optim.validation import Scores
from kindler.compat.frameworks.tf_graph.legacy_keras import restore_legacy_keras
from kindler.compat.zoo.orca.learn.base import SparkEstimator
from kindler.compat.zoo.tfpark.model import KerasFiles, KerasGraph, is_graph_model, keras_estimator, renamed
from kindler.compat.zoo.tfpark.optimizers import graph_optimizers
from kindler.compat.zoo.tfpark.rows import refuse_batched
from kindler.compat.zoo.tfpark.tf_optimizer import without_loss
from kindler.compat.zoo.tfpark.training import TFParkEstimator, graph_estimator
from kindler.data.arrays import is_spark_frame
from kindler.errors import ConfigError

__all__ = ["Estimator"]

restore_legacy_keras()


class Estimator(SparkEstimator):
    """Made by `from_graph` or `from_keras`. Data is also, except to predict, a `tf.data.Dataset` of rows."""

    _empty = "array"

    def __init__(
        self, core: TFParkEstimator, *, model_dir: Any = None, counts: bool = False, labelled: bool = True
    ) -> None:
        self._core = core
        self._model_dir = model_dir
        self._labelled = labelled  # whether the model has labels
        self._counts = counts  # whether epochs are those since the model was new

    @staticmethod
    def from_graph(
        *,
        inputs: Any,
        labels: Any = None,
        loss: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        model_dir: Any = None,
        backend: str = "bigdl",
        **options: Any,
    ) -> Estimator:
        """`optimizer` is of `tf.train` or of `bigdl.optim.optimizer`; options are those of
        `kindler.Estimator.from_graph`. `metrics` may have the loss itself as "loss".
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
    def from_keras(
        keras_model: Any,
        metrics: Any = None,
        model_dir: Any = None,
        optimizer: Any = None,
        backend: str = "bigdl",
    ) -> Estimator:
        """`metrics`, scalar tensors by name, are for models in graphs; `optimizer` is of
        `bigdl.optim.optimizer`, to use instead of the model's.
        """
        _check_backend(backend)
        options: dict[str, Any] = {"metrics": metrics} if is_graph_model(keras_model) else {}
        options |= {"model_dir": None if model_dir is None else str(model_dir), "engine": "auto"}
        made = keras_estimator(keras_model, optimizer=optimizer, **options)
        counts = isinstance(optimizer, OptimMethod)
        return KerasEstimator(keras_model, made, model_dir=model_dir, counts=counts)

    @staticmethod
    def load_keras_model(path: str) -> Estimator:
        keras: Any = importlib.import_module("tf_keras")
        return Estimator.from_keras(keras.models.load_model(path))

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
        """Train; `session_config` and `auto_shard_files` are without effect, `feed_dict` must be None.

        With an optimizer of `bigdl.optim.optimizer`, and after `load_orca_checkpoint`, `epochs` counts from
        when the model was new, as in Orca: after a checkpoint of epoch 5, `epochs=5` trains nothing.
        Otherwise it is how many more epochs to train.
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
        more = epochs - self._core.counters[0] if self._counts or self._loaded else epochs
        if more < 1:
            return self
        options: dict[str, Any] = self._columns(data, feature_cols, label_cols)
        if self._model_dir is not None:
            trigger = EveryEpoch() if checkpoint_trigger in (None, "EveryEpoch") else checkpoint_trigger
            options |= {"checkpoint_trigger": trigger, "keep_checkpoints": None}
        self._core.fit(rows, epochs=more, batch_size=batch_size, validation_data=checked, **options)
        self._core.get_model()
        return self

    def evaluate(
        self,
        data: Any,
        batch_size: int = 32,
        feature_cols: Any = None,
        label_cols: Any = None,
        auto_shard_files: bool = False,
    ) -> Scores:
        self._require_columns(data, feature_cols, label_cols, "evaluation")
        columns = self._columns(data, feature_cols, label_cols)
        rows = self._data(data, batch_size)
        return renamed(self._core.evaluate(rows, batch_size=batch_size, verbose=0, **columns))

    def predict(
        self, data: Any, batch_size: int = 4, feature_cols: Any = None, auto_shard_files: bool = False
    ) -> Any:
        self._require_columns(data, feature_cols, "", "prediction")
        columns = {} if feature_cols is None else {"feature_cols": feature_cols}
        return self._core.predict(data, batch_size=batch_size, **columns)

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
    @property
    def sess(self) -> Any:
        return self._core.get_model()

    def save_tf_checkpoint(self, path: str) -> None:
        self._saver("save", path)

    def load_tf_checkpoint(self, path: str) -> None:
        self._saver("restore", path)

    save = save_tf_checkpoint
    load = load_tf_checkpoint

    def _saver(self, method: str, path: str) -> None:
        import tensorflow.compat.v1 as tf

        session = self.sess
        with session.graph.as_default():
            getattr(tf.train.Saver(), method)(session, path)


class KerasEstimator(KerasFiles, Estimator):
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
            return made.map(KerasGraph(self.model).expanded)
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
