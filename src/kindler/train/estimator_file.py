"""An estimator in one file: a zip archive of its settings, its model's recipe and its trained state.

The settings (JSON) and the state run no code when they are read. The recipe is a pickle of the user's own
code: unpickle it only if the file's author is trusted.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError

SUFFIX = ".estimator"

_FORMAT = 1
_FACTS, _RECIPE, _STATE = "estimator.json", "recipe.pickle", "state"
_PREPARATION = "preparation.pickle"


@dataclass(frozen=True)
class Saved:
    """The content of an estimator file.

    Attributes:
        facts: JSON: the framework, the seed, columns, history.
        recipe: The model's spec, as its framework packs it; a pickle.
        state: The full training state; empty if the model was never trained.
        preparation: What is done to rows before the model sees them; a pickle, empty if there is nothing.
    """

    facts: dict[str, Any]
    recipe: bytes = field(repr=False)
    state: bytes = field(repr=False)
    preparation: bytes = field(default=b"", repr=False)


def write(path: Path, saved: Saved) -> None:
    """Write the file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_FACTS, json.dumps({"format": _FORMAT, **saved.facts}))
        archive.writestr(_RECIPE, saved.recipe)
        archive.writestr(_STATE, saved.state)
        if saved.preparation:
            archive.writestr(_PREPARATION, saved.preparation)


def read(path: str | PathLike[str]) -> Saved:
    """Read the file; nothing in it is executed.

    Raises:
        ConfigError: It is not a complete estimator file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(_FACTS))
            prepared = archive.read(_PREPARATION) if _PREPARATION in archive.namelist() else b""
            saved = Saved(facts, archive.read(_RECIPE), archive.read(_STATE), prepared)
    except (zipfile.BadZipFile, KeyError, ValueError) as exc:
        raise ConfigError(
            f"{path} is not a saved estimator: {exc}.\n"
            f"Hint: est.save('name{SUFFIX}') writes one. To load weights alone, build the estimator and call"
            " est.load(path)."
        ) from exc
    if facts.get("format") != _FORMAT:
        raise ConfigError(
            f"{path} has estimator format {facts.get('format')!r}; this version of Kindler reads {_FORMAT}."
        )
    return saved
