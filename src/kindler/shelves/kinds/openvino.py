"""OpenVINO's intermediate representation: an .xml file and the .bin file beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import ConfigError
from kindler.shelves.kinds.files import FileHandler

__all__ = ["OpenvinoHandler"]


class OpenvinoHandler(FileHandler):
    """`.xml` files with their weights."""

    kind: ClassVar[str] = "openvino"

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return isinstance(obj, Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
        weights = obj.with_suffix(".bin")
        if not weights.is_file():
            raise ConfigError(f"{obj.name} needs {weights.name!r}, which is not beside it.")
        self.keep(obj, folder)
        self.keep(weights, folder)
        return {"file": obj.name}
