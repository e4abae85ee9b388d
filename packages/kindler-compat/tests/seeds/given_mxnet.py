"""What Orca's page leaves to its reader for MXNet; workers import it."""

from __future__ import annotations

from kindler.compat import mxnet as mx
from kindler.compat.mxnet.gluon import nn
from tests.whole import WHOLE

__all__ = ["ENOUGH", "LeNet"]

ENOUGH = 0.9 if WHOLE else 0.6  # two epochs with Adam's rate of 0.02, as on the page


class LeNet(nn.HybridSequential):
    """A small convolutional classifier of digits, for the large steps of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.add(nn.Conv2D(6, 5, activation="tanh"), nn.AvgPool2D(4, 4), nn.Dense(10))
        self.initialize(mx.init.Xavier(magnitude=2.24))
