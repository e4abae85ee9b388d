"""One face for every kind of stored model: arrays by name in, arrays by name out.

A kind is a row of a table, whose code loads with the first model of the kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kindler.errors import ConfigError
from kindler.models.function import FunctionHandler, restored
from kindler.serve.signature import DEFAULT_SIGNATURE, Arrays, Signature
from kindler.shelves.models import Models
from kindler.shelves.registry import KINDS as STORED
from kindler.store import Version

__all__ = ["KINDS", "Servable", "load", "load_files", "signatures_of", "wrap"]


class Servable(Protocol):
    """A loaded model.

    Attributes:
        signature: What it takes and gives.
        methods: What can be called on it; "predict" is the first.
        size: The bytes it takes in memory, as far as is known.
        joins: Whether rows of several requests may share a call. False: what the model declares of its
            outputs speaks against it. None: that has to be tried. True: each row is computed alone anyway.
        steady: Whether all of it is known code whose time depends on shapes alone, so that calls that were
            short stay short. Only such a model may be called on the event loop.
    """

    signature: Signature
    methods: tuple[str, ...]
    size: int
    joins: bool | None
    steady: bool

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """The outputs for the inputs, which `signature` fits. Any thread may call it."""


# What makes a servable of an object that was read from the store, by the kind it was stored as.
KINDS: Mapping[str, str] = {
    "keras": "keras:KerasServable",
    "tf_keras": "keras:KerasServable",
    "torch": "torch:TorchServable",
    "sklearn": "sklearn:SklearnServable",
    "savedmodel": "saved_model:SavedModelServable",
}
# Kinds that are files, which their own runtime opens.
_FILES: Mapping[str, str] = {"onnx": "onnx:OnnxServable", "openvino": "openvino:OpenvinoServable"}


def load(models: Models, version: Version, *, trusted: bool) -> Servable:
    """Read a version from the store and make it ready to answer.

    Raises:
        ConfigError: It is of a kind that cannot be served.
        UntrustedError: Reading it could run code, and `trusted` was not given.
        MissingExtraError: A package that it needs is not installed.
    """
    if version.kind in _FILES:
        with models.store.files(version) as folder:
            return load_files(version.kind, folder, version.meta, trusted=trusted)
    return wrap(models.get(str(version), trusted=trusted), version.kind)


def load_files(kind: str, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Servable:
    """The same of the files of a version that lie in a folder, outside of any store."""
    if kind in _FILES:
        made: Servable = _class(_FILES[kind])(STORED.handler(kind).located(folder, meta, trusted=trusted))
        return made
    if kind == FunctionHandler.kind:
        return wrap(restored(folder, meta, trusted=trusted), kind)
    return wrap(STORED.handler(kind).read(folder, meta, trusted=trusted), kind)


def wrap(model: Any, kind: str | None = None) -> Servable:
    """Make a loaded model ready to answer.

    Args:
        model: The model.
        kind: What it was stored as; found out by looking at it if not given, or if that says nothing.
    """
    found = kind if kind is not None and kind in KINDS else _kind_of(model)
    if found == "estimator":
        from kindler.serve.servables.estimator import from_estimator

        return from_estimator(model)
    if found in KINDS:
        made: Servable = _class(KINDS[found])(model)
        return made
    if callable(getattr(model, "predict", None)) or callable(model):
        from kindler.serve.servables.callables import CallableServable

        return CallableServable(model)
    raise ConfigError(f"a model of kind {kind!r} ({type(model).__qualname__}) cannot be served.")


def signatures_of(servable: Servable) -> Mapping[str, Signature]:
    """The signatures of a model by TensorFlow's names for them; a model that is not TensorFlow's has one."""
    found: Mapping[str, Signature] | None = getattr(servable, "signatures", None)
    return found if found is not None else {DEFAULT_SIGNATURE: servable.signature}


def _class(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _kind_of(model: Any) -> str:
    """By the names of its classes, so that nothing is imported to find out."""
    for cls in type(model).__mro__:
        root = cls.__module__.partition(".")[0]
        if (root, cls.__name__) == ("kindler", "Estimator"):
            return "estimator"
        if (root, cls.__name__) in (("keras", "Model"), ("tf_keras", "Model")):
            return root
        if (root, cls.__name__) == ("torch", "Module"):
            return "torch"
        if (root, cls.__name__) == ("sklearn", "BaseEstimator"):
            return "sklearn"
    return ""
