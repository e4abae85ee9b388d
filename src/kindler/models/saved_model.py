"""TensorFlow's SavedModel folders, looked through before TensorFlow loads them: they are programs."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import MissingExtraError
from kindler.models.kind import Handler, require_trust
from kindler.models.safety.saved_model import dangers

__all__ = ["SavedModelHandler"]


class SavedModelHandler(Handler):
    """Folders with a `saved_model.pb`; read, they are what `tf.saved_model.load` gives."""

    kind: ClassVar[str] = "savedmodel"

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return isinstance(obj, Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
        shutil.copytree(obj, folder, symlinks=True, dirs_exist_ok=True)  # links are refused, not followed
        _check(folder, trusted=trusted)
        return {}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """See `Handler`."""
        _check(folder, trusted=trusted)
        try:
            tensorflow = importlib.import_module("tensorflow")
        except ModuleNotFoundError as exc:
            if exc.name != "tensorflow":
                raise
            raise MissingExtraError(what="a SavedModel", package="tensorflow", extra="tensorflow") from exc
        return tensorflow.saved_model.load(str(folder))


def _check(folder: Path, *, trusted: bool) -> None:
    found = [] if trusted else dangers(folder)
    if found:
        require_trust(trusted, what="the SavedModel", reason=f"it has {', '.join(found)}")
