"""The table of kinds of models, and what such a table can do. Loads no framework.

The first row that takes an object stores it. A row whose framework is not loaded is passed over unseen: an
object of a framework cannot exist before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError
from kindler.models.kind import Handler
from kindler.registry import Registry, Spec

__all__ = ["MODEL_KINDS", "Kinds", "Row", "row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One kind.

    Attributes:
        spec: Its name, where its code is, and what that needs.
        shelves: The shelves that take it.
        loaded: Modules, of which one must be loaded for such an object to exist; none for plain Python.
        suffixes: Files that are taken as they are.
        holds: A folder that holds this file is taken as it is.
    """

    spec: Spec
    shelves: tuple[str, ...]
    loaded: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    holds: str = ""

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
        """What stores an object.

        Args:
            obj: The object, or the path of files that are one.
            shelf: Where it is to be stored.
            kind: The kind that it is to be stored as, if the caller knows better.

        Raises:
            ConfigError: Nothing does.
        """
        rows = [row for row in self.rows if shelf in row.shelves]
        names = [row.spec.name for row in rows]
        if kind is not None and kind not in names:
            raise ConfigError(f"kind={kind!r}: {shelf} are of the kinds {', '.join(names)}.")
        if isinstance(obj, Path) and not obj.exists():
            raise ConfigError(f"there is nothing at {str(obj)!r}.")
        for row in rows:
            if kind not in (None, row.spec.name) or not row.may_take(obj):
                continue
            handler = self.handler(row.spec.name)
            if handler.can(obj):
                return handler
        shown = f"the path {str(obj)!r}" if isinstance(obj, Path) else f"a {type(obj).__qualname__}"
        wanted = f"as kind {kind!r}" if kind else f"among {shelf}"
        raise ConfigError(
            f"{shown} cannot be stored {wanted}.\nHint: {shelf} are of the kinds {', '.join(names)};"
            " trusted=True with kind='pickle' stores any object that can be pickled."
        )

    def handler(self, kind: str) -> Handler:
        """What reads and writes a kind.

        Raises:
            ConfigError: There is no such kind.
            MissingExtraError: What it needs is not installed.
        """
        made: Handler = self._registry.load(kind)()
        return made


def row(
    name: str,
    target: str,
    *shelves: str,
    loaded: tuple[str, ...] = (),
    package: str = "",
    extra: str = "",
    suffixes: tuple[str, ...] = (),
    holds: str = "",
) -> Row:
    """A row: its name, its code as "module:attribute" below `kindler`, its shelves."""
    spec = Spec(name=name, target=f"kindler.{target}", package=package, extra=extra)
    return Row(spec=spec, shelves=shelves, loaded=loaded, suffixes=suffixes, holds=holds)


MODEL_KINDS = Kinds(
    [
        row(
            "estimator",
            "models.estimator:EstimatorHandler",
            "models",
            loaded=("kindler.estimator.estimator",),
        ),
        row(
            "keras",
            "models.keras:KerasHandler",
            "models",
            loaded=("keras",),
            package="keras",
            extra="keras",
            suffixes=(".keras",),
        ),
        row(
            "tf_keras",
            "models.keras:TfKerasHandler",
            "models",
            loaded=("tf_keras",),
            package="tf_keras",
            extra="tf-keras",
            suffixes=(".keras",),
        ),
        row(
            "torch",
            "models.torch:TorchHandler",
            "models",
            loaded=("torch",),
            package="torch",
            extra="torch",
            suffixes=(".pt2",),
        ),
        row(
            "sklearn",
            "models.sklearn:SklearnHandler",
            "models",
            loaded=("sklearn",),
        ),
        row("savedmodel", "models.saved_model:SavedModelHandler", "models", holds="saved_model.pb"),
        row("onnx", "models.onnx:OnnxHandler", "models", loaded=("onnx",), suffixes=(".onnx",)),
        row(
            "openvino", "models.openvino:OpenvinoHandler", "models", loaded=("openvino",), suffixes=(".xml",)
        ),
        row("function", "models.function:FunctionHandler", "models", "datasets", "scripts"),
        row(
            "pickle",
            "models.pickle:PickleHandler",
            "models",
            "datasets",
            "scripts",
            suffixes=(".pt", ".pth", ".pkl", ".joblib"),
        ),
    ]
)
