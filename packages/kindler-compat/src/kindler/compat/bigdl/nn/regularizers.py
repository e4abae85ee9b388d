"""What is added to the gradients of a layer's weights."""

from __future__ import annotations

from typing import Any

__all__ = ["Regularizer"]


class Regularizer:
    """Adds `l1 * sign(w) + l2 * w` to the gradient of the weights of a layer that is given one."""

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self.l1, self.l2 = float(l1), float(l2)

    def gradient(self, value: Any) -> Any:
        """What is added to the gradient of a parameter of this value."""
        return self.l1 * value.sign() + self.l2 * value
