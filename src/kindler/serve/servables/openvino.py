"""OpenVINO's intermediate representation, by its own runtime."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import numpy as np

from kindler.errors import MissingExtraError
from kindler.serve.signature import Arrays, Signature, TensorSpec

__all__ = ["OpenvinoServable"]


class OpenvinoServable:
    """A compiled model; its requests are used one at a time."""

    methods = ("predict",)

    def __init__(self, path: Path) -> None:
        try:
            openvino = importlib.import_module("openvino")
        except ModuleNotFoundError as exc:
            if exc.name != "openvino":
                raise
            raise MissingExtraError(what="an OpenVINO model", package="openvino", extra="openvino") from exc
        core = openvino.Core()
        compiled: Any = core.compile_model(core.read_model(str(path)), "CPU")
        self._request = compiled.create_infer_request()
        self._lock = threading.Lock()
        self.signature = Signature(_specs(compiled.inputs, "input"), _specs(compiled.outputs, "output"))
        self.size = path.with_suffix(".bin").stat().st_size

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """See `Servable`."""
        with self._lock:
            found = self._request.infer({i: inputs[s.name] for i, s in enumerate(self.signature.inputs)})
            return {spec.name: np.array(found[i]) for i, spec in enumerate(self.signature.outputs)}


def _specs(ports: Any, what: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            next(iter(sorted(port.get_names())), f"{what}_{i}"),
            str(np.dtype(port.get_element_type().to_dtype()).name),
            tuple(None if d.is_dynamic else int(d.get_length()) for d in port.get_partial_shape()),
        )
        for i, port in enumerate(ports)
    )
