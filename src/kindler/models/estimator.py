"""Kindler's estimators: the trained model as its framework is stored, with its history and what it read.

Read again, an estimator predicts as it did, and a compiled Keras model can be trained on. PyTorch's
optimizer, loss and metrics are code: whoever wants to train on gives them to `get`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import numpy as np

from kindler import sandbox
from kindler.errors import ConfigError, UntrainedWarning, UntrustedError
from kindler.estimator.checks import warn_caller
from kindler.estimator.estimator import Estimator
from kindler.models.framework import FrameworkKind, fitted
from kindler.models.kind import ModelKind, confined, known_only, require_trust
from kindler.models.predictor import Predictor
from kindler.models.prepared import PREPARATION, PreparedPredictor, arguments_of, by_value
from kindler.models.registry import MODEL_KINDS
from kindler.models.signature import Arrays, Signature, TensorSpec

if TYPE_CHECKING:
    from kindler.models.loaded import LoadedModel

_MODEL = "model"


class EstimatorKind(ModelKind):
    """`kindler.Estimator` objects. `get` takes the arguments of `Estimator.from_torch` or `from_keras`."""

    kind: ClassVar[str] = "estimator"
    put_options: ClassVar[frozenset[str]] = frozenset({"init", "example", "training"})
    takes_any: ClassVar[bool] = True
    verbs: ClassVar[tuple[str, ...] | None] = ("predict", "score")
    _inside: FrameworkKind | None = None  # the kind of the model, once it was settled

    def can(self, obj: Any) -> bool:
        return isinstance(obj, Estimator)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        obj._warn_if_untrained("put")
        model = obj._storable()
        inner = MODEL_KINDS.kind_of(model)
        if not isinstance(inner, FrameworkKind):
            raise ConfigError(
                f"an estimator of a model of kind {inner.kind!r} cannot be stored.\n"
                "Hint: store its model, estimator.get_model()."
            )
        known_only(options, inner.put_options, what=f"put of an estimator of kind {inner.kind!r}")
        inside = folder / _MODEL
        inside.mkdir()
        meta = {
            "model_kind": inner.kind,
            "model_meta": inner.write(model, inside, trusted=trusted, **options),
            "signature": obj.signature,
            "history": list(obj.history),
            "inputs": obj.inputs,
        }
        if obj._live.is_untrained:
            meta["untrained"] = True
        if obj.preparation.active:
            (folder / PREPARATION).write_bytes(by_value(obj.preparation))
            meta["preparation"] = PREPARATION
        return meta

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        inner = _inner(meta)
        if meta.get("untrained"):
            warn_caller(
                "this estimator was never trained when it was stored: its weights are those that its creator"
                " made, random numbers unless the creator loads trained ones.\n"
                "Hint: train it before it predicts, or store its model, estimator.get_model().",
                UntrainedWarning,
            )
        if meta.get("preparation"):
            require_trust(
                trusted,
                what="a stored estimator with a transform",
                reason="its transform, collate or padding is code, stored as a pickle",
            )
            path = confined(folder, meta["preparation"])
            options = {**arguments_of(cloudpickle.loads(path.read_bytes())), **options}
        if (style := meta.get("inputs")) is not None:
            options = {"inputs": str(style), **options}
        for_model = {name: options.pop(name) for name in inner.get_options if name in options}
        model = inner.read(folder / _MODEL, meta["model_meta"], trusted=trusted, **for_model)
        return inner.estimator(model=model, **options).restore_columns(meta["signature"], meta["history"])

    def settle(self, device: str, meta: Mapping[str, Any]) -> None:
        self._inside = _inner(meta)
        self._inside.settle(device, meta.get("model_meta", {}))
        self.device = self._inside.device

    def device_bytes(self, meta: Mapping[str, Any]) -> int:
        return 0 if self._inside is None else self._inside.device_bytes(meta.get("model_meta", {}))

    def predictor(self, model: Any) -> Predictor:
        """The inputs have the names and shapes of the columns it was trained on."""
        trained = model._storable()
        kind, known = self._inside or _checked(MODEL_KINDS.kind_of(trained)), model.signature
        taken = known["feature_cols"] or ()
        names = [taken] if isinstance(taken, str) else [str(name) for name in taken]
        by_name = kind.named_predictor(trained, str(model.inputs), names) if names else None
        inner = by_name or kind.predictor(trained)
        if model.preparation.active:
            return PreparedPredictor(inner, model)
        features, layout = names, known["layout"] or {}
        if known["stack_features"] and len(features) > 1 and len(inner.signature.inputs) == 1:
            return _Renamed(inner, replace(inner.signature, columns=tuple(features)))
        if len(features) != len(inner.signature.inputs):
            return inner
        inputs = tuple(
            _spec(name, spec, layout) for name, spec in zip(features, inner.signature.inputs, strict=True)
        )
        return _Renamed(inner, replace(inner.signature, inputs=inputs))

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """A bare array is the first feature, and comes back as outputs alone."""
        estimator, (x, *labels) = loaded.model, data
        options = {"verbose": 0, **options}
        if verb == "score" and sandbox.is_inside():
            reason = "evaluating it starts processes, which a model that is not trusted may not"
            raise UntrustedError(what="score of a stored estimator", reason=reason)
        if verb == "score":
            return estimator.evaluate((x, *labels) if labels else x, **options)
        if not isinstance(x, np.ndarray):
            return estimator.predict(x, **options)
        columns = estimator.signature["feature_cols"] or "x"
        name = columns if isinstance(columns, str) else columns[0]
        scored = estimator.predict({name: x}, **options)
        outputs = {key: value for key, value in scored.items() if key != name}
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def train(
        self,
        read: Callable[..., Any],
        meta: Mapping[str, Any],
        verb: str,
        data: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        estimator, _ = fitted(read, data, _inner(meta).fit_options(options))
        return estimator, {}

    def to_predict(self, obj: Any) -> dict[str, Any]:
        """The options of `write` that leave out what only training needs."""
        return dict(_checked(MODEL_KINDS.kind_of(obj._storable())).to_predict)

    def put_again(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return _inner(meta).put_again(meta["model_meta"])

    def requirements(self, meta: Mapping[str, Any]) -> tuple[str, ...]:
        return _inner(meta).requirements(meta["model_meta"])


def _inner(meta: Mapping[str, Any]) -> FrameworkKind:
    """The kind of the model inside; `meta` may name any."""
    return _checked(MODEL_KINDS.model_kind(str(meta["model_kind"])))


def _checked(inner: ModelKind) -> FrameworkKind:
    if not isinstance(inner, FrameworkKind):
        raise ConfigError(f"an estimator cannot have a model of kind {inner.kind!r}.")
    return inner


def _spec(name: str, known: TensorSpec, layout: Any) -> TensorSpec:
    if name not in layout:
        return replace(known, name=name)
    dtype, shape = layout[name]
    if dtype in ("str", "bytes"):
        dtype = "object"
    sizes = tuple(None if size is None else int(size) for size in shape)
    return replace(known, name=name, dtype=known.dtype or str(dtype), shape=known.shape or (None, *sizes))


class _Renamed(Predictor):
    """The same model with other names for its inputs, in the same order."""

    def __init__(self, inner: Predictor, signature: Signature) -> None:
        self._inner = inner
        self.signature = signature
        self.methods = inner.methods
        self.size = inner.size
        self.joins = inner.joins
        self.steady = inner.steady

    def call(self, inputs: Arrays, method: str) -> Arrays:
        pairs = zip(self._inner.signature.inputs, self.signature.inputs, strict=True)
        return self._inner.call({own.name: inputs[spec.name] for own, spec in pairs}, method)
