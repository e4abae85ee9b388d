"""TensorFlow's SavedModels, by their `serving_default` signature."""

from __future__ import annotations

import importlib
from typing import Any

from kindler.errors import ConfigError
from kindler.serve.signature import Arrays, Signature, TensorSpec

__all__ = ["SavedModelServable"]

_DEFAULT = "serving_default"


class SavedModelServable:
    """What `tf.saved_model.load` gave."""

    methods = ("predict",)

    def __init__(self, model: Any) -> None:
        self._tf = importlib.import_module("tensorflow")
        self._model = model  # holds the variables that the function uses
        found = dict(getattr(model, "signatures", {}))
        if not found:
            raise ConfigError("the SavedModel has no signature to be called by.")
        self._function = found.get(_DEFAULT) or found[sorted(found)[0]]
        _, inputs = self._function.structured_input_signature
        self._dtypes = {name: spec.dtype for name, spec in inputs.items()}
        self.signature = Signature(_specs(inputs), _specs(self._function.structured_outputs))
        self.size = sum(int(v.shape.num_elements() or 0) * v.dtype.size for v in self._function.variables)

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """See `Servable`."""
        given = {name: self._tf.constant(array, self._dtypes[name]) for name, array in inputs.items()}
        return {name: tensor.numpy() for name, tensor in self._function(**given).items()}


def _specs(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name,
            "object" if spec.dtype.name == "string" else spec.dtype.name,
            None if spec.shape.rank is None else tuple(spec.shape.as_list()),
        )
        for name, spec in sorted(tensors.items())
    )
