"""`bigdl.nn.layer`: BigDL's layers as torch modules."""

from __future__ import annotations

from kindler.compat.bigdl.nn.base import Layer, Node
from kindler.compat.bigdl.nn.containers import *  # noqa: F403
from kindler.compat.bigdl.nn.containers import Input
from kindler.compat.bigdl.nn.files import CLASSES
from kindler.compat.bigdl.nn.functions import *  # noqa: F403
from kindler.compat.bigdl.nn.weighted import *  # noqa: F403

_BASES = {"ImageLayer", "Weighted"}

__all__ = ["Input", "Layer", "Node", *(n for n in CLASSES if n[0] != "_" and n not in _BASES)]  # noqa: PLE0604
