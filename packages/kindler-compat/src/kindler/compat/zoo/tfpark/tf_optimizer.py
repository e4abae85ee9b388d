"""`TFOptimizer`: a loss of a TensorFlow graph, minimized over a `TFDataset`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.bigdl.optim.summaries import Summary
from kindler.compat.bigdl.optim.triggers import EveryEpoch, MaxEpoch, Trigger
from kindler.compat.bigdl.optim.validation import named_all
from kindler.compat.zoo.tfpark.model import KerasGraph, is_graph_model, keras_estimator
from kindler.compat.zoo.tfpark.optimizers import counted, graph_optimizers, methods_of
from kindler.compat.zoo.tfpark.rows import flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset, dataset_of, refuse_unfed
from kindler.compat.zoo.tfpark.training import Since, TFParkEstimator, find_checkpoint, graph_estimator
from kindler.errors import ConfigError
from kindler.train.triggers import Progress

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
    train_summary: Summary | None = None
    val_summary: Summary | None = None
    _methods: Any
    _parts: dict[str, Any]
    _base: tuple[int, int]  # epochs and steps that the optimizers made before
    _keras: KerasGraph | Any = None
    _made: TFParkEstimator | None = None

    @classmethod
    def _new(cls, dataset: TFDataset, methods: Any = None, **parts: Any) -> TFOptimizer:
        """`parts` are arguments of `graph_estimator`."""
        made = cls.__new__(cls)
        made.dataset, made._methods, made._parts = dataset, methods, parts
        made._base = counted(methods)
        return made

    @classmethod
    def from_loss(
        cls,
        loss: Any,
        optim_method: Any,
        session: Any = None,
        inputs: Any = None,
        dataset: TFDataset | None = None,
        val_outputs: Any = None,
        val_labels: Any = None,
        val_method: Any = None,
        clip_norm: float | None = None,
        clip_value: Any = None,
        metrics: Mapping[str, Any] | None = None,
        tensor_with_value: Mapping[Any, Any] | None = None,
        session_config: Any = None,
        model_dir: str | PathLike[str] | None = None,
        updates: Any = None,
        freeze: bool = False,
        val_split: float = 0.0,
    ) -> TFOptimizer:
        """`loss` is the mean over the rows of a batch. `freeze` must be False: what is trained are the
        trainable variables; `val_split` must be 0: give validation rows to the dataset.
        """
        _require_scalar(loss)
        if freeze:
            raise ConfigError("from_loss: freeze=True is not supported.\nHint: make variables not trainable.")
        _refuse_split("val_split", val_split)
        if optim_method is None:
            raise ConfigError("from_loss needs an optimizer, such as Adam(1e-3) of bigdl.optim.optimizer.")
        checked = _validation(val_outputs, val_labels, val_method)
        return cls._of_graph(
            loss,
            dataset,
            inputs,
            sess=session,
            methods=optim_method,
            optimizer=graph_optimizers(optim_method),
            clip_norm=clip_norm,
            clip_value=clip_value,
            metrics={**without_loss(metrics or {}, loss), **checked},
            tensor_with_value=tensor_with_value,
            session_config=session_config,
            model_dir=model_dir,
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
        dataset: TFDataset | None = None,
        **options: Any,
    ) -> TFOptimizer:
        """Run a `train_op` that the program has made with `optimizer.minimize(loss)`.

        Options are `sess`, `metrics`, `updates`, `tensor_with_value`, `session_config` and `model_dir`.
        """
        _require_scalar(loss)
        own = None if inputs is None else [*flatten(inputs), *flatten(labels)]
        return cls._of_graph(loss, dataset, own, train_op=train_op, **options)

    @classmethod
    def _of_graph(
        cls,
        loss: Any,
        dataset: TFDataset | None,
        inputs: Any,
        *,
        metrics: Any = None,
        tensor_with_value: Any = None,
        **parts: Any,
    ) -> TFOptimizer:
        """`inputs` are placeholders of the program's own that features and labels are fed to."""
        if dataset is None:
            dataset = dataset_of(loss)
        features, labels = dataset.fed_features, dataset.fed_labels
        if inputs is not None:
            own, count = flatten(inputs), len(dataset.features)
            if len(own) not in (count, count + len(dataset.labels)):
                raise ConfigError(
                    f"inputs has {len(own)} tensors, and the dataset {count} features and"
                    f" {len(dataset.labels)} labels; it needs one for each."
                )
            features, labels = own[:count], own[count:]
        dataset.require_training("used for training")
        refuse_unfed([loss], [*features, *labels], tensor_with_value)
        return cls._new(
            dataset,
            inputs=features,
            labels=labels or None,
            loss=loss,
            metrics=metrics or None,
            tensor_with_value=tensor_with_value or None,
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
        to use instead of the model's.
        """
        _refuse_split("val_spilt", val_spilt)
        dataset.require_training("used in KerasModel fit")
        directory = None if model_dir is None else str(model_dir)
        made = cls._new(dataset, optimizer, model_dir=directory)
        options: dict[str, Any] = {"model_dir": directory, "optimizer": optimizer}
        made._keras = keras_model
        if is_graph_model(keras_model):
            options |= {"session_config": session_config, "metrics": metrics}
            made._keras = KerasGraph(keras_model, optimizer)
        made._made = keras_estimator(keras_model, **options)
        return made

    @property
    def model_dir(self) -> Any:
        return self._parts.get("model_dir")

    @property
    def sess(self) -> Any:
        if isinstance(self._keras, KerasGraph):
            return self._keras.session
        if self._keras is not None:
            raise ConfigError("a Keras model that executes eagerly has no session.")
        if self._parts.get("sess") is None:
            self._parts["sess"] = self.estimator.get_model()
        return self._parts["sess"]

    @property
    def estimator(self) -> TFParkEstimator:
        if self._made is None:
            self._made = graph_estimator(**self._parts)
        return self._made

    def set_train_summary(self, summary: Summary) -> TFOptimizer:
        self.train_summary = summary
        return self

    def set_val_summary(self, summary: Summary) -> TFOptimizer:
        self.val_summary = summary
        return self

    def set_constant_gradient_clipping(self, min_value: float, max_value: float) -> None:
        self._clip("set_constant_gradient_clipping", clip_value=(min_value, max_value))

    def set_gradient_clipping_by_l2_norm(self, clip_norm: float) -> None:
        self._clip("set_gradient_clipping_by_l2_norm", clip_norm=clip_norm)

    def load_checkpoint(self, path: str | PathLike[str], version: int | None = None) -> TFOptimizer:
        """`path` is a checkpoint, or the `model_dir` of the run that wrote it."""
        self.estimator.load_checkpoint(find_checkpoint(path, version))
        self._base = (0, 0)
        return self

    def optimize(
        self, end_trigger: Trigger | None = None, checkpoint_trigger: Trigger | None = None
    ) -> TFOptimizer:
        """`MaxEpoch(5)` and `MaxIteration(100)` count from when the model and its BigDL optimizer were new:
        after a checkpoint of epoch 5, `MaxEpoch(5)` trains nothing.
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
        epochs, steps = estimator.counters
        for method in methods_of(self._methods):
            method.state.update(epoch=self._base[0] + epochs + 1, neval=self._base[1] + steps + 1)
        return self

    def _clip(self, method: str, **limits: Any) -> None:
        if self._made is not None:
            raise ConfigError(
                f"{method} must be called before optimize, and not for Keras models, whose optimizer clips."
            )
        self._parts.update(limits)


def _validation(outputs: Any, labels: Any, methods: Any) -> dict[str, Any]:
    named = named_all(methods)
    if not named:
        return {}
    if not outputs or not labels:
        raise ConfigError(
            "val_method needs val_outputs and val_labels: what to evaluate, and what to compare it with."
        )
    output, label = flatten(outputs)[0], flatten(labels)[0]
    found = {}
    with output.graph.as_default():
        for method in named:
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
            f"{argument} is not supported.\nHint: from_rdd(..., val_rdd=...) takes validation rows."
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
