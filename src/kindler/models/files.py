"""Models that are files of others, kept as they are: ONNX and OpenVINO."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import ConfigError
from kindler.models.kind import Handler, confined

__all__ = ["FileHandler"]


class FileHandler(Handler):
    """Files, which `get(name, local=folder)` copies out; loading them is for the caller's own runtime.

    Attributes:
        suffix: How the name of the file ends that is to be loaded.
    """

    suffix: ClassVar[str]

    def located(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Path:
        """See `Handler`."""
        path = confined(folder, meta["file"])
        if path.suffix.lower() != self.suffix:
            raise ConfigError(f"{path.name!r} is not a {self.suffix} file; models of kind {self.kind!r} are.")
        return path

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """See `Handler`."""
        raise ConfigError(
            f"a model of kind {self.kind!r} is files.\nHint: get(name, local=folder) copies them to a folder;"
            f" {meta['file']!r} is the one to load."
        )

    @staticmethod
    def keep(path: Path, folder: Path) -> None:
        """Copy a file into the folder under its own name."""
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"{path} is no file.")
        shutil.copyfile(path, folder / path.name)
