"""Stored models in memory: the server, the runtime, MLflow and the command line load them here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError
from kindler.models.kind import ModelKind
from kindler.models.predictor import Predictor
from kindler.models.registry import MODEL_KINDS
from kindler.store import Store, Version


class LoadedModel:
    """A model in memory.

    Attributes:
        kind: What its kind can do.
        model: The model, as `read` of its kind returned it.
    """

    def __init__(self, kind: ModelKind, model: Any) -> None:
        self.kind = kind
        self.model = model

    @cached_property
    def predictor(self) -> Predictor:
        """The model, ready to predict. Made on first use: a verb of the model's own needs none."""
        return self.kind.predictor(self.model)

    def call(self, verb: str, /, *data: Any, **options: Any) -> Any:
        """Run a verb of the runtime.

        Raises:
            ConfigError: Models of this kind do not have it.
        """
        verbs = self.kind.verbs
        if verbs is not None and verb not in verbs:
            raise ConfigError(
                f"models of kind {self.kind.kind!r} have no {verb}; they have {', '.join(verbs)}."
            )
        return self.kind.call(self, verb, *data, **options)


def load(store: Store, version: Version, *, trusted: bool, device: str | None = None) -> LoadedModel:
    """Read a version of a model from its store.

    `device` is where it is to compute, see `ModelKind.settle`; None leaves that to the framework.
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
    return LoadedModel(found, found.read(folder, meta, trusted=trusted))


def wrap(model: Any) -> LoadedModel:
    """A model of the caller's; its kind is found by looking at it."""
    return LoadedModel(MODEL_KINDS.kind_of(model), model)
