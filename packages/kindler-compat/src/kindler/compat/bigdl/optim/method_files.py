"""Optimizers in files: names of classes, numbers and arrays, so that reading one runs no code of the file."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.files import folder_at, split

__all__ = ["read_method", "write_method"]

_FORMAT = "kindler.bigdl.optim.1"
Classes = Mapping[str, type[Any]]


def write_method(method: Any, path: str | PathLike[str], classes: Classes, *, over_write: bool) -> None:
    """Write an optimizer to a file, completely or not at all.

    Raises:
        ConfigError: The file exists, or the optimizer or its schedule is a class of the program's own.
    """
    folder, name = split(path)
    if not over_write and name in folder_at(folder).names():
        raise ConfigError(f"{path} exists.\nHint: pass overWrite=True to replace it.")
    arrays: dict[str, Any] = {
        f"{place}/{slot}": value for place, own in enumerate(method.kept) for slot, value in own.items()
    }
    facts = {"format": _FORMAT, "parameters": len(method.kept), "method": _described(method, classes)}
    buffer = io.BytesIO()
    np.savez(buffer, facts=np.array(json.dumps(facts)), **arrays)
    folder_at(folder).write(name, [buffer.getbuffer()])


def read_method(path: str | PathLike[str], classes: Classes) -> Any:
    """Read what `write_method` wrote; nothing but these classes is made of it.

    Raises:
        ConfigError: It is another file.
    """
    folder, name = split(path)
    try:
        with np.load(io.BytesIO(folder_at(folder).read(name)), allow_pickle=False) as arrays:
            facts = json.loads(str(arrays["facts"]))
            method = _made(facts["method"], classes)
            method.kept = [{} for _ in range(facts["parameters"])]
            for key in set(arrays.files) - {"facts"}:
                place, _, slot = key.partition("/")
                method.kept[int(place)][slot] = arrays[key]
    except (ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile, EOFError) as exc:
        raise ConfigError(
            f"{path} is not an optimizer that `save` of kindler.compat.bigdl wrote.\n"
            "Hint: files of BigDL itself cannot be read."
        ) from exc
    return method


def _described(value: Any, classes: Classes) -> Any:
    if isinstance(value, list | tuple):
        return [_described(part, classes) for part in value]
    if value is None or isinstance(value, bool | int | float | str | dict):
        return value
    kind = type(value).__name__
    if classes.get(kind) is not type(value):
        raise ConfigError(f"a {kind} cannot be written: the file has classes of bigdl.optim.optimizer alone.")
    fields = {name: _described(part, classes) for name, part in vars(value).items() if name != "kept"}
    return {"class": kind, "fields": fields}


def _made(given: Any, classes: Classes) -> Any:
    if isinstance(given, list):
        return [_made(part, classes) for part in given]
    if not isinstance(given, dict) or "class" not in given:
        return given
    kind: Any = classes[given["class"]]
    made = kind.__new__(kind)
    vars(made).update({name: _made(part, classes) for name, part in given["fields"].items()})
    return made
