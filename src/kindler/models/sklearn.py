"""scikit-learn estimators, by skops: types that are not known to be harmless are refused.

A type is harmless if a file that lies about its fields gets wrong numbers, and no more. What computes with
numpy, which looks at every shape, is. What is compiled for one estimator (trees, neighbours, support vectors,
clusters) or makes sparse matrices of numbers from the file (one-hot codes, words) follows what the file says
without looking, and reads or writes wherever that leads: a sandboxed process reads it, or whoever trusts the
file.
"""

from __future__ import annotations

import importlib
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from kindler import sandbox
from kindler.errors import UntrustedError
from kindler.models.kind import Data, Meta, OwnMethods, Reader, Trained, require_trust
from kindler.models.predictor import METHODS, Predictor, named
from kindler.models.safety import allowed_names, objects_in
from kindler.models.signature import Array, Arrays, Signature, TensorSpec
from kindler.registry import imported

_FILE = "model.skops"
_HARMLESS = allowed_names("scikit-learn values")
_WITH_NUMPY = allowed_names("scikit-learn with numpy")
# Losses, which only training computes.
_LOSSES = ("sklearn._loss.", "sklearn.linear_model._sgd_fast.")
_VALUES = frozenset(
    f"{name}Node"
    for name in (
        *("Json", "List", "Tuple", "Set", "Dict", "DefaultDict", "Slice", "Cached", "Bytes", "Bytearray"),
        *("NdArray", "DType", "Type", "Function"),
    )
)
_STATE_LENGTH = 624  # of numpy's Mersenne Twister, which does not look at where its state says it is


class SklearnKind(OwnMethods):
    """Estimators and pipelines."""

    kind = "sklearn"
    packages = ("scikit-learn", "skops")
    get_options = frozenset({"unfitted"})

    def can(self, obj: Any) -> bool:
        return any(
            cls.__name__ == "BaseEstimator" and cls.__module__.startswith("sklearn.")
            for cls in type(obj).__mro__
        )

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        _skops().dump(obj, folder / _FILE)
        _unknown(folder / _FILE, trusted=trusted)
        return {}

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        path = folder / _FILE
        unfitted = bool(options.get("unfitted"))
        if not unfitted and not sandbox.is_inside() and (found := _compiled(path)):
            shown = ", ".join(found[:5])
            require_trust(
                trusted,
                what="the scikit-learn model",
                reason=f"compiled code would trust what the file says about {shown}, which is allowed in a"
                " sandboxed process (a server's or a worker's), but not in this one",
            )
        # What is trusted is for the caller to say, and never for the file.
        model = _skops().load(path, trusted=_unknown(path, trusted=trusted))
        return importlib.import_module("sklearn.base").clone(model) if unfitted else model

    def train(self, read: Reader, meta: Meta, verb: str, data: Data, options: dict[str, Any]) -> Trained:
        try:
            return super().train(read, meta, verb, data, options)
        except UntrustedError:
            if verb != "fit":
                raise
        # Trained anew, nothing is left of what the file said; where training goes on from it, all of it is.
        unfitted = read(unfitted=True)
        if getattr(unfitted, "warm_start", False):
            return super().train(read, meta, verb, data, options)
        return super().train(lambda: unfitted, meta, verb, data, options)

    def predictor(self, model: Any) -> Predictor:
        return SklearnPredictor(model)


def _unknown(path: Path, *, trusted: bool) -> list[str]:
    found = set(_skops().get_untrusted_types(file=path))
    if strange := sorted(found - _HARMLESS):
        shown = ", ".join(strange[:5])
        require_trust(trusted, what="the scikit-learn model", reason=f"it has objects of {shown}")
    return sorted(found)


def _compiled(path: Path) -> list[str]:
    """The types in a file of skops whose compiled code would believe what the file says."""
    with zipfile.ZipFile(path) as archive:
        schema = json.loads(archive.read("schema.json"))
    nodes = [part for part in objects_in(schema) if "__loader__" in part or "__class__" in part]
    named = [(node, f"{node.get('__module__')}.{node.get('__class__')}") for node in nodes]
    return sorted({name for node, name in named if not _is_harmless(node, name)})


def _is_harmless(node: dict[str, Any], name: str) -> bool:
    if node.get("__loader__") == "RandomStateNode":
        return _is_random_state(node)
    if not name.startswith("sklearn."):
        return node.get("__loader__") in _VALUES
    return name in _HARMLESS or name.rpartition(".")[2] in _WITH_NUMPY or name.startswith(_LOSSES)


def _is_random_state(node: dict[str, Any]) -> bool:
    try:
        state = node["content"]["content"]
        where = json.loads(state["state"]["content"]["pos"]["content"])
        kind = json.loads(state["bit_generator"]["content"])
        return kind == "MT19937" and type(where) is int and 0 <= where <= _STATE_LENGTH
    except (KeyError, TypeError, ValueError):
        return False


def _skops() -> Any:
    """Loaded when it is needed: that an object is not a model of scikit-learn can be said without it."""
    return imported("skops.io", what="a scikit-learn model", extra="sklearn")


class SklearnPredictor(Predictor):
    """A fitted estimator. Its output has the name of the method."""

    def __init__(self, model: Any) -> None:
        self._model = model
        _one_thread()
        columns = getattr(model, "feature_names_in_", None)
        self._columns = None if columns is None else tuple(str(name) for name in columns)
        width = getattr(model, "n_features_in_", None)
        self.methods = tuple(m for m in METHODS if callable(getattr(model, m, None)))
        shape = None if width is None else (None, int(width))
        # A model that was trained on a frame may take text in some columns.
        dtype = "float64" if self._columns is None else None
        self.signature = Signature((TensorSpec("x", dtype, shape),), self._outputs(), self._columns)

    def call(self, inputs: Arrays, method: str) -> Arrays:
        returned = getattr(self._model, method)(self._table(inputs["x"]))
        return named(returned, (method,), _dense)

    def _table(self, array: Array) -> Any:
        if self._columns is None:
            return array
        import pandas as pd

        frame = pd.DataFrame(array, columns=list(self._columns))
        return frame.infer_objects() if array.dtype.kind == "O" else frame

    def _outputs(self) -> tuple[TensorSpec, ...]:
        classes = getattr(self._model, "classes_", None)
        if not self.methods or not isinstance(classes, np.ndarray):
            return tuple(TensorSpec(method) for method in self.methods[:1])
        kind = "object" if classes.dtype.kind in "OU" else classes.dtype.name
        return (TensorSpec("predict", kind, (None,)),)


def preload() -> None:
    """Import what is slow to import; the process can be forked, and sandboxed, afterwards."""
    for name in ("sklearn.pipeline", "sklearn.linear_model", "pandas"):
        importlib.import_module(name)
    _one_thread()


def _one_thread() -> None:
    """Small batches on several BLAS threads take many times as long wherever the server needs a core too."""
    limits = importlib.import_module("threadpoolctl").threadpool_limits  # comes with scikit-learn
    try:
        limits(limits=1, user_api="blas")
    except PermissionError:
        pass  # a sandboxed process cannot look for the libraries; `preload` has done it


def _dense(value: Any) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array: Array = np.asarray(value.todense() if hasattr(value, "todense") else value)
    return array.astype(object) if array.dtype.kind == "U" else array
