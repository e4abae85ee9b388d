"""ONNX models, by onnxruntime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError, MissingExtraError, first_line
from kindler.serve.servables.fixed import DeclaredRows
from kindler.serve.signature import Arrays, Signature, TensorSpec

__all__ = ["OnnxServable"]

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "float16": "float16",
    "bool": "bool",
    "string": "object",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


class OnnxServable:
    """A session of onnxruntime, which any number of threads may use."""

    methods = ("predict",)
    steady = False  # it may have loops

    def __init__(self, path: Path) -> None:
        try:
            runtime = importlib.import_module("onnxruntime")
        except ModuleNotFoundError as exc:
            if exc.name != "onnxruntime":
                raise
            raise MissingExtraError(what="an ONNX model", package="onnxruntime", extra="onnx") from exc
        try:
            self._session: Any = runtime.InferenceSession(
                str(path), providers=runtime.get_available_providers()
            )
        except Exception as exc:  # its errors have no base of their own
            raise ConfigError(f"onnxruntime cannot load {path.name}: {first_line(exc)}") from exc
        nodes, outputs = self._session.get_inputs(), self._session.get_outputs()
        self.signature = Signature(_specs(nodes), _specs(outputs))
        self.size = sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
        self._rows = DeclaredRows(
            self._run, self.signature, [node.shape for node in nodes], [node.shape for node in outputs]
        )
        self.joins = self._rows.joins

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """See `Servable`."""
        return self._rows.call(inputs)

    def _run(self, inputs: Arrays) -> Arrays:
        names = [spec.name for spec in self.signature.outputs]
        return dict(zip(names, self._session.run(names, inputs), strict=True))


def _specs(nodes: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            node.name,
            _DTYPES.get(str(node.type).removeprefix("tensor(").removesuffix(")")),
            (None, *(n if isinstance(n, int) else None for n in node.shape[1:])) if node.shape else None,
        )
        for node in nodes
    )
