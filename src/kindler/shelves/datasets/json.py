"""Python values as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import DataError
from kindler.models.kind import Handler

_FILE = "value.json"


class JsonHandler(Handler):
    """None, booleans, numbers, strings, and lists and dicts of them. Tuples come back as lists."""

    kind: ClassVar[str] = "json"

    def can(self, obj: Any) -> bool:
        return obj is None or isinstance(obj, bool | int | float | str | list | tuple | dict | Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        value = _loaded(obj) if isinstance(obj, Path) else obj
        _check(value, "the value")
        (folder / _FILE).write_text(json.dumps(value), encoding="utf-8")
        return {}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        return json.loads((folder / _FILE).read_text(encoding="utf-8"))


def _loaded(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise DataError(f"{path} is not valid JSON: {exc}.") from exc


def _check(value: Any, where: str) -> None:
    """JSON would silently turn keys into strings, and fail in the middle of a file."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for i, inside in enumerate(value):
            _check(inside, f"{where}[{i}]")
    elif isinstance(value, dict):
        for key, inside in value.items():
            if not isinstance(key, str):
                raise DataError(f"{where} has the key {key!r}; JSON has strings only.")
            _check(inside, f"{where}[{key!r}]")
    else:
        raise DataError(
            f"{where} is a {type(value).__qualname__}, which JSON does not have.\n"
            "Hint: arrays and tables are datasets of their own; kind='pickle' with trusted=True stores any"
            " object."
        )
