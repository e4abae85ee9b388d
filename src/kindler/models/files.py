"""Models that are files of others, kept as they are: ONNX and OpenVINO."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import ConfigError
from kindler.models.kind import ModelKind, confined
from kindler.models.predictor import Predictor


class FileKind(ModelKind):
    """Files that a runtime of their own loads; `get(name, local=folder)` copies them out.

    Attributes:
        suffix: How the name of the file ends that is to be loaded.
    """

    suffix: ClassVar[str]

    def located(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Path:
        """The file to load, looked through whoever stored it.

        Raises:
            ConfigError: It is not a file of the version.
            UntrustedError: Loading it would read other files, or run code.
        """
        path = confined(folder, meta["file"])
        if path.suffix.lower() != self.suffix:
            raise ConfigError(f"{path.name!r} is not a {self.suffix} file; models of kind {self.kind!r} are.")
        return path

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """Load it with its runtime: a `Predictor`, which is called with data."""
        return self.opened(self.located(folder, meta, trusted=trusted))

    def opened(self, path: Path) -> Predictor:
        """Load a file that was looked through."""
        raise NotImplementedError

    def predictor(self, model: Any) -> Predictor:
        if not isinstance(model, Predictor):  # an object of the framework, which was never stored
            raise ConfigError(f"a {type(model).__qualname__} cannot predict before it is stored.")
        return model

    @staticmethod
    def keep(path: Path, folder: Path) -> None:
        """Copy a file into the folder under its own name."""
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"{path} is not a file.")
        shutil.copyfile(path, folder / path.name)
