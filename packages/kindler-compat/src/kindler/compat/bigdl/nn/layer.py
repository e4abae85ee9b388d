"""`bigdl.nn.layer`: BigDL's layers as torch modules."""

from __future__ import annotations

from kindler.compat.bigdl.nn import (
    activations,
    containers,
    convolution,
    linear,
    normalization,
    pooling,
    recurrent,
    shaping,
    tables,
)
from kindler.compat.bigdl.nn.activations import *  # noqa: F403
from kindler.compat.bigdl.nn.base import Layer
from kindler.compat.bigdl.nn.containers import *  # noqa: F403
from kindler.compat.bigdl.nn.convolution import *  # noqa: F403
from kindler.compat.bigdl.nn.graph import Node
from kindler.compat.bigdl.nn.linear import *  # noqa: F403
from kindler.compat.bigdl.nn.normalization import *  # noqa: F403
from kindler.compat.bigdl.nn.pooling import *  # noqa: F403
from kindler.compat.bigdl.nn.recurrent import *  # noqa: F403
from kindler.compat.bigdl.nn.shaping import *  # noqa: F403
from kindler.compat.bigdl.nn.tables import *  # noqa: F403

__all__ = [  # noqa: PLE0604 - the names of all parts
    "Layer",
    "Node",
    *activations.__all__,
    *containers.__all__,
    *convolution.__all__,
    *linear.__all__,
    *normalization.__all__,
    *pooling.__all__,
    *recurrent.__all__,
    *shaping.__all__,
    *tables.__all__,
]
