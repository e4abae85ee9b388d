"""Model kinds of other packages: entry points of the group `kindler.models`.

An entry point's name is the name of the kind, and its object a subclass of `ModelKind`. It is loaded when a
version of the kind is read, or when no kind of Kindler's own stores an object.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kindler.errors import ConfigError, first_line
from kindler.models.kind import ModelKind

GROUP = "kindler.models"

_log = logging.getLogger("kindler.models")


def names() -> list[str]:
    """The names of the kinds; nothing is loaded."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load(name: str) -> ModelKind | None:
    """The kind of a name; None if no installed package has one.

    Raises:
        ConfigError: It cannot be loaded, or is not a model kind.
    """
    for entry in entry_points(group=GROUP, name=name):
        return _made(entry)
    return None


def taking(obj: Any) -> ModelKind | None:
    """The first kind that takes an object. One that cannot be loaded is left out, with a warning."""
    for name in names():
        try:
            kind = load(name)
        except ConfigError as exc:
            _log.warning("%s", exc)
            continue
        if kind is not None and kind.can(obj):
            return kind
    return None


def _made(entry: EntryPoint) -> ModelKind:
    try:
        cls = entry.load()
    except Exception as exc:  # code of the other package: it says why
        raise ConfigError(
            f"the model kind {entry.name!r} ({entry.value}) cannot be loaded: {first_line(exc)}"
        ) from exc
    if not (isinstance(cls, type) and issubclass(cls, ModelKind) and cls.kind == entry.name):
        raise ConfigError(
            f"the entry point {entry.name!r} of {GROUP} ({entry.value}) is not a subclass of ModelKind whose"
            f" kind is {entry.name!r}."
        )
    return cls()
