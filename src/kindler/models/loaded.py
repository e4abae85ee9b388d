"""Stored models in memory: the server, the runtime, MLflow and the command line load them here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kindler import sandbox
from kindler.engine.fork_server import Recipe
from kindler.frameworks.keras import backends
from kindler.models.kind import LoadedModel
from kindler.models.registry import MODEL_KINDS
from kindler.store import Version, VersionStore

__all__ = ["LoadedModel", "load", "load_files", "process_recipe", "wrap"]


def load(store: VersionStore, version: Version, *, trusted: bool, device: str | None = None) -> LoadedModel:
    """Read a version of a model from its store.

    `device` is where it should run, see `ModelKind.settle`; None leaves it to the framework.
    """
    with store.files(version) as folder:
        return load_files(version.kind, folder, version.meta, trusted=trusted, device=device)


def load_files(
    kind: str, folder: Path, meta: Mapping[str, Any], *, trusted: bool, device: str | None = None
) -> LoadedModel:
    """Read the files of a version that lie in a folder, outside of any store."""
    found = MODEL_KINDS.model_kind(kind)
    if device is not None:
        found.settle(device, meta)
    shares = {"share_base": True} if "peft" in (kind, meta.get("model_kind")) else {}
    return LoadedModel(found, found.read(folder, meta, trusted=trusted, **shares))


def wrap(model: Any) -> LoadedModel:
    """A model of the caller's; its kind is found by looking at it."""
    return LoadedModel(MODEL_KINDS.kind_of(model), model)


def process_recipe(
    version: Version, *, sandboxed: bool, idle_s: float, environment: Mapping[str, str] | None = None
) -> Recipe:
    """What a process for a stored model is forked from; the kind of the model decides what it imports ahead.

    A sandboxed one must not know this process's environment. Its fork server ends after `idle_s` seconds
    without a child.
    """
    row = MODEL_KINDS.row(version.kind, version.meta)
    variables = dict(environment or {})
    if row.family == "keras":
        variables["KERAS_BACKEND"] = backends.backend_of(None, None)
    if sandboxed:
        variables["HOME"] = sandbox.EMPTY_HOME
    names = {name.partition(":")[0].partition(".")[0] for name in (*row.loaded, *row.preload)} - {"kindler"}
    installed = all(importlib.util.find_spec(name) is not None for name in names)
    return Recipe(
        preload=(__name__, *(row.preload if installed else ())),
        environment=tuple(sorted(variables.items())),
        idle_s=idle_s,
        inherits=sandbox.ENVIRONMENT if sandboxed else None,
    )
