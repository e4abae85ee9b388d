"""What is added to the gradients of the weights of layers. Without torch, for programs that have none."""

from __future__ import annotations

from typing import Any


class Regularizer:
    """Adds `l1 * sign(w) + l2 * w` to the gradient of the weights of a layer that is given one."""

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self.l1, self.l2 = float(l1), float(l2)

    def gradient(self, value: Any) -> Any:
        """What is added to the gradient of a parameter of this value."""
        return self.l1 * value.sign() + self.l2 * value


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
