"""scikit-learn estimators, by skops: types that it does not know to be harmless are refused."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import MissingExtraError
from kindler.shelves.handler import Handler, require_trust

__all__ = ["SklearnHandler"]

_FILE = "model.skops"


class SklearnHandler(Handler):
    """Estimators and pipelines."""

    kind: ClassVar[str] = "sklearn"

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return any(
            cls.__name__ == "BaseEstimator" and cls.__module__.startswith("sklearn.")
            for cls in type(obj).__mro__
        )

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
        _skops().dump(obj, folder / _FILE)
        _unknown(folder / _FILE, trusted=trusted)
        return {}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """See `Handler`."""
        path = folder / _FILE
        # What is trusted is for the caller to say, and never for the file.
        return _skops().load(path, trusted=_unknown(path, trusted=trusted))


def _unknown(path: Path, *, trusted: bool) -> list[str]:
    found = list(_skops().get_untrusted_types(file=path))
    if found:
        shown = ", ".join(found[:5])
        require_trust(trusted, what="the scikit-learn model", reason=f"it has objects of {shown}")
    return found


def _skops() -> Any:
    """Found when it is needed: that an object is no model of scikit-learn's can be said without it."""
    try:
        return importlib.import_module("skops.io")
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "skops":
            raise
        raise MissingExtraError(what="a scikit-learn model", package="skops", extra="sklearn") from exc
