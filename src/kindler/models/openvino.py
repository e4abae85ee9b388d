"""OpenVINO's intermediate representation: an .xml file and the .bin file beside it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import ConfigError
from kindler.models.files import FileHandler
from kindler.models.kind import confined

__all__ = ["OpenvinoHandler"]

_FILE = "model.xml"


class OpenvinoHandler(FileHandler):
    """`.xml` files with their weights, and `openvino.Model` objects."""

    kind: ClassVar[str] = "openvino"
    suffix: ClassVar[str] = ".xml"

    def located(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Path:
        """See `FileHandler`. OpenVINO reads the weights beside it, and nothing else."""
        path = super().located(folder, meta, trusted=trusted)
        confined(folder, path.with_suffix(".bin").relative_to(folder).as_posix())
        return path

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return isinstance(obj, Path) or (
            type(obj).__name__ == "Model" and type(obj).__module__.partition(".")[0] == "openvino"
        )

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
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
