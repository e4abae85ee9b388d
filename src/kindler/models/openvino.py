"""OpenVINO's intermediate representation: an .xml file and the .bin file beside it. OpenVINO runs it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kindler.errors import ConfigError
from kindler.models.files import FileKind
from kindler.models.fixed_batch import DeclaredRows
from kindler.models.kind import confined, imported
from kindler.models.predictor import Predictor
from kindler.models.signature import Arrays, Signature, TensorSpec

__all__ = ["OpenvinoKind", "OpenvinoModel"]

_FILE = "model.xml"
# Where a processor has them, OpenVINO would compute in 16 bits, and answer otherwise than elsewhere.
_SETTINGS = {"INFERENCE_PRECISION_HINT": "f32"}


class OpenvinoKind(FileKind):
    """`.xml` files with their weights, and `openvino.Model` objects."""

    kind: ClassVar[str] = "openvino"
    suffix: ClassVar[str] = ".xml"
    packages: ClassVar[tuple[str, ...]] = ("openvino",)

    def located(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Path:
        """OpenVINO reads the weights beside it, and nothing else."""
        path = super().located(folder, meta, trusted=trusted)
        confined(folder, path.with_suffix(".bin").relative_to(folder).as_posix())
        return path

    def opened(self, path: Path) -> Predictor:
        return OpenvinoModel(path)

    def can(self, obj: Any) -> bool:
        return isinstance(obj, Path) or (
            type(obj).__name__ == "Model" and type(obj).__module__.partition(".")[0] == "openvino"
        )

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        if not isinstance(obj, Path):
            # As it is: by itself, OpenVINO would make 16 bits of its weights.
            importlib.import_module("openvino").save_model(obj, str(folder / _FILE), compress_to_fp16=False)
            return {"file": _FILE}
        weights = obj.with_suffix(".bin")
        if not weights.is_file():
            raise ConfigError(f"{obj.name} needs {weights.name!r}, which is not beside it.")
        self.keep(obj, folder)
        self.keep(weights, folder)
        return {"file": obj.name}


class OpenvinoModel(Predictor):
    """A compiled model; its requests are used one at a time. Not steady: it may have loops."""

    def __init__(self, path: Path) -> None:
        openvino = imported("openvino", what="an OpenVINO model", package="openvino", extra="openvino")
        core = openvino.Core()
        try:
            compiled: Any = core.compile_model(core.read_model(str(path)), "CPU", _SETTINGS)
        except RuntimeError as exc:
            told = _last(exc).replace(str(path), path.name)
            raise ConfigError(f"OpenVINO cannot load {path.name}: {told}") from exc
        self._request = compiled.create_infer_request()
        self._lock = threading.Lock()
        self.signature = Signature(_specs(compiled.inputs, "input"), _specs(compiled.outputs, "output"))
        self.size = path.with_suffix(".bin").stat().st_size
        self._rows = DeclaredRows(
            self._run, self.signature, list(map(_shape, compiled.inputs)), list(map(_shape, compiled.outputs))
        )
        self.joins = self._rows.joins

    def call(self, inputs: Arrays, method: str) -> Arrays:
        return self._rows.call(inputs)

    def _run(self, inputs: Arrays) -> Arrays:
        with self._lock:
            found = self._request.infer({i: inputs[s.name] for i, s in enumerate(self.signature.inputs)})
            return {spec.name: np.array(found[i]) for i, spec in enumerate(self.signature.outputs)}


def _specs(ports: Any, what: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            next(iter(sorted(port.get_names())), f"{what}_{i}"),
            str(np.dtype(port.get_element_type().to_dtype()).name),
            (None, *shape[1:]) if (shape := _shape(port)) else None,
        )
        for i, port in enumerate(ports)
    )


def _shape(port: Any) -> list[int | None] | None:
    shape = port.get_partial_shape()
    return [_length(n) for n in shape] if shape.rank.is_static else None


def _length(dimension: Any) -> int | None:
    return None if dimension.is_dynamic else int(dimension.get_length())


def _last(error: BaseException) -> str:
    """The cause; the lines before it are places in OpenVINO's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
