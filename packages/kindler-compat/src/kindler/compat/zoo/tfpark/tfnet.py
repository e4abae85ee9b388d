"""`TFNet`: a TensorFlow graph with constant weights, as a function, a layer, and over datasets."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.compat.bigdl.optim.validation import Scores, named_all
from kindler.compat.estimators import from_graph
from kindler.compat.zoo.tfpark.frozen import FrozenGraph, freeze, load
from kindler.compat.zoo.tfpark.structures import flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.tf_predictor import predict_graph
from kindler.compat.zoo.tfpark.training import stacked
from kindler.data.arrays import is_spark_frame
from kindler.errors import ConfigError

__all__ = ["TFNet"]


class TFNet:
    """A frozen graph.

    Args:
        path: A frozen graph (`.pb`), or a folder that `export_tf` of Analytics Zoo wrote.
        input_names: The tensors that are fed, such as "input:0"; for a folder, those of its metadata.
        output_names: The tensors that are computed.
        tf_session_config: Without effect: it changes speed only.
    """

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
        """A net from a folder with a frozen graph and the names of its inputs and outputs."""
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
        """A net of the part of a session's graph between inputs and outputs, with its present weights."""
        return TFNet.of(freeze(sess, flatten(list(_several(inputs))), flatten(list(_several(outputs)))))

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
        """A net of a SavedModel.

        Args:
            model_path: Its folder.
            tag: The tag of its graph; None is "serve".
            signature: The signature whose inputs and outputs to use; None is "serving_default".
            inputs: Names of the input tensors, instead of those of the signature.
            outputs: Names of the output tensors.
            tf_session_config: Without effect: it changes speed only.
            init_op: An operation to run after loading.
        """
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
        """The outputs for a batch: an array, or a list of them where there are several."""
        found = self.frozen.run([np.asarray(part) for part in _several(x)])
        return found[0] if len(found) == 1 else found

    def backward(self, x: Any, grad_output: Any) -> Any:
        """The gradients of the inputs, from those of the outputs."""
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
        """The outputs for many rows.

        Args:
            x: A `TFDataset` (gives an RDD), a Spark DataFrame (gives one with a column `prediction`), or
                arrays.
            batch_per_thread: Rows of one call, for arrays and DataFrames.
            distributed: Whether arrays are scored by all workers.
            mini_batch: Without effect: it was for RDDs of batches, which nothing here takes.
            feature_cols: The columns of a DataFrame, in the order of the inputs.
            options: Those of `Estimator.predict`, for a DataFrame.
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
        """Validation methods over a dataset with labels, or over a pair of arrays."""
        if not isinstance(dataset, TFDataset):
            dataset = TFDataset.from_ndarrays(tuple(dataset), batch_per_thread=batch_size)
        outputs, labels = stacked(self.predict(dataset)), dataset.label_arrays()
        return Scores({method.tag: method.score(outputs, labels) for method in named_all(val_methods)})

    def estimator(self, **options: Any) -> Any:
        """A Kindler `Estimator` that predicts with the graph."""
        from kindler.estimator.estimator import Estimator

        graph, inputs, outputs = self._loaded()
        with graph.as_default():
            session = tf.Session(graph=graph)
            return from_graph(Estimator, inputs=inputs, outputs=outputs, sess=session, **options)

    def as_torch(self) -> Any:
        """The net as a `torch.nn.Module` without parameters; gradients flow through it to its inputs."""
        from kindler.compat.zoo.tfpark.layers_torch import TFNetModule

        return TFNetModule(self.frozen)

    def as_keras(self, keras: Any = None) -> Any:
        """The net as a layer without weights.

        Args:
            keras: The module whose layer it is to be: `keras` on TensorFlow (the default) or `tf_keras`.
        """
        from kindler.compat.zoo.tfpark.layers_keras import layer

        return layer(self.frozen, keras)

    def __call__(self, x: Any) -> Any:
        """The outputs for a batch: arrays for arrays, torch tensors for torch tensors, and so on."""
        first = _several(x)[0]
        if type(first).__module__.partition(".")[0] == "torch":
            return self.as_torch()(*_several(x))
        if "KerasTensor" in type(first).__name__:
            return self.as_keras(importlib.import_module(type(first).__module__.partition(".")[0]))(x)
        return self.forward(x)

    def _loaded(self) -> tuple[Any, list[Any], list[Any]]:
        """The graph, with its inputs and outputs."""
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
