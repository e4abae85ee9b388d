"""A model that is ready to predict, whatever its kind: arrays by name in, arrays by name out.

The server, the command line and MLflow call it with arrays that fit its signature; people call it with data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.models.signature import DEFAULT_SIGNATURE, Arrays, Signature, TensorSpec, fit, from_columns

METHODS = ("predict", "predict_proba", "transform", "decision_function")


class Predictor:
    """A loaded model.

    Attributes:
        signature: What it takes and gives.
        methods: What can be called on it; "predict" is the first.
        size: The bytes it takes in memory, as far as is known.
        joins: Whether rows of several requests may share a call. False: what the model declares of its
            outputs speaks against it. None: that has to be tried. True: each row is computed alone anyway.
        steady: Whether all of it is known code whose time depends on shapes alone, so that calls that were
            short stay short. Only such a model may be called on the event loop.
        by_name: Whether `call` takes inputs of other names than those of `signature`, too.
    """

    signature: Signature
    methods: tuple[str, ...] = ("predict",)
    size: int = 0
    joins: bool | None = None
    steady: bool = False
    by_name: bool = False

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """The signatures by TensorFlow's names for them; a model that is not TensorFlow's has one."""
        return {DEFAULT_SIGNATURE: self.signature}

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """Compute the outputs for inputs that fit `signature`. Any thread may call it."""
        raise NotImplementedError

    def __call__(self, data: Any, *, method: str = "predict") -> Any:
        """Predict rows.

        Args:
            data: An array, a list, a pandas or Arrow table, arrays by name, or a tuple of one array for each
                input.
            method: One of `methods`.

        Returns:
            The output; several outputs as a dict.

        Raises:
            DataError: The model does not take the data.
            ConfigError: The model does not have the method.
        """
        if method not in self.methods:
            raise ConfigError(f"the model has no {method!r}; it has {', '.join(self.methods)}.")
        outputs = self.call(self._inputs(data), method)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _inputs(self, data: Any) -> Arrays:
        if type(data).__module__.partition(".")[0] in ("pandas", "pyarrow"):
            from kindler.models.arrow_columns import (
                as_table,
                columns_of,
            )  # pyarrow loads with the first table

            return fit(self.signature, from_columns(self.signature, columns_of(as_table(data))))
        names = self.signature.names
        if isinstance(data, tuple) and len(data) == len(names):
            data = dict(zip(names, data, strict=True))
        if not isinstance(data, Mapping):
            data = {"": data}
        return fit(self.signature, {str(name): np.asarray(value) for name, value in data.items()})


class CallablePredictor(Predictor):
    """Any object with `predict`, or that can be called, of a store whose code is trusted.

    It is given one array, and returns an array, several, or a dict of them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.methods = tuple(m for m in METHODS if callable(getattr(model, m, None))) or ("predict",)
        self.signature = Signature((TensorSpec("x"),))

    def call(self, inputs: Arrays, method: str) -> Arrays:
        result = getattr(self._model, method, self._model)(inputs["x"])
        if isinstance(result, Exception):  # omega|ml's way to fail
            raise result
        return named(result)


def named(returned: Any, names: Sequence[str] = (), convert: Callable[[Any], Any] = np.asarray) -> Arrays:
    """Arrays by name: a mapping's own names, those given, or "output_0", "output_1", ..."""
    if isinstance(returned, Mapping):
        return {str(name): convert(value) for name, value in returned.items()}
    if not isinstance(returned, list | tuple):
        return {names[0] if names else "output_0": convert(returned)}
    if len(names) != len(returned):
        names = [f"output_{i}" for i in range(len(returned))]
    return {name: convert(value) for name, value in zip(names, returned, strict=True)}


def plain(outputs: Any) -> Any:
    """Tensors as arrays, however they are nested."""
    if isinstance(outputs, Mapping):
        return {str(key): plain(value) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return type(outputs)(plain(value) for value in outputs)
    if hasattr(outputs, "detach"):
        return outputs.detach().cpu().numpy()
    return outputs.numpy() if hasattr(outputs, "numpy") and not isinstance(outputs, np.ndarray) else outputs
