"""Small graphs of TensorFlow 1, and what a plain session makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

WIDTH, CLASSES = 4, 3


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Features, and labels that depend on them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, WIDTH)).astype(np.float32)
    return {"x": x, "y": (x @ random.normal(size=(WIDTH, CLASSES))).argmax(1).astype(np.int32)}


@dataclass
class Classifier:
    """A classifier of two layers, in a graph of its own."""

    ref: bool = False
    middle: Callable[[Any], Any] = tf.tanh
    graph: Any = field(default_factory=tf.Graph)

    def __post_init__(self) -> None:
        with self.graph.as_default():
            self.x = tf.placeholder(tf.float32, (None, WIDTH), name="x")
            self.y = tf.placeholder(tf.int32, (None,), name="y")
            hidden = self.middle(self._dense(self.x, 6, "hidden"))
            self.logits = self._dense(hidden, CLASSES, "out")
            self.loss = tf.losses.sparse_softmax_cross_entropy(self.y, self.logits)
            right = tf.equal(tf.argmax(self.logits, 1, output_type=tf.int32), self.y)
            self.accuracy = tf.reduce_mean(tf.cast(right, tf.float32))

    def _dense(self, x: Any, width: int, name: str) -> Any:
        random = np.random.default_rng(len(name))
        first = random.normal(scale=0.5, size=(x.shape[1], width)).astype(np.float32)
        with tf.variable_scope(name):
            w = tf.get_variable("w", initializer=first, use_resource=not self.ref)
            b = tf.get_variable("b", initializer=np.zeros(width, np.float32), use_resource=not self.ref)
        return tf.matmul(x, w) + b

    @property
    def arguments(self) -> dict[str, Any]:
        """What most estimators of it are made with."""
        return {
            "inputs": self.x,
            "labels": self.y,
            "outputs": self.logits,
            "loss": self.loss,
            "metrics": {"acc": self.accuracy},
        }


def plain(
    made: Classifier,
    train_op: Any,
    batches: Sequence[dict[str, np.ndarray]],
    more: dict[Any, Any] | None = None,
) -> Any:
    """A session after `sess.run(train_op)` for every batch."""
    with made.graph.as_default():
        sess = tf.Session()
        sess.run(tf.global_variables_initializer())
        for batch in batches:
            sess.run(train_op, {made.x: batch["x"], made.y: batch["y"], **(more or {})})
    return sess


def values(sess: Any) -> dict[str, np.ndarray]:
    """Every variable's value."""
    variables = sess.graph.get_collection("variables")
    return dict(zip([v.name for v in variables], sess.run(variables), strict=True))
