"""OpenVINO's intermediate representation: an .xml file and the .bin file beside it. OpenVINO runs it."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.models._files import FileKind, FilePredictor
from kindler.models.kind import Meta, confined
from kindler.models.signature import Arrays, Signature, TensorSpec
from kindler.registry import imported

_FILE = "model.xml"


class OpenvinoKind(FileKind):
    """`.xml` files with their weights, and `openvino.Model` objects."""

    kind = "openvino"
    suffix = ".xml"
    packages = ("openvino",)

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        path = self.file(folder, meta)
        # OpenVINO reads the weights beside it, and nothing else.
        confined(folder, path.with_suffix(".bin").relative_to(folder).as_posix())
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
            raise ConfigError(f"{obj.name} needs {weights.name!r}, which is not next to it.")
        self.keep(obj, folder)
        self.keep(weights, folder)
        return {"file": obj.name}


class OpenvinoModel(FilePredictor):
    """A compiled model; its requests are used one at a time."""

    def __init__(self, path: Path) -> None:
        imported("openvino", what="an OpenVINO model", extra="openvino")
        from kindler.frameworks.openvino.graph import SETTINGS, cause, core, shape_of

        try:
            compiled: Any = core().compile_model(core().read_model(str(path)), "CPU", SETTINGS)
        except RuntimeError as exc:
            reason = cause(exc).replace(str(path), path.name)
            raise ConfigError(f"OpenVINO cannot load {path.name}: {reason}") from exc
        self._request = compiled.create_infer_request()
        self._lock = threading.Lock()
        self.signature = Signature(_specs(compiled.inputs, "input"), _specs(compiled.outputs, "output"))
        self.size = path.with_suffix(".bin").stat().st_size
        self.declare([*map(shape_of, compiled.inputs)], [*map(shape_of, compiled.outputs)])

    def run(self, inputs: Arrays) -> Arrays:
        with self._lock:
            found = self._request.infer({i: inputs[s.name] for i, s in enumerate(self.signature.inputs)})
            return {spec.name: np.array(found[i]) for i, spec in enumerate(self.signature.outputs)}


def _specs(ports: Any, what: str) -> tuple[TensorSpec, ...]:
    from kindler.frameworks.openvino.graph import names_of, shape_of

    return tuple(
        TensorSpec(
            name,
            str(np.dtype(port.get_element_type().to_dtype()).name),
            (None, *shape[1:]) if (shape := shape_of(port)) else None,
        )
        for name, port in zip(names_of(ports, what), ports, strict=True)
    )
