"""Kindler's estimators: the model inside, with names and shapes of the columns it was trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kindler.serve.servables import Servable, wrap
from kindler.serve.signature import Arrays, Signature, TensorSpec

__all__ = ["from_estimator"]


def from_estimator(estimator: Any) -> Servable:
    """A servable of an estimator's model."""
    inner = wrap(estimator.get_model())
    told = estimator.signature
    named = told["feature_cols"] or ()
    features = [named] if isinstance(named, str) else [str(name) for name in named]
    layout = told["layout"] or {}
    if told["stack_features"] and len(features) > 1 and len(inner.signature.inputs) == 1:
        return _Renamed(inner, replace(inner.signature, columns=tuple(features)))
    if len(features) != len(inner.signature.inputs):
        return inner
    inputs = tuple(
        _spec(name, spec, layout) for name, spec in zip(features, inner.signature.inputs, strict=True)
    )
    return _Renamed(inner, replace(inner.signature, inputs=inputs))


def _spec(name: str, known: TensorSpec, layout: Any) -> TensorSpec:
    if name not in layout:
        return replace(known, name=name)
    dtype, shape = layout[name]
    return replace(
        known, name=name, dtype=known.dtype or str(dtype), shape=known.shape or (None, *map(int, shape))
    )


class _Renamed:
    """The same model with other names for its inputs, in the same order."""

    def __init__(self, inner: Servable, signature: Signature) -> None:
        self._inner = inner
        self.signature = signature
        self.methods = inner.methods
        self.size = inner.size
        self.joins = inner.joins
        self.steady = inner.steady

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """See `Servable`."""
        pairs = zip(self._inner.signature.inputs, self.signature.inputs, strict=True)
        return self._inner.call({own.name: inputs[spec.name] for own, spec in pairs}, method)
