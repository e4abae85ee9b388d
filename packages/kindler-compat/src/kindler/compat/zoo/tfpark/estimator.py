"""`TFEstimator`: a model function, trained, evaluated and scored over what an input function returns."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.bigdl.optim.summaries import Summary
from kindler.compat.bigdl.optim.validation import Scores, named_all
from kindler.compat.estimators import EstimatorSpec, ModeKeys
from kindler.compat.zoo.tfpark.optimizers import graph_optimizers
from kindler.compat.zoo.tfpark.rows import flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.tfnet import predict_graph
from kindler.compat.zoo.tfpark.training import graph_estimator, stacked
from kindler.errors import ConfigError

__all__ = ["Estimator", "EstimatorSpec", "ModeKeys", "TFEstimator", "TFEstimatorSpec"]


@dataclass(eq=False)
class TFEstimatorSpec:
    """What a model function returns: predictions, a tensor or a dict of them, and the loss, a scalar."""

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = field(default=None, init=False)


@dataclass
class Estimator:
    """What `tf.estimator.Estimator` was made of; `TFEstimator` runs it."""

    model_fn: Callable[..., Any]
    model_dir: str | None = None
    config: Any = None
    params: Any = None
    warm_start_from: str | None = None

    def latest_checkpoint(self) -> str | None:
        found: str | None = tf.train.latest_checkpoint(self.model_dir) if self.model_dir else None
        return found


class TFEstimator:
    def __init__(
        self,
        model_fn: Any,
        optimizer: Any = None,
        model_dir: str | None = None,
        config: Any = None,
        params: Any = None,
        warm_start_from: str | None = None,
    ) -> None:
        if not callable(model_fn) and hasattr(model_fn, "model_fn"):
            self.estimator = model_fn
        elif callable(model_fn):
            self.estimator = Estimator(model_fn, model_dir, config, params, warm_start_from)
        else:
            raise ConfigError(f"model_fn must be a function; received {type(model_fn).__qualname__}.")
        if self.estimator.model_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kindler-estimator-")
            self.estimator.model_dir = self._temporary.name
        self.optimizer = optimizer
        self.train_summary: Summary | None = None
        self.val_summary: Summary | None = None
        self._clip_norm: float | None = None
        self._clip_value: Any = None

    @classmethod
    def from_model_fn(cls, model_fn: Callable[..., Any], *args: Any, **options: Any) -> TFEstimator:
        """Of a model function whose specs have a `train_op`; others are `model_dir`, `config` and so on."""
        return cls(model_fn, None, *args, **options)

    @property
    def model_dir(self) -> str:
        return str(self.estimator.model_dir)

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def set_train_summary(self, summary: Summary) -> None:
        self.train_summary = summary

    def set_val_summary(self, summary: Summary) -> None:
        self.val_summary = summary

    def clear_gradient_clipping(self) -> None:
        self._clip_norm = self._clip_value = None

    def set_constant_gradient_clipping(self, min: float, max: float) -> None:  # noqa: A002 - TFPark's names
        self._clip_value = (min, max)

    def set_gradient_clipping_by_l2_norm(self, clip_norm: float) -> None:
        self._clip_norm = clip_norm

    def latest_checkpoint(self) -> str | None:
        found: str | None = tf.train.latest_checkpoint(self.model_dir)
        return found

    def train(
        self, input_fn: Callable[..., Any], steps: int | None = None, session_config: Any = None
    ) -> TFEstimator:
        """Train on, from the newest checkpoint in `model_dir`, and write a new one."""
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ConfigError(f"steps must be a whole number of at least 1; received {steps!r}.")
        with self._built(input_fn, ModeKeys.TRAIN) as (dataset, spec, sess):
            counter = tf.train.get_or_create_global_step()
            if spec.loss is None:
                raise ConfigError("model_fn returned no loss in training.")
            made = graph_estimator(
                inputs=dataset.fed_features,
                labels=dataset.fed_labels or None,
                loss=spec.loss,
                sess=sess,
                session_config=session_config,
                global_step=counter,
                **self._training(spec),
            )
            made.train_summary, made.val_summary = self.train_summary, self.val_summary
            self._restore(sess, self.latest_checkpoint(), partial=True)
            before = int(sess.run(counter))
            limits: dict[str, Any] = {"epochs": 1} if steps is None else {"max_steps": steps}
            made.fit_dataset(dataset, **limits)
            if int(sess.run(counter)) == before:  # the model function's train_op does not count
                counter.load(before + made.counters[1], sess)
            write_checkpoint(sess, self.model_dir, counter)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        eval_methods: Any,
        steps: int | None = None,
        checkpoint_path: str | None = None,
    ) -> Scores:
        """`eval_methods` are "acc", "top5acc", "mae", "mse", "auc", "loss" or "treennaccuracy"; `steps` must
        be None: every element is evaluated.
        """
        if steps is not None:
            raise ConfigError("steps must be None: evaluate takes every element of the dataset.")
        methods = named_all(eval_methods)
        with self._built(input_fn, ModeKeys.EVAL) as (dataset, spec, sess):
            if spec.predictions is None:
                raise ConfigError("model_fn returned no predictions in evaluation.")
            output, label = flatten(spec.predictions)[0], (flatten(dataset.label_tensors) or [None])[0]
            self._restore(sess, checkpoint_path or self.latest_checkpoint())
            own = dict(getattr(spec, "eval_metric_ops", None) or {})
            inside: dict[str, float] = {}
            wants_loss = any(method.tag == "Loss" for method in methods)
            if dataset.has_batch:
                tensors = {m.tag: m.tensor(tf, output, label) for m in methods}
                tensors = {tag: tensor for tag, tensor in tensors.items() if tensor is not None}
                if tensors or own or wants_loss:
                    inside = self._inside(sess, dataset, spec, {**own, **tensors})
            elif wants_loss:
                raise ConfigError("the loss of single elements is not evaluated; pass batch_per_thread.")
            rest = [m for m in methods if m.tag not in inside]
            if rest:
                outputs = stacked(predict_graph(sess, dataset, [output]))
                if not dataset.has_batch and outputs.ndim > 1:  # each element has a row of its own
                    outputs = outputs.reshape(len(outputs), *outputs.shape[2:])
                labels = dataset.label_arrays()
                inside |= {m.tag: m.score(outputs, labels) for m in rest}
        found = {_short(m.tag): inside[m.tag] for m in methods}
        return Scores(found | {name: inside[name] for name in own if name in inside})

    def predict(
        self, input_fn: Callable[..., Any], predict_keys: Any = None, checkpoint_path: str | None = None
    ) -> Any:
        """The predictions for every element, as an RDD of arrays, or of dicts if `model_fn` returns one."""
        with self._built(input_fn, ModeKeys.PREDICT) as (dataset, spec, sess):
            predictions, keys = spec.predictions, None
            if predictions is None:
                raise ConfigError("model_fn returned no predictions.")
            if isinstance(predictions, Mapping):
                keys = _keys(predictions, predict_keys)
                predictions = [predictions[key] for key in keys]
            self._restore(sess, checkpoint_path or self.latest_checkpoint())
            rdd = predict_graph(sess, dataset, flatten(predictions))
        if keys is not None:
            rdd = rdd.map(_Named(keys)) if hasattr(rdd, "map") else [_Named(keys)(row) for row in rdd]
        source = dataset.source
        return source.with_predictions(rdd) if hasattr(source, "with_predictions") else rdd

    @contextmanager
    def _built(self, input_fn: Callable[..., Any], mode: str) -> Iterator[tuple[TFDataset, Any, Any]]:
        """The dataset, the model function's spec and a session with first values, in their own graph."""
        estimator = self.estimator
        with tf.Graph().as_default() as graph:
            tf.train.get_or_create_global_step(graph)
            dataset = self._input(input_fn, mode)
            spec = _called(
                estimator.model_fn,
                features=dataset.feature_tensors,
                labels=None if mode == ModeKeys.PREDICT else dataset.label_tensors,
                mode=mode,
                params=estimator.params,
                config=estimator.config,
            )
            if not hasattr(spec, "predictions") or not hasattr(spec, "loss"):
                raise ConfigError(
                    "model_fn must return a TFEstimatorSpec or an EstimatorSpec; it returned"
                    f" {type(spec).__qualname__}."
                )
            with tf.Session(graph=graph) as sess:
                sess.run(tf.global_variables_initializer())
                yield dataset, spec, sess

    def _input(self, input_fn: Callable[..., Any], mode: str) -> TFDataset:
        dataset = _called(input_fn, mode=mode, params=self.estimator.params, config=self.estimator.config)
        if not isinstance(dataset, TFDataset):
            raise ConfigError(
                f"input_fn must return a TFDataset; it returned {type(dataset).__qualname__}.\n"
                "Hint: TFDataset.from_tf_data_dataset(dataset, batch_size=...) takes a tf.data.Dataset."
            )
        if mode == ModeKeys.TRAIN:
            dataset.require_training("used for training")
        dataset.renew()
        return dataset

    def _training(self, spec: Any) -> dict[str, Any]:
        if self.optimizer is not None:
            options = {"clip_norm": self._clip_norm, "clip_value": self._clip_value}
            return {"optimizer": graph_optimizers(self.optimizer), **options}
        if getattr(spec, "train_op", None) is None:
            raise ConfigError(
                "there is nothing to train with: TFEstimator has no optimizer, and model_fn returned no"
                " train_op.\n"
                "Hint: TFEstimator(model_fn, tf.train.AdamOptimizer()), or"
                " EstimatorSpec(mode, loss=loss,"
                " train_op=ZooOptimizer(tf.train.AdamOptimizer()).minimize(loss))."
            )
        if self._clip_norm is not None or self._clip_value is not None:
            raise ConfigError(
                "gradients of a train_op that model_fn creates are clipped there, not by TFEstimator."
            )
        return {"train_op": spec.train_op}

    def _inside(self, sess: Any, dataset: TFDataset, spec: Any, tensors: dict[str, Any]) -> dict[str, float]:
        """The means over rows that the graph computes."""
        if spec.loss is None:
            raise ConfigError("model_fn returned no loss in evaluation.")
        made = graph_estimator(
            inputs=dataset.fed_features,
            labels=dataset.fed_labels or None,
            loss=spec.loss,
            metrics=tensors or None,
            sess=sess,
        )
        scores = made.evaluate_dataset(dataset)
        return {**{tag: float(scores[tag]) for tag in tensors}, "Loss": float(scores["loss"])}

    def _restore(self, sess: Any, path: str | None, *, partial: bool = False) -> None:
        warm, start = path is None, self.estimator.warm_start_from
        if path is None:
            if start is None:
                return
            path = tf.train.latest_checkpoint(start) if os.path.isdir(start) else start
        reader = tf.train.load_checkpoint(path)
        stored = reader.get_variable_to_shape_map()
        missing = []
        for variable in sess.graph.get_collection("variables"):
            name = variable.op.name
            if name in stored and not (warm and name == "global_step"):
                variable.load(reader.get_tensor(name), sess)
            elif variable in sess.graph.get_collection("trainable_variables"):
                missing.append(name)
        if missing and not partial:
            raise ConfigError(f"{path} has no values of {missing}; it is a checkpoint from another model.")


@dataclass(frozen=True)
class _Named:
    """Puts outputs under their keys; runs on the executors."""

    keys: list[str]

    def __call__(self, row: Any) -> dict[str, Any]:
        return dict(zip(self.keys, row if isinstance(row, list) else [row], strict=True))


def _keys(predictions: Mapping[str, Any], wanted: Any) -> list[str]:
    keys = sorted(predictions)
    if wanted is None:
        return keys
    chosen = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [key for key in chosen if key not in predictions]
    if unknown:
        raise ConfigError(f"predict_keys: model_fn's predictions have no {unknown}; they have {keys}.")
    return [key for key in keys if key in chosen]


def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function with those of the arguments that it has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**arguments)
    known = {name: value for name, value in arguments.items() if name in parameters}
    if not known and parameters:  # its one parameter has a name of its own
        return function(next(iter(arguments.values())))
    return function(**known)


def write_checkpoint(sess: Any, folder: str, counter: Any) -> None:
    """`model-<step>` in this folder, among the last five, as `tf.train.Saver` writes them."""
    os.makedirs(folder, exist_ok=True)
    saver = tf.train.Saver(max_to_keep=5)
    earlier = tf.train.get_checkpoint_state(folder)
    if earlier is not None:
        saver.recover_last_checkpoints(list(earlier.all_model_checkpoint_paths))
    saver.save(sess, os.path.join(folder, "model"), global_step=int(sess.run(counter)))


def _short(tag: str) -> str:
    return {"Top1Accuracy": "acc Top1Accuracy", "Loss": "loss"}.get(tag, tag)
