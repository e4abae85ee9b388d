"""The tensors that a dataset is fed to, and the datasets that tensors of a graph come from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.zoo.tfpark.structures import TensorMeta
from kindler.errors import ConfigError

_LENGTH = 4
_KNOWN = "_kindler_datasets"  # an attribute of graphs, so that datasets live as long as the graph


def enter_graph_mode() -> None:
    """Turn eager execution off, as the programs of TensorFlow 1 expect it, unless a graph is being built."""
    if tf.executing_eagerly():
        warnings.warn(
            "TensorFlow executes eagerly, but TFDataset.tensors belong to a graph: eager execution is"
            " turned off for the rest of this program.\n"
            "Hint: call tf.disable_v2_behavior() at the start, or build the graph in `with"
            " tf.Graph().as_default():`.",
            stacklevel=4,
        )
        tf.disable_eager_execution()


def make(meta: TensorMeta) -> tuple[Any, Any]:
    """A placeholder for a tensor of a dataset, and the tensor itself, which differs for strings."""
    if meta.dtype == tf.string:
        fed = tf.placeholder(tf.uint8, [None, None], name=f"{meta.name}_bytes")
        return fed, decoded(fed, meta.name)
    fed = tf.placeholder(meta.dtype, [None, *meta.shape], name=meta.name)
    return fed, fed


def decoded(rows: Any, name: str | None = None) -> Any:
    """Strings from rows of bytes, each with its length in front (see `rows.TextRows`)."""
    rows_shape = tf.shape(rows, out_type=tf.int64)
    count, width = rows_shape[0], rows_shape[1]
    lengths = tf.cast(tf.bitcast(rows[:, :_LENGTH], tf.int32), tf.int64)
    # The bytes of the whole batch are the end of its serialized form.
    starts = tf.range(count) * width - count * width + _LENGTH
    return tf.strings.substr(tf.fill([count], tf.io.serialize_tensor(rows)), starts, lengths, name=name)


def remember(dataset: Any, tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        known = getattr(tensor.graph, _KNOWN, {})
        known[tensor.op.name] = dataset
        setattr(tensor.graph, _KNOWN, known)


def dataset_of(*targets: Any) -> Any:
    """The dataset that these tensors depend on."""
    known = getattr(targets[0].graph, _KNOWN, {})
    found = {id(known[op.name]): known[op.name] for op in _placeholders(targets) if op.name in known}
    if len(found) == 1:
        return next(iter(found.values()))
    names = ", ".join(target.name for target in targets)
    if found:
        raise ConfigError(f"{names} depends on {len(found)} datasets; it must depend on one.")
    raise ConfigError(
        f"{names} depends on no dataset, so there is nothing to feed.\n"
        "Hint: build it from dataset.tensors, or pass dataset=... and inputs=...."
    )


def unfed(targets: Iterable[Any], fed: Iterable[Any]) -> list[str]:
    """Names of placeholders without a default that these tensors need and nobody feeds."""
    given = {tensor.op.name for tensor in fed}
    return sorted(op.name for op in _placeholders(list(targets)) if op.name not in given)


def refuse_unfed(targets: Iterable[Any], fed: Iterable[Any], values: Mapping[Any, Any] | None = None) -> None:
    left = unfed(targets, [*fed, *(values or {})])
    if left:
        raise ConfigError(
            f"no value is fed to the placeholder {', '.join(map(repr, left))}.\n"
            "Hint: tensor_with_value={placeholder: (value in training, value otherwise)} gives it"
            " constants, or make it with tf.placeholder_with_default."
        )


def _placeholders(targets: Iterable[Any]) -> list[Any]:
    seen: set[str] = set()
    waiting = [getattr(target, "op", target) for target in targets]
    found = []
    while waiting:
        op = waiting.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type in ("Placeholder", "PlaceholderV2"):
            found.append(op)
        waiting += [tensor.op for tensor in op.inputs]
        waiting += op.control_inputs
    return found
