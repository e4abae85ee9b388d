"""TensorFlow's SavedModels, by their signatures."""

from __future__ import annotations

import importlib
from typing import Any

from kindler.errors import ConfigError
from kindler.serve.row_independence import free_rows
from kindler.serve.signature import DEFAULT_SIGNATURE, SIGNATURE_METHOD, Arrays, Signature, TensorSpec

__all__ = ["SavedModelServable"]


class SavedModelServable:
    """What `tf.saved_model.load` gave. Each of its signatures is a method, see `SIGNATURE_METHOD`."""

    methods = ("predict",)
    steady = False  # it may have loops

    def __init__(self, model: Any) -> None:
        self._tf = importlib.import_module("tensorflow")
        self._model = model  # holds the variables that the functions use
        functions = dict(getattr(model, "signatures", {}))
        default = DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in functions else next(iter(functions), "")
        if len(functions) > 1 and default != DEFAULT_SIGNATURE:
            raise ConfigError(
                f"the SavedModel has the signatures {', '.join(sorted(functions))}, and none of them is"
                f" {DEFAULT_SIGNATURE!r}, which is what a request without a signature's name means."
            )
        if not functions:
            raise ConfigError("the SavedModel has no signature to be called by.")
        self._functions = {f"{SIGNATURE_METHOD}{name}": made for name, made in functions.items()}
        self._functions["predict"] = functions[default]
        self.signatures = {name: _signature(function) for name, function in functions.items()}
        self.signature = self.signatures[default]
        self.joins = None if all(map(_has_free_rows, functions.values())) else False
        variables = {id(v): v for function in functions.values() for v in function.variables}
        self.size = sum(int(v.shape.num_elements() or 0) * v.dtype.size for v in variables.values())

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """See `Servable`."""
        function = self._functions[method]
        dtypes = {name: spec.dtype for name, spec in function.structured_input_signature[1].items()}
        given = {name: self._tf.constant(array, dtypes[name]) for name, array in inputs.items()}
        return {name: tensor.numpy() for name, tensor in function(**given).items()}


def _signature(function: Any) -> Signature:
    return Signature(_specs(function.structured_input_signature[1]), _specs(function.structured_outputs))


def _has_free_rows(function: Any) -> bool:
    signature = _signature(function)
    return free_rows([s.shape for s in signature.inputs], [s.shape for s in signature.outputs])


def _specs(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name,
            "object" if spec.dtype.name == "string" else spec.dtype.name,
            None if spec.shape.rank is None else tuple(spec.shape.as_list()),
            binary=spec.dtype.name == "string",
        )
        for name, spec in sorted(tensors.items())
    )
