"""ONNX models, with the files beside them that hold their large tensors; onnxruntime computes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError, first_line
from kindler.models._files import FileKind, FilePredictor
from kindler.models.kind import Meta, confined, require_trust
from kindler.models.safety.onnx_file import scan
from kindler.models.signature import Arrays, Signature, TensorSpec
from kindler.registry import imported

_log = logging.getLogger("kindler.models")
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "float16": "float16",
    "bool": "bool",
    "string": "object",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class OnnxKind(FileKind):
    """`.onnx` files, and `onnx.ModelProto` objects."""

    kind = "onnx"
    suffix = ".onnx"
    packages = ("onnxruntime",)
    _file_bytes = 0
    _must = False  # whether a GPU was insisted on

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        path = self.file(folder, meta)
        for name in _check(path, trusted=trusted):  # tensors that lie outside lie in files of the version
            confined(path.parent, name)
        model = OnnxModel(path, self.device)
        self._file_bytes = model.size
        if self.device == "cuda" and _CUDA not in model.providers:  # it warns, and computes on the CPU
            problem = f"onnxruntime could not load {_CUDA}, and uses {', '.join(model.providers)}."
            if self._must:
                raise ConfigError(
                    f"device 'cuda' was requested; {problem}\nHint: the dynamic linker must find the"
                    f" versions of CUDA and cuDNN that this onnxruntime-gpu was built for."
                )
            _log.warning("%s", problem)
            self.device = "cpu"
        return model

    def settle(self, device: str, meta: Meta) -> None:
        super().settle(device, meta)
        self._must = device == "cuda"

    def gpu_problem(self, meta: Meta) -> str | None:
        there = _runtime().get_available_providers()
        if _CUDA in there:
            return None
        return (
            f"onnxruntime has the providers {', '.join(there)} here, but not {_CUDA}.\n"
            "Hint: pip install onnxruntime-gpu, instead of onnxruntime."
        )

    def device_bytes(self, meta: Meta) -> int:
        """onnxruntime tells nobody; its weights are those of the file."""
        return self._file_bytes if self.device == "cuda" else 0

    def can(self, obj: Any) -> bool:
        return isinstance(obj, Path) or type(obj).__name__ == "ModelProto"

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        if not isinstance(obj, Path):
            (folder / "model.onnx").write_bytes(obj.SerializeToString())
            _check(folder / "model.onnx", trusted=trusted)
            return {"file": "model.onnx"}
        for name in _check(obj, trusted=trusted):
            if not (obj.parent / name).is_file():
                raise ConfigError(f"{obj.name} needs {name!r}, which is not next to it.")
            self.keep(obj.parent / name, folder)
        self.keep(obj, folder)
        return {"file": obj.name}


def _check(path: Path, *, trusted: bool) -> list[str]:
    """The files beside the model that it reads; one that lies elsewhere is none of its business."""
    found = scan(path)
    named = found.files
    outside = [name for name in named if Path(name).name != name or name in ("", ".", "..")]
    if outside:
        require_trust(trusted, what=f"the ONNX model {path.name}", reason=f"it reads the file {outside[0]!r}")
    if found.strange:
        require_trust(
            trusted,
            what=f"the ONNX model {path.name}",
            reason=f"it uses the operator {found.strange[0]}, which is not ONNX's own",
        )
    return [name for name in named if name not in outside]


class OnnxModel(FilePredictor):
    """A session of onnxruntime, which any number of threads may use.

    Without a device it takes whatever providers onnxruntime has.
    """

    def __init__(self, path: Path, device: str | None = None) -> None:
        runtime = _runtime()
        try:
            self._session: Any = runtime.InferenceSession(str(path), providers=_providers(runtime, device))
        except Exception as exc:  # its errors have no base of their own
            reason = first_line(exc).replace(str(path), path.name)
            raise ConfigError(f"onnxruntime cannot load {path.name}: {reason}") from exc
        self.providers: list[str] = list(self._session.get_providers())
        nodes, outputs = self._session.get_inputs(), self._session.get_outputs()
        self.signature = Signature(_specs(nodes), _specs(outputs))
        self.size = sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
        self.declare([node.shape for node in nodes], [node.shape for node in outputs])

    def run(self, inputs: Arrays) -> Arrays:
        names = [spec.name for spec in self.signature.outputs]
        return dict(zip(names, self._session.run(names, inputs), strict=True))


def _runtime() -> Any:
    return imported("onnxruntime", what="an ONNX model", extra="onnx")


def _providers(runtime: Any, device: str | None) -> list[Any]:
    if device is None:
        return list(runtime.get_available_providers())
    # By default its memory grows by doubling.
    cuda = (_CUDA, {"device_id": 0, "arena_extend_strategy": "kSameAsRequested"})
    return [_CPU] if device == "cpu" else [cuda, _CPU]


def _specs(nodes: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            node.name,
            _DTYPES.get(str(node.type).removeprefix("tensor(").removesuffix(")")),
            (None, *(n if isinstance(n, int) else None for n in node.shape[1:])) if node.shape else None,
        )
        for node in nodes
    )
