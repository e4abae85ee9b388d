"""The table of kinds of models, and what such a table can do. Loads no framework.

The first row that takes an object stores it. A row whose framework is not loaded is passed over without
asking: an object of a framework cannot exist before it. Kinds of other packages, see `plugins.py`, are asked
after those of Kindler's own, and before those that take any object.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError, UntrustedError
from kindler.models import plugins
from kindler.models.kind import Handler, ModelKind
from kindler.registry import Registry, Spec

_MODELS = "models"
_CERTAIN = (types.FunctionType, types.BuiltinFunctionType, type)  # never a model of another package


@dataclass(frozen=True, slots=True)
class Row:
    """One kind.

    Attributes:
        name: Its name in the catalog.
        target: Where its code is, as "module:attribute" below `kindler`.
        shelves: The shelves that take it.
        loaded: Modules, of which one must be loaded for such an object to exist; none for plain Python.
        package: The distribution that the code imports, as Python names it.
        extra: The pip extra of kindler that brings the package.
        suffixes: Files that are taken as they are.
        holds: A folder that holds this file is taken as it is.
        family: What it computes with, if kinds share that; models of one family may share a process.
        takes_any: Whether it takes objects of any class, so that more exact kinds are asked first.
        preload: What a process imports ahead of need that will read such a model; may be forked afterwards.
        threads: Whether one call computes on several cores.
        gpus: Whether a model is put on a GPU where there is one; one that is code of the user's own is not.
        needs_jail: Whether files of strangers are read only by a process that is locked in: their formats
            are programs, or are parsed by code that is not known to stand lies.
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
    needs_jail: bool = True

    @property
    def spec(self) -> Spec:
        """The row as `Registry` has it."""
        return Spec(name=self.name, target=f"kindler.{self.target}", package=self.package, extra=self.extra)

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
        """Find what stores an object.

        Args:
            obj: The object, or the path of files that are one.
            shelf: Where it is to be stored.
            kind: The kind to store it as, if the caller knows better.

        Raises:
            ConfigError: Nothing does.
        """
        if isinstance(obj, Path) and not obj.exists():
            raise ConfigError(f"there is nothing at {str(obj)!r}.")
        handlers = self._asked(obj, shelf) if kind is None else self._named(obj, shelf, kind)
        for handler in handlers:
            if handler.can(obj):
                return handler
        shown = f"the path {str(obj)!r}" if isinstance(obj, Path) else f"a {type(obj).__qualname__}"
        wanted = f"as kind {kind!r}" if kind else f"among {shelf}"
        raise ConfigError(
            f"{shown} cannot be stored {wanted}.\nHint: {shelf} are of the kinds"
            f" {', '.join(self._names(shelf))}; trusted=True with kind='pickle' stores any object that can be"
            " pickled."
        )

    def handler(self, kind: str) -> Handler:
        """What reads and writes a kind.

        Raises:
            ConfigError: There is no such kind.
            MissingExtraError: What it needs is not installed.
        """
        if kind not in self._registry.names:
            plugin = plugins.load(kind)
            if plugin is not None:
                return plugin
        made: Handler = self._registry.load(kind)()
        return made

    def model_kind(self, kind: str) -> ModelKind:
        """The same of a kind of models.

        Raises:
            ConfigError: It is not one.
        """
        return _checked(self.handler(kind))

    def kind_of(self, model: Any) -> ModelKind:
        """The kind of a model in memory."""
        return _checked(self.taking(model, _MODELS))

    def family(self, kind: str, meta: Mapping[str, Any]) -> str:
        """What a stored model computes with. Loads nothing."""
        inside = _inside(kind, meta)
        families = {row.name: row.family for row in self.rows if row.family}
        return families.get(inside, inside)

    def row(self, kind: str, meta: Mapping[str, Any]) -> Row:
        """The row of a stored model, or of the model in an estimator. Loads nothing."""
        inside = _inside(kind, meta)
        return next((row for row in self.rows if row.name == inside), Row(inside, "", gpus=True))

    def locked_in(self, what: str, kind: str, meta: Mapping[str, Any], lacking: str | None) -> bool:
        """Whether a model of a stranger is read and called by a process that is locked in.

        Args:
            what: The version, for the message.
            kind: Its kind; what is inside an estimator decides.
            meta: Its metadata.
            lacking: Why processes cannot be locked in here; None if they can.

        Raises:
            UntrustedError: It would have to be, and that is not possible here.
        """
        row = self.row(kind, meta)
        if lacking is not None and row.needs_jail:
            raise UntrustedError(
                what=f"{what}, of kind {row.name!r},",
                reason=f"models of this kind need a process that is locked in, and here is none: {lacking}",
            )
        return lacking is None

    def _asked(self, obj: Any, shelf: str) -> Iterator[Handler]:
        rows = [row for row in self.rows if shelf in row.shelves and row.may_take(obj)]
        yield from (self.handler(row.name) for row in rows if not row.takes_any)
        if shelf == _MODELS and not isinstance(obj, _CERTAIN):
            plugin = plugins.taking(obj)
            if plugin is not None:
                yield plugin
        yield from (self.handler(row.name) for row in rows if row.takes_any)

    def _named(self, obj: Any, shelf: str, kind: str) -> list[Handler]:
        rows = {row.name: row for row in self.rows if shelf in row.shelves}
        if kind not in rows and kind not in self._names(shelf):
            raise ConfigError(f"kind={kind!r}: {shelf} are of the kinds {', '.join(self._names(shelf))}.")
        return [self.handler(kind)] if kind not in rows or rows[kind].may_take(obj) else []

    def _names(self, shelf: str) -> list[str]:
        own = [row.name for row in self.rows if shelf in row.shelves]
        return [*own, *(name for name in plugins.names() if name not in own)] if shelf == _MODELS else own


def _inside(kind: str, meta: Mapping[str, Any]) -> str:
    """The kind of the model in an estimator. Whatever else has such metadata is what its own kind says."""
    return str(meta.get("model_kind", kind)) if kind == "estimator" else kind


def _checked(found: Handler) -> ModelKind:
    if not isinstance(found, ModelKind):
        raise ConfigError(f"kind {found.kind!r} is not a kind of models.")
    return found


_ANYWHERE = (_MODELS, "datasets", "scripts")

MODEL_KINDS = Kinds(
    [
        Row("estimator", "models.estimator:EstimatorKind", loaded=("kindler.estimator.estimator",)),
        Row(
            "keras",
            "models.keras:KerasKind",
            loaded=("keras",),
            package="keras",
            extra="keras",
            suffixes=(".keras",),
            family="keras",
            preload=("kindler.models.keras", "kindler.frameworks.keras.replica:preload"),
            threads=True,
            gpus=True,
        ),
        Row(
            "tf_keras",
            "models.keras:TfKerasKind",
            loaded=("tf_keras",),
            package="tf_keras",
            extra="tf-keras",
            suffixes=(".keras",),
            family="keras",
            preload=("kindler.models.keras", "tf_keras"),
            threads=True,
            gpus=True,
        ),
        Row(
            "peft",
            "models.peft:PeftKind",
            loaded=("peft",),
            package="peft",
            extra="peft",
            preload=("kindler.models.peft", "peft"),
            threads=True,
        ),
        Row(
            "huggingface",
            "models.huggingface:HuggingFaceKind",
            loaded=("transformers.modeling_utils",),
            package="transformers",
            extra="huggingface",
            preload=("kindler.models.huggingface", "transformers.modeling_utils"),
            threads=True,
        ),
        Row(
            "torch",
            "models.torch:TorchKind",
            loaded=("torch",),
            package="torch",
            extra="torch",
            suffixes=(".pt2",),
            preload=("kindler.models.torch", "safetensors.torch"),
            threads=True,
            gpus=True,
            needs_jail=False,
        ),
        Row(
            "tf_graph",
            "models.tf_graph:GraphKind",
            loaded=("kindler.frameworks.tf_graph.spec",),
            package="tensorflow",
            extra="tensorflow",
            family="keras",
            preload=("kindler.models.tf_graph",),
            threads=True,
            gpus=True,
        ),
        Row(
            "sklearn",
            "models.sklearn:SklearnKind",
            loaded=("sklearn",),
            preload=("skops.io", "kindler.models.sklearn:preload"),
            needs_jail=False,
        ),
        Row(
            "savedmodel",
            "models.saved_model:SavedModelKind",
            holds="saved_model.pb",
            family="keras",
            preload=("kindler.models.saved_model", "tensorflow"),
            threads=True,
            gpus=True,
        ),
        Row(
            "onnx",
            "models.onnx:OnnxKind",
            loaded=("onnx",),
            suffixes=(".onnx",),
            preload=("kindler.models.onnx", "onnxruntime"),
            threads=True,
            gpus=True,
        ),
        Row(
            "openvino",
            "models.openvino:OpenvinoKind",
            loaded=("openvino",),
            suffixes=(".xml",),
            preload=("kindler.models.openvino",),
            threads=True,
        ),
        Row("function", "models.function:FunctionKind", _ANYWHERE, takes_any=True),
        Row(
            "pickle",
            "models.pickle:PickleKind",
            _ANYWHERE,
            suffixes=(".pt", ".pth", ".pkl", ".joblib"),
            takes_any=True,
        ),
    ]
)
