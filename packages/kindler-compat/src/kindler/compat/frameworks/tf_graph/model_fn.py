"""Model functions: a graph for each of training, evaluating and predicting, one set of values.

Each graph is trained and scored by an estimator of its own. Their variables have the same names, and values
go from one to the next by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.compat.frameworks.tf_graph import InputData, ModeKeys, files
from kindler.compat.frameworks.tf_graph.ends import Values, ends_of, needed
from kindler.compat.frameworks.tf_graph.legacy_keras import restore_legacy_keras
from kindler.data import parquet
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, conform, to_numpy
from kindler.data.sources import columns_in_memory
from kindler.errors import ConfigError, NotFittedError
from kindler.estimator.inputs.contract import Input
from kindler.estimator.inputs.local import LoaderInput, MemoryInput, ParquetInput, opener
from kindler.estimator.inputs.recognise import recognise
from kindler.estimator.inputs.spark import FrameInput
from kindler.frameworks.creators import call, title


class ModelFnEstimator:
    """Trains, evaluates and scores what a model function builds; made by `Estimator.from_model_fn`.

    Each call builds a graph for its mode. Values go from one to the next through checkpoints in `model_dir`,
    which `tf.train.Saver` reads as well, or in memory without one.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        model_fn: Callable[..., Any],
        optimizer: Any,
        model_dir: str | PathLike[str] | None,
        params: Any,
        config: Any,
        warm_start_from: str | PathLike[str] | None,
        options: Mapping[str, Any],
    ) -> None:
        if not callable(model_fn):
            raise ConfigError(f"model_fn must be a function; received {type(model_fn).__qualname__}.")
        self._make, self._model_fn, self._optimizer = make, model_fn, optimizer
        self._model_dir = None if model_dir is None else str(model_dir)
        self._params, self._config, self._options = params, config, dict(options)
        self._warm = None if warm_start_from is None else str(warm_start_from)
        self._values: dict[str, Array] | None = None
        self.history: list[dict[str, Any]] = []

    @property
    def global_step(self) -> int:
        """Steps that the newest values have been trained for; 0 before any."""
        known = self._known(None)
        return int(known["global_step:0"]) if known is not None else 0

    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint in `model_dir`, or None."""
        return None if self._model_dir is None else files.checkpoint_of(self._model_dir)

    def train(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        *,
        epochs: int | None = None,
        **options: Any,
    ) -> ModelFnEstimator:
        """Train, from where the newest checkpoint left off, and write a checkpoint.

        Args:
            input_fn: Called with the mode if it takes it; returns data of any kind that `Estimator.fit`
                takes, or an `InputData`.
            steps: Optimizer steps to make. None makes one epoch, or `epochs`.
            epochs: Passes over the data.
            options: Options of `Estimator.fit`.
        """
        given, spec, known, _ = self._built(input_fn, ModeKeys.TRAIN)
        train_op = getattr(spec, "train_op", None)
        if train_op is None and self._optimizer is None:
            raise ConfigError(
                "there is no optimizer.\nHint: pass optimizer=... to from_model_fn, or let the model function"
                " return an EstimatorSpec with train_op=optimizer.minimize(loss)."
            )
        run_dir = None if self._model_dir is None else f"{self._model_dir.rstrip('/')}/run"
        known |= {"optimizer": self._optimizer, "train_op": train_op, "model_dir": run_dir}
        estimator = self._make(**{**self._options, **known})
        session = estimator.get_model()
        self._start(session)
        before = self.global_step
        rows = estimator.fit(
            given.data, epochs, given.batch_size, max_steps=steps, **self._columns(given), **options
        )
        self.history += rows
        kept = _kept(session)
        found = dict(zip((v.name for v in kept.variables), kept.read(), strict=True))
        if int(found["global_step:0"]) == before:  # a train op of the user's that does not count steps
            found["global_step:0"] = np.asarray(before + sum(row["steps"] for row in rows), np.int64)
        self._values = found
        if self._model_dir is not None:
            files.write_checkpoint(self._model_dir, found, int(found["global_step:0"]))
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        eval_methods: Sequence[str] | None = None,
        checkpoint_path: str | PathLike[str] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Evaluate every row.

        Args:
            input_fn: As in `train`.
            eval_methods: Metrics in addition to those of the model function's spec: "acc" (or "accuracy"),
                "top5acc", "mae", "mse", "auc", "loss".
            checkpoint_path: The checkpoint to evaluate. None is the newest.
            options: Options of `Estimator.evaluate`.

        Returns:
            The loss, each metric by its name, `num_samples` and `global_step`.
        """
        given, _, known, metrics = self._built(input_fn, ModeKeys.EVAL, eval_methods or ())
        estimator = self._make(**{**self._options, **known, "metrics": metrics})
        values = self._required(checkpoint_path)
        restore(estimator.get_model(), values)
        figures = estimator.evaluate(given.data, given.batch_size, **self._columns(given), **options)
        return {**figures, "global_step": int(values.get("global_step:0", 0))}

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        checkpoint_path: str | PathLike[str] | None = None,
        **options: Any,
    ) -> Any:
        """Score every row; see `Estimator.predict` for what comes back.

        Args:
            input_fn: As in `train`; labels are not read.
            predict_keys: Those of the predictions to return, where the model function predicts a dict.
            checkpoint_path: The checkpoint to predict with. None is the newest.
            options: Options of `Estimator.predict`.
        """
        given, spec, known, _ = self._built(input_fn, ModeKeys.PREDICT)
        outputs = _chosen(spec.predictions, predict_keys)
        estimator = self._make(**{**self._options, **known, "outputs": outputs})
        restore(estimator.get_model(), self._required(checkpoint_path))
        columns = {name: value for name, value in self._columns(given).items() if name != "label_cols"}
        return estimator.predict(given.data, **columns, **options)

    def _columns(self, given: InputData) -> dict[str, Any]:
        named = {"feature_cols": given.feature_cols, "label_cols": given.label_cols}
        return {**{name: value for name, value in named.items() if value is not None}, **given.options}

    def _built(self, input_fn: Callable[..., Any], mode: str, methods: Sequence[str] = ()) -> Any:
        """The data, what the model function returns in a graph of its own, what is fed to it, and metrics."""
        data = call(input_fn, mode)
        given = data if isinstance(data, InputData) else InputData(data=data)
        columns = ColumnOptions(
            feature_cols=given.feature_cols,
            label_cols=given.label_cols,
            need_labels=mode != ModeKeys.PREDICT,
            **{name: given.options[name] for name in ("shapes", "dtypes") if name in given.options},
        )
        features, labels = _described(recognise(given.data), columns)
        predicts = mode == ModeKeys.PREDICT
        restore_legacy_keras()
        with tf.Graph().as_default():
            tf.train.get_or_create_global_step()
            inputs = {name: _placeholder(name, column, "features") for name, column in features.items()}
            labels = {} if predicts else labels
            targets = {name: _placeholder(name, column, "labels") for name, column in labels.items()}
            spec = self._called(_as_argument(inputs), _as_argument(targets), mode)
            own = getattr(spec, "eval_metric_ops", None) if mode == ModeKeys.EVAL else None
            asked = {name: _metric(name, spec.predictions, targets) for name in methods if name != "loss"}
        known = {"inputs": inputs} if predicts else {"inputs": inputs, "labels": targets, "loss": spec.loss}
        return given, spec, known, {**(own or {}), **asked}

    def _called(self, features: Any, labels: Any, mode: str) -> Any:
        function, name = self._model_fn, title(self._model_fn)
        parameters = inspect.signature(function).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = {"labels": labels, "mode": mode, "params": self._params, "config": self._config}
        arguments = {name: value for name, value in known.items() if name in parameters or every}
        if labels is not None and "labels" not in arguments:
            raise ConfigError(f"{name} has no argument labels, and the data has labels.")
        spec = function(features, **arguments)
        if not hasattr(spec, "predictions") or not hasattr(spec, "loss"):
            raise ConfigError(f"{name} must return an EstimatorSpec; it returned {type(spec).__qualname__}.")
        required = "predictions" if mode == ModeKeys.PREDICT else "loss"
        if getattr(spec, required) is None:
            raise ConfigError(f"{name} returned no {required} for mode {mode!r}.")
        return spec

    def _start(self, session: Any) -> None:
        """Values to train from: the newest, or those of `warm_start_from` for variables that it has."""
        known = self._known(None)
        if known is not None:
            restore(session, known, needs="trainable")
        elif self._warm is not None:
            values = _read("warm_start_from", self._warm)
            values.pop("global_step:0", None)
            if not restore(session, values, needs="nothing"):
                raise ConfigError(f"warm_start_from={self._warm!r} has none of the model's variables.")

    def _known(self, checkpoint_path: str | PathLike[str] | None) -> dict[str, Array] | None:
        if checkpoint_path is not None:
            return _read("checkpoint_path", str(checkpoint_path))
        newest = self.latest_checkpoint()
        return self._values if newest is None else files.read_checkpoint(newest)

    def _required(self, checkpoint_path: str | PathLike[str] | None) -> dict[str, Array]:
        known = self._known(checkpoint_path)
        if known is None:
            raise NotFittedError("train() was not called yet; call it first, or pass checkpoint_path=...")
        return known


def _read(argument: str, place: str) -> dict[str, Array]:
    prefix = files.checkpoint_of(place)
    if prefix is None:
        raise ConfigError(f"{argument}={place!r}: there is no checkpoint.")
    return files.read_checkpoint(prefix)


def _chosen(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    if keys is None:
        return predictions
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, Mapping):
        raise ConfigError(f"predict_keys={wanted}: the model function predicts one tensor, without keys.")
    missing = [key for key in wanted if key not in predictions]
    if missing:
        raise ConfigError(f"predict_keys: there is no {missing[0]!r} among {sorted(predictions)}.")
    return {key: predictions[key] for key in wanted}


def _described(given: Input, options: ColumnOptions) -> Any:
    """The features and labels of some data by name, as dtypes and shapes of batches, from one row of it."""
    if isinstance(given, LoaderInput):
        return _of_batches(given.data)
    columns, arrays, _ = columns_in_memory(_one_row(given), options)

    def described(each: Any) -> Any:
        part = arrays[each.name][:1]
        row = (conform if isinstance(part, np.ndarray) else to_numpy)(part, each, where=str)
        return tf.TensorSpec((None, *row.shape[1:]), row.dtype)

    return tuple({each.name: described(each) for each in p} for p in (columns.features, columns.labels))


def _one_row(given: Input) -> Any:
    """Local data that has at least one row, with the same columns."""
    if isinstance(given, FrameInput):
        from kindler.spark.frames import collected

        return collected(given.data, given.data.columns, rows=1)
    if isinstance(given, ParquetInput):
        files = parquet.inspect(given.data, opener(None))
        return next(iter(parquet.scan(files, parquet.schema(files).names, 0, 1)))
    return given.rows if isinstance(given, MemoryInput) else given.data.head(1)


def _of_batches(data: Any) -> Any:
    """The same of a `tf.data.Dataset`, which says what its batches are."""
    spec = getattr(data, "element_spec", None)
    if spec is None:
        raise ConfigError(
            f"input_fn returned {type(data).__qualname__}, whose batches are known only once it runs.\n"
            "Hint: return a tf.data.Dataset, arrays, an XShards or a DataFrame."
        )
    parts = spec if isinstance(spec, tuple) else (spec,)
    sides = []
    for role, part in zip(("x", "y"), (*parts, None)[:2], strict=True):
        leaves = dict(part) if isinstance(part, Mapping) else {} if part is None else {role: part}
        for name, leaf in leaves.items():
            if leaf.shape.rank == 0:
                raise ConfigError(
                    f"the dataset's {name!r} is a single value: its elements are rows, not batches of them.\n"
                    "Hint: dataset.batch(n)."
                )
        sides.append(leaves)
    return sides


def restore(
    sess: Any, values: Mapping[str, Array], *, needs: Literal["all", "trainable", "nothing"] = "all"
) -> list[str]:
    """Give a session's variables these values, by name; returns the names of those that got one."""
    kept = _kept(sess)
    required = [v for v in kept.variables if needs == "all" or (needs == "trainable" and v.trainable)]
    missing = [v.name for v in required if v.name not in values and v.name != "global_step:0"]
    if missing:
        raise ConfigError(
            f"there is no value for the variable {missing[0]!r} in {sorted(values)[:8]}; the model function"
            " builds other variables than those that were trained."
        )
    known = {v.name: values[v.name] for v in kept.variables if v.name in values}
    kept.assign(known)
    return list(known)


def _kept(sess: Any) -> Values:
    """The variables that checkpoints hold."""
    with sess.graph.as_default():
        ops = needed([variable.op for variable in sess.graph.get_collection("variables")])
        return Values(sess, ends_of(sess.graph, ops))


def _placeholder(name: str, column: Any, role: str) -> Any:
    dtype = tf.float32 if role == "features" and column.dtype == tf.float64 else column.dtype
    name = "".join(letter if letter.isalnum() else "_" for letter in name)
    return tf.placeholder(dtype, (None, *column.shape.as_list()[1:]), name=f"{role}_{name}")


def _as_argument(tensors: Mapping[str, Any]) -> Any:
    if not tensors:
        return None
    return next(iter(tensors.values())) if len(tensors) == 1 else dict(tensors)


def _metric(name: str, predictions: Any, labels: Mapping[str, Any]) -> Any:
    """A metric of the first of the predictions and the first of the labels."""
    known = ("acc", "accuracy", "top5acc", "mae", "mse", "auc", "loss")
    if name not in known:
        raise ConfigError(f"eval_methods: there is no {name!r}; there are {', '.join(known)}.")
    if predictions is None or not labels:
        raise ConfigError(f"eval_methods: {name!r} needs predictions and labels.")
    outputs = next(iter(predictions.values())) if isinstance(predictions, Mapping) else predictions
    targets = next(iter(labels.values()))
    if name in ("mae", "mse"):
        errors = tf.cast(outputs, tf.float32) - tf.reshape(tf.cast(targets, tf.float32), tf.shape(outputs))
        return tf.reduce_mean(tf.abs(errors) if name == "mae" else tf.square(errors))
    if name == "auc":
        flat = tf.reshape(outputs, (-1,))
        return tf.metrics.auc(tf.reshape(targets, (-1,)), flat, num_thresholds=200)
    classes = _classes(targets, outputs)
    if name == "top5acc":
        return tf.reduce_mean(tf.cast(tf.nn.in_top_k(outputs, classes, 5), tf.float32))
    if outputs.shape.rank is not None and outputs.shape.rank > 1 and outputs.shape[-1] != 1:
        best = tf.argmax(outputs, -1, output_type=tf.int32)
    else:
        best = tf.cast(tf.reshape(outputs, (-1,)) > 0.5, tf.int32)
    return tf.reduce_mean(tf.cast(tf.equal(best, classes), tf.float32))


def _classes(targets: Any, outputs: Any) -> Any:
    """Labels as class numbers: given as such, in a column of one, or as one 1 among zeros."""
    if targets.shape.rank == 2 and targets.shape[-1] != 1 and outputs.shape.rank == 2:
        return tf.argmax(targets, -1, output_type=tf.int32)
    return tf.cast(tf.reshape(targets, (-1,)), tf.int32)
