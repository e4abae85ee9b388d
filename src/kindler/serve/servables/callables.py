"""Any object with `predict`, or that can be called, of a store whose code is trusted."""

from __future__ import annotations

from typing import Any

from kindler.serve.requests import METHODS
from kindler.serve.servables.outputs import named
from kindler.serve.signature import Arrays, Signature, TensorSpec

__all__ = ["CallableServable"]


class CallableServable:
    """Is given one array, and returns an array, several, or a dict of them."""

    size = 0
    joins: bool | None = None
    steady = False  # it may do anything, and take any time

    def __init__(self, model: Any) -> None:
        self._model = model
        self.methods = tuple(m for m in METHODS if callable(getattr(model, m, None))) or ("predict",)
        self.signature = Signature((TensorSpec("x"),))

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """See `Servable`."""
        return named(getattr(self._model, method, self._model)(inputs["x"]))
