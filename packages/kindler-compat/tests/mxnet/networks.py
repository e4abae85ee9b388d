"""Small Gluon blocks and their data, as programs define them: workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np

from kindler.compat.frameworks.mxnet.library import mx

__all__ = ["accuracy", "classifier", "lenet", "loader", "ndarray_iter", "normed", "rows", "softmax_loss"]

nn = mx.gluon.nn


def rows(count: int = 96) -> tuple[Any, Any]:
    """Points in four dimensions, of three classes that lie apart."""
    random = np.random.default_rng(0)
    y = random.integers(0, 3, count)
    x = random.normal(size=(count, 4)) + 2.0 * np.eye(4)[y]
    return x.astype("float32"), y.astype("float32")


def classifier(config: dict[str, Any]) -> Any:
    net = nn.HybridSequential()
    net.add(nn.Dense(6, activation="tanh"), nn.Dense(3))  # sizes of inputs are left open
    net.initialize(mx.init.Xavier())
    return net


def normed(config: dict[str, Any]) -> Any:
    net = nn.HybridSequential()
    net.add(nn.Dense(6), nn.BatchNorm(), nn.Dense(3))
    return net


def lenet(config: dict[str, Any]) -> Any:
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(20, 5, activation="tanh"),
        nn.MaxPool2D(2, 2),
        nn.Conv2D(50, 5, activation="tanh"),
        nn.MaxPool2D(2, 2),
        nn.Flatten(),
        nn.Dense(500, activation="tanh"),
        nn.Dense(10),
    )
    net.initialize(mx.init.Xavier(magnitude=2.24))
    return net


def softmax_loss(config: dict[str, Any]) -> Any:
    return mx.gluon.loss.SoftmaxCrossEntropyLoss()


def accuracy(config: dict[str, Any]) -> Any:
    return mx.metric.Accuracy()


def ndarray_iter(config: dict[str, Any], kv: Any) -> Any:
    x, y = rows(config.get("rows", 50))
    return mx.io.NDArrayIter(x, y, batch_size=config["batch_size"], shuffle=config.get("shuffle", False))


def loader(config: dict[str, Any], kv: Any) -> Any:
    x, y = rows(config.get("rows", 50))
    own = slice(kv.rank, None, kv.num_workers)
    data = mx.gluon.data.ArrayDataset(x[own], y[own])
    return mx.gluon.data.DataLoader(data, batch_size=config["batch_size"])
