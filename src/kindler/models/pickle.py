"""Anything that can be pickled, and files that are pickles; only for those who trust each other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from kindler.errors import ConfigError
from kindler.models.kind import Handler, confined, require_trust

__all__ = ["PickleHandler"]

_FILE = "object.pickle"
_TORCH = (".pt", ".pth")


class PickleHandler(Handler):
    """Any object; and `.pt`, `.pth`, `.pkl` and `.joblib` files, which are kept as they are."""

    kind: ClassVar[str] = "pickle"

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return True

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
        shown = f"the file {str(obj)!r}" if isinstance(obj, Path) else f"a {type(obj).__qualname__}"
        require_trust(trusted, what=shown, reason="it is a pickle, and reading a pickle can run any program")
        if isinstance(obj, Path):
            shutil.copyfile(obj, folder / f"object{obj.suffix}")
            return {"file": f"object{obj.suffix}"}
        try:
            (folder / _FILE).write_bytes(cloudpickle.dumps(obj))
        except Exception as exc:  # the object's own code says why it cannot be
            raise ConfigError(f"{shown} cannot be pickled: {exc!r}.") from exc
        return {"file": _FILE}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """See `Handler`."""
        require_trust(trusted, what="a stored pickle", reason="reading a pickle can run any program")
        path = confined(folder, meta["file"])
        if path.suffix in _TORCH:
            import torch

            return torch.load(path, weights_only=False)
        if path.suffix == ".joblib":
            import joblib

            return joblib.load(path)
        return cloudpickle.loads(path.read_bytes())
