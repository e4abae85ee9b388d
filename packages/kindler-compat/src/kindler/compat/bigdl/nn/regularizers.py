"""What is added to the gradients of the weights of layers. Without torch, for programs that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kindler.compat.bigdl.arguments import Configured, arguments, classes

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the classes below


class Regularizer(Configured, takes=arguments("l1=0.0, l2=0.0")):
    """Adds `l1 * sign(w) + l2 * w` to the gradient of the weights of a layer that is given one."""

    def setup(self) -> None:
        vars(self).update({name: float(vars(self).get(name, 0.0)) for name in ("l1", "l2")})

    def gradient(self, value: Any) -> Any:
        """What is added to the gradient of a parameter of this value."""
        return self.l1 * value.sign() + self.l2 * value


_ROWS = ("L1L2Regularizer(l1, l2)", "L1Regularizer(l1)", "L2Regularizer(l2)")
globals().update(classes(__name__, Regularizer, dict.fromkeys(_ROWS, ())))
