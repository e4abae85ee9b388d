"""The table of kinds of models, and what such a table can do. Loads no framework.

The first row that takes an object stores it. A row whose framework is not loaded is passed over without
asking: an object of a framework cannot exist before it.

Kinds of other packages are entry points, named as the kind: of the group `kindler.models`, a subclass of
`ModelKind`, loaded when no kind of Kindler's own takes an object; or of `kindler.model_rows`, a `Row`, which
says as much as those of Kindler's own. They are asked before those that take any object.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError, UntrustedError, first_line
from kindler.models.kind import Handler, ModelKind
from kindler.registry import Registry, Spec

GROUP, ROWS = "kindler.models", "kindler.model_rows"

_MODELS = "models"
_CERTAIN = (types.FunctionType, types.BuiltinFunctionType, type)  # never a model of another package
_log = logging.getLogger("kindler.models")


@dataclass(frozen=True, slots=True)
class Row:
    """One kind.

    Attributes:
        name: Its name in the catalog.
        target: Where its code is, as "module:attribute".
        shelves: The shelves that take it.
        loaded: Modules, one of which must be loaded for such an object to exist; empty for plain Python.
        extra: The pip extra of kindler that brings what the code imports.
        package: That package, if it is not the one of `loaded`.
        suffixes: Suffixes of files that are stored unchanged.
        holds: A folder that contains this file is stored unchanged.
        family: The framework, if kinds share one; models of one family may share a process.
        takes_any: Whether it takes objects of any class; more specific kinds are asked first.
        preload: What a process that will read such a model imports in advance; it may be forked afterwards.
        threads: Whether one call uses several cores.
        gpus: Whether a model is moved to a GPU if there is one; a model that is the user's own code is not.
        needs_sandbox: Whether untrusted files are read only by a sandboxed process: their formats are
            programs, or are parsed by code that is not known to withstand malicious input.
    """

    name: str
    target: str
    shelves: tuple[str, ...] = ("models",)
    _: KW_ONLY
    loaded: tuple[str, ...] = ()
    package: str = ""
    extra: str = ""
    suffixes: tuple[str, ...] = ()
    holds: str = ""
    family: str = ""
    takes_any: bool = False
    preload: tuple[str, ...] = ()
    threads: bool = False
    gpus: bool = False
    needs_sandbox: bool = True

    @property
    def spec(self) -> Spec:
        """The row as `Registry` has it."""
        package = self.package or ("".join(self.loaded[:1]).partition(".")[0] if self.extra else "")
        return Spec(name=self.name, target=self.target, package=package, extra=self.extra)

    def may_take(self, obj: Any) -> bool:
        """Whether it is worth asking the code."""
        if isinstance(obj, Path):
            return obj.suffix.lower() in self.suffixes or bool(self.holds and (obj / self.holds).is_file())
        return not self.loaded or any(name in sys.modules for name in self.loaded)


class Kinds:
    """The rows, in the order in which they are asked."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)
        self._registry = Registry("kind", [row.spec for row in self.rows])

    def taking(self, obj: Any, shelf: str, kind: str | None = None) -> Handler:
        """Find what stores an object."""
        if isinstance(obj, Path) and not obj.exists():
            raise ConfigError(f"{str(obj)!r} does not exist.")
        for handler in self._asked(obj, shelf) if kind is None else self._named(obj, shelf, kind):
            if handler.can(obj):
                return handler
        shown = f"the path {str(obj)!r}" if isinstance(obj, Path) else f"a {type(obj).__qualname__}"
        wanted = f"as kind {kind!r}" if kind else f"among {shelf}"
        raise ConfigError(
            f"{shown} cannot be stored {wanted}.\nHint: the kinds of {shelf} are"
            f" {', '.join(self._names(shelf))}; trusted=True with kind='pickle' stores any object that can be"
            " pickled."
        )

    def _asked(self, obj: Any, shelf: str) -> Iterator[Handler]:
        rows = [row for row in self.rows if shelf in row.shelves and row.may_take(obj)]
        yield from (self.handler(row.name) for row in rows if not row.takes_any)
        if shelf == _MODELS and not isinstance(obj, _CERTAIN):
            yield from _plugins_for(obj)
        yield from (self.handler(row.name) for row in rows if row.takes_any)

    def _named(self, obj: Any, shelf: str, kind: str) -> list[Handler]:
        own = next((row for row in self.rows if row.name == kind and shelf in row.shelves), None)
        if own is None and kind not in self._names(shelf):
            raise ConfigError(f"kind={kind!r}: the kinds of {shelf} are {', '.join(self._names(shelf))}.")
        return [self.handler(kind)] if own is None or own.may_take(obj) else []

    def _names(self, shelf: str) -> list[str]:
        own = [row.name for row in self.rows if shelf in row.shelves]
        return [*own, *(name for name in _plugin_names() if name not in own)] if shelf == _MODELS else own

    def handler(self, kind: str) -> Handler:
        """What reads and writes a kind."""
        other = None if kind in self._registry.names else _plugin(kind)
        handler: Handler = other or self._registry.load(kind)()
        return handler

    def model_kind(self, kind: str) -> ModelKind:
        """The same of a kind of models."""
        return _checked(self.handler(kind))

    def kind_of(self, model: Any) -> ModelKind:
        """The kind of a model in memory."""
        return _checked(self.taking(model, _MODELS))

    def family(self, kind: str, meta: Mapping[str, Any]) -> str:
        """What a stored model computes with. Loads nothing."""
        row = self.row(kind, meta)
        return row.family or row.name

    def row(self, kind: str, meta: Mapping[str, Any]) -> Row:
        """The row of a stored model, or of the model in an estimator. Loads nothing."""
        if kind == "estimator":  # whatever else has such metadata is what its own kind says
            kind = str(meta.get("model_kind", kind))
        own = next((row for row in self.rows if row.name == kind), None)
        return own or _plugin_row(kind) or Row(kind, "", gpus=True)

    def sandboxed(self, what: str, kind: str, meta: Mapping[str, Any], lacking: str | None) -> bool:
        """Whether an untrusted model is read and called by a sandboxed process; for an estimator, the kind of
        the model in it decides. `lacking` is why processes cannot be sandboxed here.

        Raises:
            UntrustedError: A sandbox is required, but not available here.
        """
        row = self.row(kind, meta)
        if lacking is not None and row.needs_sandbox:
            raise UntrustedError(
                what=f"{what}, of kind {row.name!r},",
                reason="models of this kind require a sandboxed process, which this host does not support:"
                f" {lacking}",
            )
        return lacking is None


def _checked(handler: Handler) -> ModelKind:
    if not isinstance(handler, ModelKind):
        raise ConfigError(f"kind {handler.kind!r} is not a kind of model.")
    return handler


def _plugin_names() -> list[str]:
    return sorted({entry.name for group in (GROUP, ROWS) for entry in entry_points(group=group)})


@cache
def _plugin_row(kind: str) -> Row | None:
    for entry in entry_points(group=ROWS, name=kind):
        row = entry.load()
        if isinstance(row, Row) and row.name == kind:
            return row
        raise ConfigError(
            f"the entry point {kind!r} of {ROWS} ({entry.value}) is not a Row whose name is {kind!r}."
        )
    return None


def _plugins_for(obj: Any) -> Iterator[ModelKind]:
    """Kinds of other packages that may take an object. What cannot be loaded is left out, with a warning."""
    for name in _plugin_names():
        try:
            row = _plugin_row(name)
            kind = _plugin(name) if row is None or row.may_take(obj) else None
        except ConfigError as exc:
            _log.warning("%s", exc)
            continue
        if kind is not None:
            yield kind


def _plugin(kind: str) -> ModelKind | None:
    """The kind of another package; None if no installed package has it."""
    row = _plugin_row(kind)
    if row is not None:
        return _checked(Registry("kind", [row.spec]).load(kind)())
    for entry in entry_points(group=GROUP, name=kind):
        try:
            cls = entry.load()
        except Exception as exc:  # code of the other package: it says why
            raise ConfigError(
                f"the model kind {kind!r} ({entry.value}) cannot be loaded: {first_line(exc)}"
            ) from exc
        if not (isinstance(cls, type) and issubclass(cls, ModelKind) and cls.kind == kind):
            raise ConfigError(
                f"the entry point {kind!r} of {GROUP} ({entry.value}) is not a subclass of ModelKind whose"
                f" kind is {kind!r}."
            )
        return cls()
    return None


_ANYWHERE = (_MODELS, "datasets", "scripts")

MODEL_KINDS = Kinds(
    [
        Row("estimator", "kindler.models.estimator:EstimatorKind", loaded=("kindler.estimator.estimator",)),
        Row(
            "keras",
            "kindler.models.keras:KerasKind",
            loaded=("keras",),
            extra="keras",
            suffixes=(".keras",),
            family="keras",
            preload=("kindler.models.keras", "kindler.frameworks.keras.replica:preload"),
            threads=True,
            gpus=True,
        ),
        Row(
            "tf_keras",
            "kindler.models.keras:TfKerasKind",
            loaded=("tf_keras",),
            extra="tf-keras",
            suffixes=(".keras",),
            family="keras",
            preload=("kindler.models.keras", "tf_keras"),
            threads=True,
            gpus=True,
        ),
        Row(
            "peft",
            "kindler.models.huggingface:PeftKind",
            loaded=("peft",),
            extra="peft",
            preload=("kindler.models.huggingface", "peft"),
            threads=True,
            gpus=True,
        ),
        Row(
            "huggingface",
            "kindler.models.huggingface:HuggingFaceKind",
            loaded=("transformers.modeling_utils",),
            extra="huggingface",
            preload=("kindler.models.huggingface", "transformers.modeling_utils"),
            threads=True,
            gpus=True,
        ),
        Row(
            "torch",
            "kindler.models.torch:TorchKind",
            loaded=("torch",),
            extra="torch",
            suffixes=(".pt2",),
            preload=("kindler.models.torch", "safetensors.torch"),
            threads=True,
            gpus=True,
            needs_sandbox=False,
        ),
        Row(
            "sklearn",
            "kindler.models.sklearn:SklearnKind",
            loaded=("sklearn",),
            preload=("skops.io", "kindler.models.sklearn:preload"),
            needs_sandbox=False,
        ),
        Row(
            "savedmodel",
            "kindler.models.saved_model:SavedModelKind",
            holds="saved_model.pb",
            family="keras",
            preload=("kindler.models.saved_model", "tensorflow"),
            threads=True,
            gpus=True,
        ),
        Row(
            "onnx",
            "kindler.models.onnx:OnnxKind",
            loaded=("onnx",),
            suffixes=(".onnx",),
            preload=("kindler.models.onnx", "onnxruntime"),
            threads=True,
            gpus=True,
        ),
        Row(
            "openvino",
            "kindler.models.openvino:OpenvinoKind",
            loaded=("openvino",),
            suffixes=(".xml",),
            preload=("kindler.models.openvino",),
            threads=True,
        ),
        Row("function", "kindler.models.code:FunctionKind", _ANYWHERE, takes_any=True),
        Row(
            "pickle",
            "kindler.models.code:PickleKind",
            _ANYWHERE,
            suffixes=(".pt", ".pth", ".pkl", ".joblib"),
            takes_any=True,
        ),
    ]
)
