"""TensorFlow's SavedModel folders, looked through before TensorFlow loads them: they are programs."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError
from kindler.frameworks.keras import backends
from kindler.models.kind import Meta, ModelKind, require_trust
from kindler.models.predictor import Predictor, free_rows
from kindler.models.safety.saved_model import dangers
from kindler.models.signature import DEFAULT_SIGNATURE, SIGNATURE_METHOD, Arrays, Signature, TensorSpec
from kindler.registry import imported


class SavedModelKind(ModelKind):
    """Folders with a `saved_model.pb`; read, they are what `tf.saved_model.load` gives."""

    kind = "savedmodel"
    packages = ("tensorflow",)

    def can(self, obj: Any) -> bool:
        return isinstance(obj, Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        shutil.copytree(obj, folder, symlinks=True, dirs_exist_ok=True)  # links are refused, not followed
        _check(folder, trusted=trusted)
        return {}

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        _check(folder, trusted=trusted)
        tensorflow = imported("tensorflow", what="a SavedModel", extra="tensorflow")
        return tensorflow.saved_model.load(str(folder))

    def settle(self, device: str, meta: Meta) -> None:
        self.device = backends.settled("tensorflow", device)

    def device_bytes(self, meta: Meta) -> int:
        return backends.on("tensorflow").taken_bytes() if self.device == "cuda" else 0

    def predictor(self, model: Any) -> Predictor:
        return SavedModelPredictor(model)


def _check(folder: Path, *, trusted: bool) -> None:
    found = [] if trusted else dangers(folder)
    if found:
        require_trust(trusted, what="the SavedModel", reason=f"it has {', '.join(found)}")


class SavedModelPredictor(Predictor):
    """What `tf.saved_model.load` gave. Each of its signatures is a method, see `SIGNATURE_METHOD`."""

    def __init__(self, model: Any) -> None:
        self._tf = importlib.import_module("tensorflow")
        self._model = model  # holds the variables that the functions use
        functions = dict(getattr(model, "signatures", {}))
        default = DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in functions else next(iter(functions), "")
        if len(functions) > 1 and default != DEFAULT_SIGNATURE:
            raise ConfigError(
                f"the SavedModel has the signatures {', '.join(sorted(functions))}, and none of them is"
                f" {DEFAULT_SIGNATURE!r}, which requests without a signature name use."
            )
        if not functions:
            raise ConfigError("the SavedModel has no signature that can be called.")
        self._functions = {f"{SIGNATURE_METHOD}{name}": made for name, made in functions.items()}
        self._functions["predict"] = functions[default]
        self._signatures = {name: _signature(function) for name, function in functions.items()}
        self.signature = self._signatures[default]
        free = [
            free_rows([spec.shape for spec in one.inputs], [spec.shape for spec in one.outputs])
            for one in self._signatures.values()
        ]
        self.joins = None if all(free) else False
        variables = {id(v): v for function in functions.values() for v in function.variables}
        self.size = sum(int(v.shape.num_elements() or 0) * v.dtype.size for v in variables.values())

    @property
    def signatures(self) -> Mapping[str, Signature]:
        return self._signatures

    def call(self, inputs: Arrays, method: str) -> Arrays:
        function = self._functions[method]
        dtypes = {name: spec.dtype for name, spec in function.structured_input_signature[1].items()}
        given = {name: self._tf.constant(array, dtypes[name]) for name, array in inputs.items()}
        return {name: tensor.numpy() for name, tensor in function(**given).items()}


def _signature(function: Any) -> Signature:
    return Signature(_specs(function.structured_input_signature[1]), _specs(function.structured_outputs))


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
