"""`TFPredictor`: tensors of a graph, computed for every element of a `TFDataset`."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.zoo.tfpark.frozen import element_wise, freeze
from kindler.compat.zoo.tfpark.placeholders import dataset_of, decoded, refuse_unfed
from kindler.compat.zoo.tfpark.structures import flatten
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.training import graph_estimator, predicted_rdd
from kindler.errors import ConfigError

__all__ = ["TFPredictor", "predict_graph"]


class TFPredictor:
    """Computes outputs of a graph over a dataset.

    Args:
        sess: The session with the variables' values.
        outputs: The tensors to compute, each with one row an element.
        inputs: Placeholders of your own that the dataset's features are fed to.
        dataset: The dataset. None is the one whose tensors the outputs depend on.
    """

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
        """Compute these tensors, which depend on the tensors of a dataset."""
        return cls(sess, outputs)

    @classmethod
    def from_keras(cls, keras_model: Any, dataset: TFDataset) -> TFPredictor:
        made = cls.__new__(cls)
        made.sess, made.outputs, made.inputs, made.dataset = None, [], None, dataset
        made._keras = keras_model
        _require_batch(dataset)
        return made

    def predict(self) -> Any:
        """An RDD with the outputs of each element, in the order of the dataset.

        Elements are arrays; lists of arrays where there are several outputs.
        """
        if self._keras is not None:
            from kindler.compat.zoo.tfpark.model import keras_estimator, predict_keras

            return predict_keras(keras_estimator(self._keras), self.dataset)
        return predict_graph(self.sess, self.dataset, self.outputs, self.inputs)


def predict_graph(sess: Any, dataset: TFDataset, outputs: list[Any], inputs: list[Any] | None = None) -> Any:
    """An RDD with these outputs for each element of a dataset."""
    if dataset.rows is None or not dataset.rows.predicts:
        raise ConfigError(
            "a tf.data.Dataset cannot be predicted.\nHint: use from_rdd, from_ndarrays or from_dataframe."
        )
    fed = dataset.fed_features if inputs is None else inputs
    refuse_unfed(outputs, fed)
    # Placeholders of the program's own have an axis for rows whatever the dataset's tensors have.
    by_rows = dataset.has_batch or (inputs is not None and _has_rows(inputs, dataset))
    if not by_rows or any(tensor.dtype == tf.string for tensor in fed):
        return _predict_frozen(sess, dataset, outputs, fed, by_rows=by_rows)
    made = graph_estimator(inputs=list(fed), outputs=list(outputs), sess=sess)
    return predicted_rdd(made, dataset.columns(), dataset.rows_per_call)


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
            like = [
                (tf.uint8, [None, None]) if text else (t.dtype, t.shape)
                for t, text in zip(fed, texts, strict=True)
            ]
            given = [tf.placeholder(*part) for part in like]
            mapped = [decoded(new) if text else new for new, text in zip(given, texts, strict=True)]
            names = dict(zip(frozen.inputs, mapped, strict=True))
            graph_def = tf.GraphDef.FromString(frozen.graph_def)
            found = tf.import_graph_def(
                graph_def, input_map=names, return_elements=list(frozen.outputs), name=""
            )
        else:
            given, found = element_wise(frozen, dataset.features)
        with tf.Session() as own:
            made = graph_estimator(inputs=given, outputs=list(found), sess=own)
            return predicted_rdd(made, dataset.columns(), max(1, dataset.rows_per_call))


def _require_batch(dataset: TFDataset) -> None:
    if dataset.has_batch and dataset.batch_per_thread <= 0:
        raise ConfigError(
            "The batch_per_thread of TFDataset must be specified when used for prediction; this one has"
            " batch_size."
        )
