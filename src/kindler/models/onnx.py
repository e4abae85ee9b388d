"""ONNX models, with the files beside them that hold their large tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import ConfigError
from kindler.models.files import FileHandler
from kindler.models.kind import confined, require_trust
from kindler.models.safety.onnx_file import scan

__all__ = ["OnnxHandler"]


class OnnxHandler(FileHandler):
    """`.onnx` files, and `onnx.ModelProto` objects."""

    kind: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"

    def located(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Path:
        """See `FileHandler`. Tensors that lie outside must lie in files of the version."""
        path = super().located(folder, meta, trusted=trusted)
        for name in _check(path, trusted=trusted):
            confined(path.parent, name)
        return path

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return isinstance(obj, Path) or type(obj).__name__ == "ModelProto"

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
        if not isinstance(obj, Path):
            (folder / "model.onnx").write_bytes(obj.SerializeToString())
            _check(folder / "model.onnx", trusted=trusted)
            return {"file": "model.onnx"}
        for name in _check(obj, trusted=trusted):
            if not (obj.parent / name).is_file():
                raise ConfigError(f"{obj.name} needs {name!r}, which is not beside it.")
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
            reason=f"it has the operation {found.strange[0]}, which is not ONNX's own",
        )
    return [name for name in named if name not in outside]
