"""Regularizers for the weights of layers."""

from __future__ import annotations

from kindler.compat.bigdl.nn.regularizers import Regularizer

__all__ = ["L1L2Regularizer", "L1Regularizer", "L2Regularizer"]


class L1L2Regularizer(Regularizer):
    """Adds `l1 * sign(w) + l2 * w` to gradients."""

    def __init__(self, l1: float, l2: float, bigdl_type: str = "float") -> None:
        super().__init__(l1, l2)


class L1Regularizer(Regularizer):
    """Adds `l1 * sign(w)` to gradients."""

    def __init__(self, l1: float, bigdl_type: str = "float") -> None:
        super().__init__(l1, 0.0)


class L2Regularizer(Regularizer):
    """Adds `l2 * w` to gradients."""

    def __init__(self, l2: float, bigdl_type: str = "float") -> None:
        super().__init__(0.0, l2)
