"""`TFNet`, a TensorFlow graph with constant weights: a function, a layer; and `TFPredictor`."""

from __future__ import annotations

import base64
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler import Estimator
from kindler.compat.bigdl.optim.validation import Scores, named_all
from kindler.compat.estimators import from_graph
from kindler.compat.zoo.tfpark.rows import flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset, dataset_of, decoded, refuse_unfed
from kindler.compat.zoo.tfpark.training import graph_estimator, predicted_rdd, stacked
from kindler.data.arrays import is_spark_frame
from kindler.errors import ConfigError

__all__ = ["TFNet", "TFPredictor"]

_LAYERS: dict[str, Any] = {}  # by the name of the library of Keras


class TFNet:
    """A frozen graph. `tf_session_config`, which changes speed only, is without effect."""

    def __init__(
        self,
        path: str,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        tf_session_config: Any = None,
    ) -> None:
        self.frozen = _read(path, input_names, output_names)

    @classmethod
    def of(cls, frozen: FrozenGraph) -> TFNet:
        made = cls.__new__(cls)
        made.frozen = frozen
        return made

    @staticmethod
    def from_export_folder(folder: str, tf_session_config: Any = None) -> TFNet:
        if not os.path.isdir(folder):
            raise ConfigError(f"from_export_folder: there is no folder {folder}.")
        return TFNet(folder)

    @staticmethod
    def from_session(
        sess: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        generate_backward: bool = False,
        allow_non_differentiable_input: bool = True,
        tf_session_config: Any = None,
    ) -> TFNet:
        return TFNet.of(freeze(sess, flatten(inputs), flatten(outputs)))

    @staticmethod
    def from_saved_model(
        model_path: str,
        tag: str | None = None,
        signature: str | None = None,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        tf_session_config: Any = None,
        init_op: str | None = None,
    ) -> TFNet:
        if not os.path.isdir(model_path):
            raise ConfigError(f"from_saved_model: there is no folder {model_path}.")
        graph = tf.Graph()
        with graph.as_default(), tf.Session(graph=graph) as sess:
            meta = tf.saved_model.loader.load(sess, [tag or "serve"], model_path)
            if init_op is not None:
                sess.run(graph.get_operation_by_name(init_op))
            fed, fetched = list(inputs or ()), list(outputs or ())
            if not fed or not fetched:
                name = signature or "serving_default"
                if name not in meta.signature_def:
                    raise ConfigError(
                        f"the SavedModel has no signature {name!r}; it has {sorted(meta.signature_def)}."
                    )
                known = meta.signature_def[name]
                fed = fed or [known.inputs[key].name for key in sorted(known.inputs)]
                fetched = fetched or [known.outputs[key].name for key in sorted(known.outputs)]
            tensors = [graph.get_tensor_by_name(_tensor_name(one)) for one in (*fed, *fetched)]
            return TFNet.of(freeze(sess, tensors[: len(fed)], tensors[len(fed) :]))

    def forward(self, x: Any) -> Any:
        found = self.frozen.run([np.asarray(part) for part in _several(x)])
        return found[0] if len(found) == 1 else found

    def backward(self, x: Any, grad_output: Any) -> Any:
        arrays = [np.asarray(part) for part in _several(x)]
        found = self.frozen.gradients(arrays, [np.asarray(part) for part in _several(grad_output)])
        return found[0] if len(found) == 1 else found

    def predict(
        self,
        x: Any,
        batch_per_thread: int = 1,
        distributed: bool = True,
        mini_batch: bool = False,
        feature_cols: Any = None,
        **options: Any,
    ) -> Any:
        """An RDD for a `TFDataset`, a column `prediction` for a DataFrame, arrays for arrays.

        `mini_batch` is without effect: it was for RDDs of batches, which nothing here takes.
        """
        if isinstance(x, TFDataset):
            graph, inputs, outputs = self._loaded()
            with graph.as_default(), tf.Session(graph=graph) as sess:
                return predict_graph(sess, x, outputs, inputs)
        if is_spark_frame(x):
            return self.estimator().predict(
                x, batch_size=batch_per_thread, feature_cols=feature_cols, **options
            )
        if not distributed:
            return self.forward(x)
        dataset = TFDataset.from_ndarrays((list(_several(x)), None), batch_per_thread=batch_per_thread)
        return stacked(self.predict(dataset))

    def evaluate(self, dataset: Any, batch_size: int = 32, val_methods: Any = None) -> Scores:
        if not isinstance(dataset, TFDataset):
            dataset = TFDataset.from_ndarrays(tuple(dataset), batch_per_thread=batch_size)
        outputs, labels = stacked(self.predict(dataset)), dataset.label_arrays()
        return Scores({method.tag: method.score(outputs, labels) for method in named_all(val_methods)})

    def estimator(self, **options: Any) -> Any:
        graph, inputs, outputs = self._loaded()
        with graph.as_default():
            session = tf.Session(graph=graph)
            return from_graph(Estimator, inputs=inputs, outputs=outputs, sess=session, **options)

    def as_torch(self) -> Any:
        """The net as a `torch.nn.Module` without parameters; gradients flow through it to its inputs."""
        from kindler.compat.zoo.tfpark.layers_torch import TFNetModule

        return TFNetModule(self.frozen)

    def as_keras(self, keras: Any = None) -> Any:
        return _layer(self.frozen, keras)

    def __call__(self, x: Any) -> Any:
        """The outputs for a batch: arrays for arrays, torch tensors for torch tensors, and so on."""
        first = _several(x)[0]
        if type(first).__module__.partition(".")[0] == "torch":
            return self.as_torch()(*_several(x))
        if "KerasTensor" in type(first).__name__:
            return self.as_keras(importlib.import_module(type(first).__module__.partition(".")[0]))(x)
        return self.forward(x)

    def _loaded(self) -> tuple[Any, list[Any], list[Any]]:
        graph = load(self.frozen.graph_def)
        inputs = [graph.get_tensor_by_name(name) for name in self.frozen.inputs]
        return graph, inputs, [graph.get_tensor_by_name(name) for name in self.frozen.outputs]


def _read(path: str, inputs: Sequence[str] | None, outputs: Sequence[str] | None) -> FrozenGraph:
    file = path
    if os.path.isdir(path):
        file = os.path.join(path, "frozen_inference_graph.pb")
        meta_file = os.path.join(path, "graph_meta.json")
        if os.path.exists(meta_file):
            with open(meta_file, encoding="utf-8") as opened:
                meta = json.load(opened)
            inputs, outputs = inputs or meta["input_names"], outputs or meta["output_names"]
    if not os.path.isfile(file):
        raise ConfigError(f"TFNet: there is no frozen graph at {file}.")
    if not inputs or not outputs:
        raise ConfigError("TFNet needs input_names and output_names, such as ['input:0'] and ['output:0'].")
    with open(file, "rb") as opened_file:
        data = opened_file.read()
    return FrozenGraph(data, tuple(map(_tensor_name, inputs)), tuple(map(_tensor_name, outputs)))


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _several(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


class TFPredictor:
    def __init__(self, sess: Any, outputs: Any, inputs: Any = None, dataset: TFDataset | None = None) -> None:
        self.sess, self.outputs = sess, flatten(outputs)
        if not self.outputs:
            raise ConfigError("TFPredictor needs outputs, a list of tensors.")
        self.dataset = dataset_of(*self.outputs) if dataset is None else dataset
        self.inputs = None if inputs is None else flatten(inputs)
        self._keras: Any = None
        _require_batch(self.dataset)

    @classmethod
    def from_outputs(cls, sess: Any, outputs: Any) -> TFPredictor:
        return cls(sess, outputs)

    @classmethod
    def from_keras(cls, keras_model: Any, dataset: TFDataset) -> TFPredictor:
        made = cls.__new__(cls)
        made.sess, made.outputs, made.inputs, made.dataset = None, [], None, dataset
        made._keras = keras_model
        _require_batch(dataset)
        return made

    def predict(self) -> Any:
        """An RDD with the outputs of each element: arrays, or lists of them where there are several."""
        if self._keras is not None:
            from kindler.compat.zoo.tfpark.model import keras_estimator, predict_keras

            return predict_keras(keras_estimator(self._keras), self.dataset)
        return predict_graph(self.sess, self.dataset, self.outputs, self.inputs)


def predict_graph(sess: Any, dataset: TFDataset, outputs: list[Any], inputs: list[Any] | None = None) -> Any:
    """An RDD with these outputs for each element of a dataset."""
    fed = dataset.fed_features if inputs is None else inputs
    refuse_unfed(outputs, fed)
    # Placeholders of the program's own have an axis for rows whatever the dataset's tensors have.
    by_rows = dataset.has_batch or (inputs is not None and _has_rows(inputs, dataset))
    if not by_rows or any(tensor.dtype == tf.string for tensor in fed):
        return _predict_frozen(sess, dataset, outputs, fed, by_rows=by_rows)
    made = graph_estimator(inputs=list(fed), outputs=list(outputs), sess=sess)
    return predicted_rdd(made, dataset)


def _has_rows(inputs: list[Any], dataset: TFDataset) -> bool:
    ranks = [
        (tensor.shape.rank, len(meta.shape)) for tensor, meta in zip(inputs, dataset.features, strict=False)
    ]
    return all(rank is None or rank == own + 1 for rank, own in ranks)


def _predict_frozen(
    sess: Any, dataset: TFDataset, outputs: list[Any], fed: list[Any], *, by_rows: bool
) -> Any:
    """As a graph of constants, behind other placeholders: for single elements, and for strings."""
    frozen = freeze(sess, fed, outputs)
    with tf.Graph().as_default():
        if by_rows:
            texts = [tensor.dtype == tf.string for tensor in fed]
            given = [
                tf.placeholder(tf.uint8, [None, None]) if text else tf.placeholder(tensor.dtype, tensor.shape)
                for tensor, text in zip(fed, texts, strict=True)
            ]
            mapped = [decoded(new) if text else new for new, text in zip(given, texts, strict=True)]
            found = frozen.imported(mapped)
        else:
            given, found = _element_wise(frozen, dataset.features)
        with tf.Session() as own:
            return predicted_rdd(graph_estimator(inputs=given, outputs=found, sess=own), dataset)


def _require_batch(dataset: TFDataset) -> None:
    if dataset.has_batch and dataset.batch_per_thread <= 0:
        raise ConfigError(
            "The batch_per_thread of TFDataset must be specified when used for prediction; this one has"
            " batch_size."
        )


@dataclass
class FrozenGraph:
    graph_def: bytes = field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    _held: Any = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without the session, which stays in this process."""
        return {**self.__dict__, "_held": None}

    def run(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        if len(arrays) != len(self.inputs):
            raise ConfigError(
                f"the graph takes {len(self.inputs)} inputs ({self.inputs}); received {len(arrays)}."
            )
        session, graph = self._session()
        tensors = [graph.get_tensor_by_name(name) for name in self.inputs]
        fed = {t.name: np.asarray(a, t.dtype.as_numpy_dtype) for t, a in zip(tensors, arrays, strict=True)}
        return list(session.run(list(self.outputs), fed))

    def gradients(
        self, arrays: Sequence[np.ndarray[Any, Any]], of_outputs: Sequence[np.ndarray[Any, Any]]
    ) -> list[np.ndarray[Any, Any]]:
        """The gradients of the inputs, from those of the outputs; zeros for inputs that have none."""
        session, graph = self._session()
        with graph.as_default():
            inputs = [graph.get_tensor_by_name(name) for name in self.inputs]
            outputs = [graph.get_tensor_by_name(name) for name in self.outputs]
            if not hasattr(graph, "_kindler_gradients"):
                given = [tf.placeholder(output.dtype, output.shape) for output in outputs]
                graph._kindler_gradients = given, tf.gradients(outputs, inputs, given)
            given, found = graph._kindler_gradients
        fed = {**dict(zip(inputs, arrays, strict=True)), **dict(zip(given, of_outputs, strict=True))}
        known = [gradient for gradient in found if gradient is not None]
        values = iter(session.run(known, fed))
        return [np.zeros_like(a) if g is None else next(values) for g, a in zip(found, arrays, strict=True)]

    def imported(self, inputs: Sequence[Any], name: str = "") -> list[Any]:
        """The outputs for these tensors, in the default graph."""
        graph_def = tf.GraphDef.FromString(self.graph_def)
        fed = dict(zip(self.inputs, inputs, strict=True))
        return list(
            tf.import_graph_def(graph_def, input_map=fed, return_elements=list(self.outputs), name=name)
        )

    def _session(self) -> tuple[Any, Any]:
        if self._held is None:
            graph = load(self.graph_def)
            self._held = tf.Session(graph=graph), graph
        session, graph = self._held
        return session, graph


def freeze(sess: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> FrozenGraph:
    """The part of a session's graph between these tensors, with the values that its variables have now."""
    names = [tensor.op.name for tensor in outputs]
    with sess.graph.as_default():
        try:
            constant = tf.graph_util.convert_variables_to_constants(
                sess, sess.graph.as_graph_def(add_shapes=True), names
            )
        except tf.errors.FailedPreconditionError as exc:
            raise ConfigError(
                f"a variable of the graph has no value in this session: {exc.message}\n"
                "Hint: sess.run(tf.global_variables_initializer()), or restore a checkpoint."
            ) from exc
    for node in constant.node:
        node.device = ""
    if constant.library.function:
        constant = _inlined(constant, sorted({tensor.op.name for tensor in (*inputs, *outputs)}))
    return FrozenGraph(
        constant.SerializeToString(),
        tuple(tensor.name for tensor in inputs),
        tuple(tensor.name for tensor in outputs),
    )


def _inlined(graph_def: Any, kept: Sequence[str]) -> Any:
    """The graph with the bodies of functions in the place of calls, so that it fits into other graphs.

    SavedModels of TensorFlow 2 consist of functions.
    """
    from tensorflow.python.grappler import tf_optimizer

    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    meta = tf.train.export_meta_graph(graph_def=graph_def, graph=graph)
    meta.collection_def["train_op"].node_list.value.extend(kept)  # what the optimizer must not remove
    config = tf.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.min_graph_nodes = -1
    rewriting.optimizers.append("function")
    inlined = tf_optimizer.OptimizeGraph(config, meta)
    return tf.graph_util.extract_sub_graph(inlined, list(kept))


def load(graph_def: bytes) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(tf.GraphDef.FromString(graph_def), name="")
    return graph


def _element_wise(frozen: FrozenGraph, metas: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Placeholders and outputs, in the default graph, of a graph that takes one element at a time."""
    fed = [tf.placeholder(meta.dtype, [None, *meta.shape]) for meta in metas]
    graph = load(frozen.graph_def)
    dtypes = [graph.get_tensor_by_name(name).dtype for name in frozen.outputs]
    ranks = [graph.get_tensor_by_name(name).shape.rank for name in frozen.inputs]
    single = [rank == len(meta.shape) for rank, meta in zip(ranks, metas, strict=True)]

    def one(row: Any) -> list[Any]:
        return frozen.imported([p if alone else p[None] for p, alone in zip(row, single, strict=True)])

    return fed, list(tf.map_fn(one, fed, dtype=dtypes))


def _layer(frozen: FrozenGraph, keras: Any = None) -> Any:
    library = keras if keras is not None else importlib.import_module("keras")
    name = library.__name__.partition(".")[0]
    if name == "keras" and library.backend.backend() != "tensorflow":
        raise ConfigError(
            f"a TFNet can be a layer of Keras on TensorFlow; this one is on {library.backend.backend()}."
        )
    if name not in _LAYERS:
        _LAYERS[name] = _define(importlib.import_module(name))
    return _LAYERS[name](frozen)


def _define(keras: Any) -> Any:
    @keras.saving.register_keras_serializable(package="kindler")
    class TFNetLayer(keras.layers.Layer):  # type: ignore[misc]
        def __init__(
            self, frozen: Any = None, *, graph: str = "", inputs: Any = (), outputs: Any = (), **options: Any
        ):
            super().__init__(trainable=False, **{k: v for k, v in options.items() if k != "trainable"})
            data = base64.b64decode(graph) if frozen is None else frozen.graph_def
            self.frozen = frozen or FrozenGraph(data, tuple(inputs), tuple(outputs))

        def call(self, inputs: Any) -> Any:
            several = inputs if isinstance(inputs, list | tuple) else [inputs]
            if tf.executing_eagerly():  # as a function of TensorFlow, which gradients flow through
                run = tf.function(lambda *parts: self.frozen.imported(parts, "tfnet"))
                found = run(*map(tf.convert_to_tensor, several))
            else:
                found = self.frozen.imported(several, "tfnet")
            return found[0] if len(found) == 1 else list(found)

        def get_config(self) -> dict[str, Any]:
            return {
                **super().get_config(),
                "graph": base64.b64encode(self.frozen.graph_def).decode(),
                "inputs": list(self.frozen.inputs),
                "outputs": list(self.frozen.outputs),
            }

    return TFNetLayer
