"""Kindler's estimators, and the kinds of models that they hold and train.

A stored estimator is its trained model as the framework is stored, with its history and what it read. Read
again, it predicts as it did, and a compiled Keras model can be trained on. PyTorch's optimizer, loss and
metrics are code: whoever wants to train on gives them to `get`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from kindler import sandbox
from kindler.config import RunSettings
from kindler.data.preparation import Prepare
from kindler.data.ragged import Ragged
from kindler.data.statistics import STATISTICS, Statistics
from kindler.errors import ConfigError, UntrainedWarning, UntrustedError
from kindler.estimator.checks import warn_caller
from kindler.estimator.estimator import Estimator
from kindler.estimator.groups import grouped
from kindler.estimator.lineage import installed
from kindler.models.kind import (
    Data,
    LoadedModel,
    Meta,
    ModelKind,
    Reader,
    Trained,
    confined,
    reject_unknown,
    require_trust,
)
from kindler.models.predictor import BatchPlan, PendingCall, Predictor
from kindler.models.registry import MODEL_KINDS
from kindler.models.signature import Array, Arrays, Signature, TensorSpec, fit, rows_of
from kindler.store import Version
from kindler.train.callbacks import TensorBoard

_MODEL, _PREPARATION, _MADE, _TOKENIZER = "model", "preparation.pickle", "made.estimator", "tokenizer"
_TOKENS = "kindler.frameworks.torch.huggingface"  # where the class of text models' collate functions is
# What an estimator is made with; the other options of a fit are arguments of `Estimator.fit`.
_MAKING = (
    *("workers", "engine", "device", "seed", "optimization", "prepare", "settings"),
    *("metrics", "config", "keras_backend", "optimizer", "loss"),
)


class FrameworkKind(ModelKind):
    """A kind whose models an estimator can hold and train.

    Attributes:
        to_predict: Options of `write` that leave out what only training needs.
    """

    to_predict: ClassVar[Mapping[str, Any]] = {}

    def estimator(self, **options: Any) -> Estimator:
        """Make an estimator of a model of this kind, by one of `Estimator`'s constructors."""
        raise NotImplementedError

    def named_predictor(self, model: Any, inputs: str, names: Sequence[str]) -> Predictor | None:
        """The model ready to predict, where an estimator calls it with inputs of these names."""
        return None

    def describe_training(self, estimator: Estimator) -> dict[str, Any] | None:
        """What trains an estimator's model, as JSON that is read without trust; None if there is more."""
        return None

    def training_options(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `estimator` that `describe_training` returned; they may come from anybody."""
        return {}

    def fit_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a fit, with objects for what is sent by name."""
        return options

    def text_models(self) -> Any:
        """The module that stores tokenizers and serves text models."""
        raise ConfigError(f"models of kind {self.kind!r} have no tokenizer.")

    def train(self, read: Reader, meta: Meta, verb: str, data: Data, options: dict[str, Any]) -> Trained:
        """The history of the fit becomes an attribute of the version."""
        options = self.fit_options(options)
        estimator, history = _fitted(lambda **making: self.estimator(model=read(), **making), data, options)
        return estimator.get_model(), {"history": list(history)}


def _fitted(make: Callable[..., Estimator], data: Data, options: Mapping[str, Any]) -> tuple[Estimator, Any]:
    """Make an estimator with its share of the options and fit it. One process, unless more are asked for."""
    arguments = grouped(options)
    if "nan_loss" in arguments:
        arguments["settings"] = RunSettings(nan_loss=arguments.pop("nan_loss"))
    if "log_dir" in arguments:
        arguments["callbacks"] = [TensorBoard(arguments.pop("log_dir"))]
    making = {name: value for name, value in arguments.items() if name in _MAKING}
    rest = {name: value for name, value in arguments.items() if name not in _MAKING}
    estimator = make(**{"workers": 1, "engine": "local", **making})
    return estimator, estimator.fit(data[0] if len(data) == 1 else data, **{"verbose": 0, **rest})


def matrix(data: Any) -> Any:
    """Tables as matrices; anything else as it is."""
    module = type(data).__module__.partition(".")[0]
    if module == "pyarrow":
        return data.to_pandas().to_numpy()
    return data.to_numpy() if module == "pandas" else data


class EstimatorKind(ModelKind):
    """`kindler.Estimator` objects. `get` takes the arguments of `Estimator.from_torch` or `from_keras`."""

    kind = "estimator"
    put_options = frozenset({"init", "example", "training"})
    takes_any = True
    verbs = ("predict", "score")
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
        reject_unknown(options, inner.put_options, what=f"put of an estimator of kind {inner.kind!r}")
        inside = folder / _MODEL
        inside.mkdir()
        record = obj._record
        statistics = record.pop("statistics")
        meta = {
            "model_kind": inner.kind,
            "model_meta": inner.write(model, inside, trusted=trusted, **options),
            **record,
            "inputs": obj._inputs,
        }
        if recipe := obj._lineage.recipe:
            (folder / _MADE).write_bytes(recipe)
            meta["made"] = _MADE
        if obj.lineage and (weights := obj.lineage[-1].get("weights")) is not None:
            meta["changed_since"] = obj._replica.digests() != weights
        if statistics is not None:  # too large for the catalog, which lists read
            (folder / STATISTICS).write_text(json.dumps(statistics))
            meta["statistics"] = STATISTICS
        if obj._live.is_untrained:
            meta["untrained"] = True
        if (tokens := _tokens_alone(obj._prepare)) is not None and (
            facts := inner.text_models().write_tokens(tokens, folder / _TOKENIZER)
        ) is not None:
            meta["tokens"] = {**facts, "length_col": obj._prepare.length_col}
        elif obj._prepare.active:
            (folder / _PREPARATION).write_bytes(_with_code(obj._prepare))
            meta["preparation"] = _PREPARATION
        return meta

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        inner = _inner(meta)
        if meta.get("untrained"):
            warn_caller(
                "this estimator was stored untrained: its weights are the initial ones from its creator,"
                " random unless the creator loads trained ones.\n"
                "Hint: train it before predicting, or store its model, estimator.get_model().",
                UntrainedWarning,
            )
        if meta.get("preparation"):
            require_trust(
                trusted,
                what="a stored estimator with a transform",
                reason="its transform, collate or padding is code, stored as a pickle",
            )
            stored = cloudpickle.loads(confined(folder, meta["preparation"]).read_bytes())
            options = {"prepare": replace(stored, text=False), **options}  # `text` is the framework's own
        if (facts := meta.get("tokens")) is not None:
            tokens = inner.text_models().read_tokens(folder / _TOKENIZER, facts, trusted=trusted)
            options = {"prepare": Prepare(collate=tokens, length_col=facts.get("length_col")), **options}
        if (style := meta.get("inputs")) is not None:
            options = {"inputs": str(style), **options}
        for_model = {name: options.pop(name) for name in inner.get_options if name in options}
        model = inner.read(folder / _MODEL, meta["model_meta"], trusted=trusted, **for_model)
        statistics = Statistics.read(folder / STATISTICS).to_json() if meta.get("statistics") else None
        return inner.estimator(model=model, **options)._restore_record({**meta, "statistics": statistics})

    def belongs(self, obj: Any, version: Version) -> None:
        obj._stored_as({"version": str(version), "bucket": version.bucket, "digest": version.digest})

    def settle(self, device: str, meta: Meta) -> None:
        self._inside = _inner(meta)
        self._inside.settle(device, meta.get("model_meta", {}))
        self.device = self._inside.device

    def device_bytes(self, meta: Meta) -> int:
        return 0 if self._inside is None else self._inside.device_bytes(meta.get("model_meta", {}))

    def predictor(self, model: Any) -> Predictor:
        """The inputs have the names and shapes of the columns it was trained on."""
        trained = model._storable()
        kind, known = self._inside or _checked(MODEL_KINDS.kind_of(trained)), model.signature
        if _tokens_alone(model._prepare) is not None:
            device = kind.device or "cpu"
            by_text: Predictor | None = kind.text_models().text_predictor(
                model._prepare.collate, trained, device
            )
            if by_text is not None:
                return by_text
        taken = known["feature_cols"] or ()
        names = [taken] if isinstance(taken, str) else [str(name) for name in taken]
        by_name = kind.named_predictor(trained, str(model._inputs), names) if names else None
        inner = by_name or kind.predictor(trained)
        if model._prepare.active:
            return _Prepared(inner, model)
        layout, takes = known["layout"] or {}, inner.signature.inputs
        if known["stack_features"] and len(names) > 1 and len(takes) == 1:
            return _Renamed(inner, replace(inner.signature, columns=tuple(names)))
        if len(names) != len(takes):
            return inner
        inputs = tuple(_renamed(spec, name, layout) for name, spec in zip(names, takes, strict=True))
        return _Renamed(inner, replace(inner.signature, inputs=inputs))

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """A bare array is the first feature, and comes back as outputs alone."""
        estimator, (x, *labels) = loaded.model, data
        options = {"verbose": 0, **options}
        if verb == "score" and sandbox.is_inside():
            reason = "evaluating it starts processes, which an untrusted model must not"
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

    def train(self, read: Reader, meta: Meta, verb: str, data: Data, options: dict[str, Any]) -> Trained:
        return _fitted(read, data, _inner(meta).fit_options(options))[0], {}

    def to_predict(self, obj: Any) -> dict[str, Any]:
        """The options of `write` that leave out what only training needs."""
        return dict(_checked(MODEL_KINDS.kind_of(obj._storable())).to_predict)

    def put_again(self, meta: Meta) -> dict[str, Any]:
        return _inner(meta).put_again(meta["model_meta"])

    def requirements(self, meta: Meta) -> tuple[str, ...]:
        return _inner(meta).requirements(meta["model_meta"])


def _inner(meta: Meta) -> FrameworkKind:
    """The kind of the model inside; `meta` may name any."""
    return _checked(MODEL_KINDS.model_kind(str(meta["model_kind"])))


def _checked(inner: ModelKind) -> FrameworkKind:
    if not isinstance(inner, FrameworkKind):
        raise ConfigError(f"an estimator cannot have a model of kind {inner.kind!r}.")
    return inner


def _tokens_alone(preparation: Prepare) -> Any:
    """The tokenizer of a text model, where it is all that happens to rows; None if there is more, or less."""
    collate = preparation.collate
    alone = preparation.active and not replace(preparation, collate=None, length_col=None).active
    return collate if alone and type(collate).__module__ == _TOKENS else None


def _with_code(preparation: Prepare) -> bytes:
    """The user's functions with their code, so that whoever reads them need not have the modules."""
    modules = {_module_of(function) for function in preparation.functions.values()} - {"__main__"}
    with contextlib.ExitStack() as stack:
        for module in (sys.modules.get(name) for name in modules):
            if module is not None and not installed(module):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        packed: bytes = cloudpickle.dumps(preparation)
    return packed


def _module_of(function: Any) -> str:
    function = getattr(function, "function", function)  # of `batched`
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__module__", None) or type(function).__module__


class _Wrapped(Predictor):
    """A model whose inputs have other names, or other forms, than those that it takes itself."""

    def __init__(self, inner: Predictor, signature: Signature) -> None:
        self._inner, self.signature = inner, signature
        self.methods, self.size, self.joins = inner.methods, inner.size, inner.joins

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return self._inner.tolerance

    def set_precision(self, precision: str) -> None:
        self._inner.set_precision(precision)

    def trials(self) -> list[tuple[contextlib.AbstractContextManager[Any], float]]:
        return self._inner.trials()

    def prepare(self, rows: Arrays | None, *, joins: bool) -> BatchPlan:
        return self._inner.prepare(None, joins=joins)


class _Renamed(_Wrapped):
    """The same inputs, in the same order."""

    def __init__(self, inner: Predictor, signature: Signature) -> None:
        super().__init__(inner, signature)
        self.calls = inner.calls

    def call(self, inputs: Arrays, method: str) -> Arrays:
        return self._inner.call(self._own(inputs), method)

    def begin(self, inputs: Arrays, method: str) -> PendingCall | None:
        return self._inner.begin(self._own(inputs), method)

    def attach(self, memories: Sequence[mmap.mmap]) -> None:
        self._inner.attach(memories)

    def prepare(self, rows: Arrays | None, *, joins: bool) -> BatchPlan:
        return self._inner.prepare(None if rows is None else self._own(rows), joins=joins)

    def _own(self, inputs: Arrays) -> Arrays:
        pairs = zip(self._inner.signature.inputs, self.signature.inputs, strict=True)
        return {own.name: inputs[spec.name] for own, spec in pairs}


class _Prepared(_Wrapped):
    """The columns of the data, before the estimator does something to them: text and lists, too."""

    def __init__(self, inner: Predictor, estimator: Estimator) -> None:
        self._preparer, self._layout = estimator._preparer(), estimator.signature["layout"] or {}
        inputs = tuple(
            _column(name, self._layout[name]) if self._layout.get(name) else TensorSpec(name, binary=True)
            for name in self._preparer.names
        )
        super().__init__(inner, Signature(inputs, inner.signature.outputs))
        # What a row is padded to, and what collate does, may depend on the other rows of a call.
        if estimator._prepare.collate is not None or estimator._prepare.pad is not None:
            self.joins = False

    def call(self, inputs: Arrays, method: str) -> Arrays:
        raw = {name: self._raw(name, array) for name, array in inputs.items()}
        made = self._preparer(raw, rows=rows_of(inputs), where=lambda row: row).features
        if self._inner.by_name:
            return self._inner.call(made, method)
        takes = self._inner.signature.inputs
        if len(takes) != len(made):
            raise ConfigError(
                f"the transform produces the inputs {list(made)},"
                f" but the model takes {[spec.name for spec in takes]}."
            )
        named = {spec.name: array for spec, array in zip(takes, made.values(), strict=True)}
        return self._inner.call(fit(self._inner.signature, named), method)

    def _raw(self, name: str, array: Array) -> Any:
        """A column as a spool would have it."""
        kind, shape = self._layout.get(name) or (None, None)
        if array.dtype.kind in "OUS":
            values = array.tolist()
            return [v.encode() if isinstance(v, str) else v for v in values] if kind == "bytes" else values
        if shape and shape[0] is None:
            offsets = np.arange(len(array) + 1, dtype=np.int64) * array.shape[1]
            flat = array.reshape(-1, *array.shape[2:])
            return Ragged(flat, offsets, kind=flat.dtype.name, inner=flat.shape[1:])
        return array


def _column(name: str, layout: tuple[str, Sequence[int | None]]) -> TensorSpec:
    """A column as the layout of the training data has it."""
    kind, shape = layout
    dtype = "object" if kind in ("str", "bytes") else str(kind)
    return TensorSpec(name, dtype, (None, *(n if n is None else int(n) for n in shape)), kind == "bytes")


def _renamed(spec: TensorSpec, name: str, layout: Mapping[str, Any]) -> TensorSpec:
    """An input of a model under the name of its column, with what the model itself does not say."""
    if name not in layout:
        return replace(spec, name=name)
    column = _column(name, layout[name])
    return replace(spec, name=name, dtype=spec.dtype or column.dtype, shape=spec.shape or column.shape)
