"""`TFOptimizer`: a loss of a TensorFlow graph, minimized over a `TFDataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.bigdl.optim.summaries import Summary
from kindler.compat.bigdl.optim.triggers import EveryEpoch, MaxEpoch
from kindler.compat.bigdl.optim.validation import named_all
from kindler.compat.zoo.tfpark.keras_graph import KerasGraph, is_graph_model
from kindler.compat.zoo.tfpark.optimizers import counted, graph_optimizers, methods_of
from kindler.compat.zoo.tfpark.placeholders import dataset_of, refuse_unfed
from kindler.compat.zoo.tfpark.structures import flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.training import Since, TFParkEstimator, find_checkpoint, graph_estimator
from kindler.errors import ConfigError
from kindler.train.triggers import Progress, Trigger

__all__ = ["TFOptimizer"]


class TFOptimizer:
    """Trains the variables that a loss depends on.

    After `optimize` the session `sess` holds the trained values, so that
    `tf.train.Saver().save(optimizer.sess, ...)` and Keras's `save_weights` write them.

    The arguments are those of `from_loss`, whose `session` is `sess` here.
    """

    def __init__(
        self, loss: Any, optim_method: Any = None, sess: Any = None, dataset: Any = None, **options: Any
    ) -> None:
        other = TFOptimizer.from_loss(loss, optim_method, session=sess, dataset=dataset, **options)
        self.__dict__.update(other.__dict__)

    dataset: TFDataset
    model_dir: str | PathLike[str] | None
    train_summary: Summary | None = None
    val_summary: Summary | None = None
    _sess: Any
    _parts: dict[str, Any]
    _keras: KerasGraph | Any = None
    _made: TFParkEstimator | None = None
    _clip_norm: float | None
    _clip_value: Any
    _methods: Any
    _base: tuple[int, int]

    @classmethod
    def _new(cls, dataset: TFDataset, sess: Any, **parts: Any) -> TFOptimizer:
        made = cls.__new__(cls)
        made.dataset, made._sess, made._parts = dataset, sess, parts
        for name in ("model_dir", "clip_norm", "clip_value", "methods"):
            setattr(made, name if name == "model_dir" else f"_{name}", parts.pop(name, None))
        made._base = counted(made._methods)
        return made

    @classmethod
    def from_loss(
        cls,
        loss: Any,
        optim_method: Any,
        session: Any = None,
        inputs: Any = None,
        dataset: TFDataset | None = None,
        val_outputs: Sequence[Any] | None = None,
        val_labels: Sequence[Any] | None = None,
        val_method: Any = None,
        clip_norm: float | None = None,
        clip_value: Any = None,
        metrics: Mapping[str, Any] | None = None,
        tensor_with_value: Mapping[Any, Any] | None = None,
        session_config: Any = None,
        model_dir: str | PathLike[str] | None = None,
        updates: Sequence[Any] | None = None,
        freeze: bool = False,
        val_split: float = 0.0,
    ) -> TFOptimizer:
        """Minimize a loss.

        Args:
            loss: A scalar tensor: the mean over the rows of a batch.
            optim_method: An optimizer of `bigdl.optim.optimizer` or `tf.train`, or a dict from prefixes of
                variable names to optimizers, each of which trains the variables of its prefix.
            session: The session with the variables' values. None makes one and initializes them.
            inputs: Placeholders of your own that the dataset's features and labels are fed to, in order.
            dataset: The dataset. None is the one whose tensors the loss depends on.
            val_outputs: The outputs that `val_method` judges.
            val_labels: The labels that it compares them with.
            val_method: A validation method or a list of them, evaluated on the dataset's validation rows.
            clip_norm: Clip the gradient to this norm.
            clip_value: Clip each element of the gradient to this absolute value, or between a pair.
            metrics: More metrics by name: scalar tensors that are means over the rows of a batch.
            tensor_with_value: A dict from tensors to a pair: the value in training, and the value otherwise.
            session_config: A `tf.ConfigProto` for the sessions of the workers.
            model_dir: A folder for checkpoints.
            updates: Operations to run with every step; None takes those of `UPDATE_OPS`.
            freeze: Must be False: what is trained are the trainable variables.
            val_split: Must be 0; give validation rows to the dataset.
        """
        _require_scalar(loss)
        if freeze:
            raise ConfigError("from_loss: freeze=True is not supported.\nHint: make variables not trainable.")
        _refuse_split("val_split", val_split)
        if optim_method is None:
            raise ConfigError("from_loss needs an optimizer, such as Adam(1e-3) of bigdl.optim.optimizer.")
        judged = _validation(val_outputs, val_labels, val_method)
        return cls._of_graph(
            loss,
            dataset,
            inputs,
            session,
            clip_norm=clip_norm,
            clip_value=clip_value,
            methods=optim_method,
            model_dir=model_dir,
            optimizer=graph_optimizers(optim_method),
            metrics={**without_loss(metrics or {}, loss), **judged},
            tensor_with_value=tensor_with_value,
            session_config=session_config,
            updates=updates,
        )

    @classmethod
    def from_train_op(
        cls,
        train_op: Any,
        loss: Any,
        *,
        inputs: Any = None,
        labels: Any = None,
        metrics: Mapping[str, Any] | None = None,
        updates: Sequence[Any] | None = None,
        sess: Any = None,
        dataset: TFDataset | None = None,
        tensor_with_value: Mapping[Any, Any] | None = None,
        session_config: Any = None,
        model_dir: str | PathLike[str] | None = None,
    ) -> TFOptimizer:
        """Run a `train_op` that the program has made with `optimizer.minimize(loss)`.

        Args:
            train_op: The operation. Its gradients are found in the graph and exchanged between workers.
            loss: The loss.
            inputs, labels: Placeholders of your own for the dataset's features and labels.

        Others are those of `from_loss`.
        """
        _require_scalar(loss)
        return cls._of_graph(
            loss,
            dataset,
            None if inputs is None else [*flatten(inputs), *flatten(labels)],
            sess,
            model_dir=model_dir,
            train_op=train_op,
            metrics=metrics,
            tensor_with_value=tensor_with_value,
            session_config=session_config,
            updates=updates,
        )

    @classmethod
    def _of_graph(
        cls,
        loss: Any,
        dataset: TFDataset | None,
        inputs: Any,
        sess: Any,
        *,
        metrics: Any,
        tensor_with_value: Any,
        updates: Any,
        **parts: Any,
    ) -> TFOptimizer:
        dataset, features, labels = _feeds([loss], dataset, inputs)
        dataset.require_training("used for training")
        refuse_unfed([loss], [*features, *labels], tensor_with_value)
        return cls._new(
            dataset,
            sess,
            inputs=features,
            labels=labels or None,
            loss=loss,
            metrics=dict(metrics) if metrics else None,
            tensor_with_value=dict(tensor_with_value) if tensor_with_value else None,
            updates=None if updates is None else list(updates),
            **parts,
        )

    @classmethod
    def from_keras(
        cls,
        keras_model: Any,
        dataset: TFDataset,
        session_config: Any = None,
        model_dir: str | PathLike[str] | None = None,
        metrics: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        val_spilt: float = 0.0,
    ) -> TFOptimizer:
        """Train a compiled Keras model, in a graph of TensorFlow 1 or not.

        `metrics` and `session_config` are for models in graphs; `optimizer` is one of `bigdl.optim.optimizer`
        to use instead of the model's. Others are those of `from_loss`.
        """
        from kindler.compat.zoo.tfpark.model import keras_estimator

        _refuse_split("val_spilt", val_spilt)
        dataset.require_training("used in KerasModel fit")
        made = cls._new(dataset, None, model_dir=model_dir, methods=optimizer)
        options = (
            {"session_config": session_config, "metrics": metrics} if is_graph_model(keras_model) else {}
        )
        made._keras = KerasGraph(keras_model, optimizer) if is_graph_model(keras_model) else keras_model
        directory = None if model_dir is None else str(model_dir)
        made._made = keras_estimator(keras_model, model_dir=directory, optimizer=optimizer, **options)
        return made

    @property
    def sess(self) -> Any:
        if isinstance(self._keras, KerasGraph):
            return self._keras.session
        if self._keras is not None:
            raise ConfigError("a Keras model that executes eagerly has no session.")
        if self._sess is None:
            self._sess = self.estimator.get_model()
        return self._sess

    @property
    def estimator(self) -> TFParkEstimator:
        """The estimator behind it, made on first use."""
        if self._made is None:
            clipping = {"clip_norm": self._clip_norm, "clip_value": self._clip_value}
            self._made = graph_estimator(sess=self._sess, model_dir=self.model_dir, **clipping, **self._parts)
        return self._made

    def set_train_summary(self, summary: Summary) -> TFOptimizer:
        """Write loss, learning rate and throughput of every iteration to a `TrainSummary`."""
        self.train_summary = summary
        return self

    def set_val_summary(self, summary: Summary) -> TFOptimizer:
        """Write the metrics of every validation to a `ValidationSummary`."""
        self.val_summary = summary
        return self

    def set_constant_gradient_clipping(self, min_value: float, max_value: float) -> None:
        """Clip each element of the gradient; before the first `optimize`."""
        self._refuse_late("set_constant_gradient_clipping")
        self._clip_value = (min_value, max_value)

    def set_gradient_clipping_by_l2_norm(self, clip_norm: float) -> None:
        """Clip the gradient to a norm; before the first `optimize`."""
        self._refuse_late("set_gradient_clipping_by_l2_norm")
        self._clip_norm = clip_norm

    def load_checkpoint(self, path: str | PathLike[str], version: int | None = None) -> TFOptimizer:
        """Go on from a checkpoint: its weights, its optimizer, and its numbers of epochs and steps.

        Args:
            path: A checkpoint, or the `model_dir` of the run that wrote it.
            version: The step after which it was written; None is the newest.
        """
        self.estimator.load_checkpoint(find_checkpoint(path, version))
        self._base = (0, 0)
        return self

    def optimize(
        self, end_trigger: Trigger | None = None, checkpoint_trigger: Trigger | None = None
    ) -> TFOptimizer:
        """Train until a trigger fires.

        `MaxEpoch(5)` and `MaxIteration(100)` count from when the model and its BigDL optimizer were new:
        after a checkpoint of epoch 5, `MaxEpoch(5)` trains nothing.

        Args:
            end_trigger: When to stop; None is `MaxEpoch(1)`.
            checkpoint_trigger: When to write a checkpoint to `model_dir`; None is after every epoch.
        """
        trigger = end_trigger or MaxEpoch(1)
        for name, given in (("end_trigger", trigger), ("checkpoint_trigger", checkpoint_trigger)):
            if given is not None and not isinstance(given, Trigger):
                raise ConfigError(f"{name} must be a trigger such as MaxEpoch(5); received {given!r}.")
        estimator = self.estimator
        estimator.train_summary, estimator.val_summary = self.train_summary, self.val_summary
        trigger = Since(trigger, *self._base)
        epochs, steps = estimator.counters
        if steps + self._base[1] and trigger(Progress(epoch=epochs + 1, step=steps)):
            return self
        options: dict[str, Any] = {}
        if self.model_dir is not None:
            options = {"checkpoint_trigger": checkpoint_trigger or EveryEpoch(), "keep_checkpoints": None}
        arranged = self._keras.columns if isinstance(self._keras, KerasGraph) else None
        estimator.fit_dataset(self.dataset, arranged, end_trigger=trigger, **options)
        if self._keras is not None and not isinstance(self._keras, KerasGraph):
            estimator.get_model()
        self._count()
        return self

    def _count(self) -> None:
        epochs, steps = self.estimator.counters
        for method in methods_of(self._methods):
            method.state.update(epoch=self._base[0] + epochs + 1, neval=self._base[1] + steps + 1)

    def _refuse_late(self, method: str) -> None:
        if self._made is not None:
            raise ConfigError(
                f"{method} must be called before optimize, and not for Keras models, whose optimizer clips."
            )


def _feeds(
    targets: Sequence[Any], dataset: TFDataset | None, inputs: Any
) -> tuple[TFDataset, list[Any], list[Any]]:
    """The dataset, and the placeholders that its features and labels are fed to."""
    if dataset is None:
        dataset = dataset_of(*targets)
    if inputs is None:
        return dataset, dataset.fed_features, dataset.fed_labels
    own = flatten(inputs)
    features, labels = len(dataset.features), len(dataset.labels)
    if len(own) not in (features, features + labels):
        raise ConfigError(
            f"inputs has {len(own)} tensors, and the dataset {features} features and {labels} labels; it"
            " needs one for each."
        )
    return dataset, own[:features], own[features:]


def _validation(outputs: Any, labels: Any, methods: Any) -> dict[str, Any]:
    judged = named_all(methods)
    if not judged:
        return {}
    if not outputs or not labels:
        raise ConfigError(
            "val_method needs val_outputs and val_labels: what to judge, and what to compare it with."
        )
    output, label = flatten(outputs)[0], flatten(labels)[0]
    found = {}
    with output.graph.as_default():
        for method in judged:
            if getattr(method, "cri", None) is not None:
                raise ConfigError("Loss of a graph is its own loss.\nHint: Loss() without a criterion.")
            tensor = method.tensor(tf, output, label)
            if tensor is not None:
                found[method.tag] = tensor
            elif method.tag != "Loss":
                raise ConfigError(
                    f"{method!r} cannot be computed while training.\nHint: evaluate it on predictions."
                )
    return found


def without_loss(metrics: Mapping[str, Any], loss: Any) -> dict[str, Any]:
    """Metrics other than the loss under its own name, which is reported anyway."""
    other = metrics.get("loss", loss)
    if other is not loss:
        raise ConfigError(
            f"metrics: 'loss' is the name of the loss, {loss.name}; received {other.name} for it.\n"
            "Hint: give the metric another name."
        )
    return {str(name): tensor for name, tensor in metrics.items() if name != "loss"}


def _refuse_split(argument: str, share: float) -> None:
    if share:
        raise ConfigError(
            f"{argument} is not supported.\nHint: from_rdd(..., val_rdd=...) has validation rows."
        )


def _require_scalar(loss: Any) -> None:
    if not hasattr(loss, "op"):
        raise ConfigError(
            f"the loss must be a tensor of a TensorFlow graph; received {type(loss).__qualname__}."
        )
    if loss.shape.rank not in (None, 0):
        raise ConfigError(
            f"the loss must be a scalar; {loss.name!r} has the shape {loss.shape}.\nHint:"
            " tf.reduce_mean(loss)."
        )
