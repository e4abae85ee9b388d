"""Estimators that do something to rows before their model sees them: how that is stored, and served."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from kindler.data.preparation import Preparation
from kindler.data.ragged import Ragged
from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.models.predictor import Predictor
from kindler.models.signature import Array, Arrays, Signature, TensorSpec, fit, rows_of

PREPARATION = "preparation.pickle"


def by_value(preparation: Preparation) -> bytes:
    """The user's functions with their code, so that whoever reads them need not have the modules."""
    with contextlib.ExitStack() as stack:
        for function in preparation.functions.values():
            stack.enter_context(_pickled_by_value(function))
        packed: bytes = cloudpickle.dumps(preparation)
    return packed


@contextlib.contextmanager
def _pickled_by_value(function: Any) -> Iterator[None]:
    function = getattr(function, "function", function)  # of `batched`
    function = getattr(function, "func", function)  # of a partial
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name)
    if name == "__main__" or module is None or _installed(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _installed(module: Any) -> bool:
    """Whether a module is part of Python, of a package that was installed, or of Kindler."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "kindler":
        return True
    folders = {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")}
    return any(Path(file).is_relative_to(folder) for folder in folders)


def arguments_of(preparation: Preparation) -> dict[str, Any]:
    """The arguments of `Estimator.from_torch` and `from_keras` that make it."""
    own = {field.name: getattr(preparation, field.name) for field in fields(Preparation)}
    own.pop("text")  # the framework's own
    return own


class PreparedPredictor(Predictor):
    """A model that takes the columns of the data: text, bytes and lists as well as numbers.

    Args:
        inner: The model itself.
        estimator: What it belongs to.
    """

    def __init__(self, inner: Predictor, estimator: Estimator) -> None:
        self._inner, self._preparer = inner, estimator.preparer()
        self._layout = estimator.signature["layout"] or {}
        names = self._preparer.names
        self.signature = Signature(
            tuple(_spec(name, self._layout.get(name)) for name in names), inner.signature.outputs
        )
        self.methods, self.size = inner.methods, inner.size
        # What a row is padded to, and what collate does, may depend on the other rows of a call.
        alone = estimator.preparation.collate is None and estimator.preparation.pad is None
        self.joins = inner.joins if alone else False
        self.steady = False

    def call(self, inputs: Arrays, method: str) -> Arrays:
        raw = {name: self._column(name, array) for name, array in inputs.items()}
        made = self._preparer(raw, rows=rows_of(inputs), where=lambda row: row).features
        if self._inner.by_name:
            return self._inner.call(made, method)
        takes = self._inner.signature.inputs
        if len(takes) != len(made):
            raise ConfigError(
                f"the transform makes the inputs {list(made)}, and the model takes"
                f" {[spec.name for spec in takes]}."
            )
        named = {spec.name: array for spec, array in zip(takes, made.values(), strict=True)}
        return self._inner.call(fit(self._inner.signature, named), method)

    def _column(self, name: str, array: Array) -> Any:
        """A column as a spool would have it."""
        kind, shape = self._layout.get(name) or (None, None)
        if array.dtype.kind in "OUS":
            return [_bytes_or_text(value, kind) for value in array.tolist()]
        if shape and shape[0] is None:
            offsets = np.arange(len(array) + 1, dtype=np.int64) * array.shape[1]
            flat = array.reshape(-1, *array.shape[2:])
            return Ragged(flat, offsets, kind=flat.dtype.name, inner=flat.shape[1:])
        return array


def _bytes_or_text(value: Any, kind: str | None) -> Any:
    if kind == "bytes" and isinstance(value, str):
        return value.encode()
    return value


def _spec(name: str, known: Any) -> TensorSpec:
    if known is None:
        return TensorSpec(name, binary=True)
    kind, shape = known
    sizes = tuple(None if size is None else int(size) for size in shape)
    if kind in ("str", "bytes"):
        return TensorSpec(name, "object", (None, *sizes), binary=kind == "bytes")
    return TensorSpec(name, str(kind), (None, *sizes))
