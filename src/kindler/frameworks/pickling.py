"""Pickles the user's objects for the workers, and names the part that cannot be pickled."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

from kindler.errors import ConfigError, first_line
from kindler.frameworks.creators import title

_DEEPEST = 8
_MAIN_OF_CHILD = "__mp_main__"  # the program in processes of multiprocessing; workers do not have it


def pickle_for_workers(value: Any) -> bytes:
    if _MAIN_OF_CHILD in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[_MAIN_OF_CHILD])
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as exc:
        fields = dict(value) if isinstance(value, Mapping) else {}
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        path, culprit = _culprit(fields)
        where = ", ".join(path) or "the argument"
        raise ConfigError(
            f"{where} cannot be sent to the workers: an object of type"
            f" {type(culprit).__module__}.{type(culprit).__qualname__} cannot be pickled"
            f" ({first_line(exc)}).\n"
            "Hint: make it inside the function that uses it, so that every worker has its own; locks, open"
            " files, connections and generators cannot be sent."
        ) from exc
    return data


def _culprit(fields: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Also returns the path to it."""
    path: list[str] = []
    parts: Iterator[tuple[str, Any]] = iter(fields.items())
    found: Any = fields
    while len(path) < _DEEPEST:
        broken = next(((name, part) for name, part in parts if not _pickles(part)), None)
        if broken is None:
            break
        name, found = broken
        path.append(name)
        parts = _parts(found)
    return path, found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Names are those that the value's owner recognizes."""
    if isinstance(value, functools.partial):
        yield f"the function {title(value.func)}", value.func
        yield from ((f"argument {number} of it", part) for number, part in enumerate(value.args))
        yield from ((f"argument {name!r} of it", part) for name, part in value.keywords.items())
    elif inspect.ismethod(value):
        yield f"the object of {title(value)}", value.__self__
    elif inspect.isfunction(value):
        known = inspect.getclosurevars(value)
        yield from ((f"{name!r} of {title(value)}", part) for name, part in known.nonlocals.items())
        yield from ((f"the global {name!r} of {title(value)}", p) for name, p in known.globals.items())
        defaults = enumerate(value.__defaults__ or ())
        yield from ((f"default {number} of {title(value)}", part) for number, part in defaults)
    elif isinstance(value, Mapping):
        yield from ((f"item {key!r}", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"item {number}", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        kind = type(value).__name__
        yield from ((f"attribute {name!r} of {kind}", part) for name, part in vars(value).items())


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever it is, it cannot go
        return False
    return True
