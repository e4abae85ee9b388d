"""Models that are code: functions, and whatever can be pickled. Both are only for those who trust each other.

A function is stored by its import path, by its source, or pickled; read again, it is the function itself, and
who calls it is for the shelf to say. Nothing is imported or executed without `trusted`: which code runs would
otherwise be for whoever writes to the store to say.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import importlib
import inspect
import shutil
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from kindler.errors import ConfigError, UntrustedError
from kindler.models.kind import (
    LoadedModel,
    Meta,
    ModelKind,
    OwnMethods,
    confined,
    import_object,
    import_path,
    require_trust,
)
from kindler.models.predictor import CallablePredictor, Predictor, plain
from kindler.models.registry import MODEL_KINDS

PLAIN = "kindler_plain"  # an attribute that a decorator sets which returns the function as it is
_SOURCE, _FUNCTION, _OBJECT = "function.py", "function.pickle", "object.pickle"
_TORCH = (".pt", ".pth")


class FunctionKind(ModelKind):
    """Functions and classes that can be called."""

    kind = "function"
    needs_trust = True
    verbs = None

    def can(self, obj: Any) -> bool:
        return callable(obj) and not isinstance(obj, Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        marks = {"virtual": True} if getattr(obj, PLAIN, False) else {}
        if (path := import_path(obj)) is not None:
            return {"form": "import", "path": path, **marks}
        if (parts := _source(obj)) is not None:
            source, imports = parts
            (folder / _SOURCE).write_text(source, encoding="utf-8")
            return {"form": "source", "name": obj.__name__, "imports": imports, **marks}
        require_trust(
            trusted,
            what=f"the function {getattr(obj, '__qualname__', obj)!r}",
            reason="it cannot be imported, and it uses names that are defined outside its source, so it"
            " would be pickled",
        )
        (folder / _FUNCTION).write_bytes(cloudpickle.dumps(obj))
        return {"form": "pickle", **marks}

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        form = meta["form"]
        require_trust(trusted, what="a stored function", reason=f"it is code, stored by {form}")
        if form == "import":
            function = import_object(str(meta["path"]), what="the stored function")
            if not callable(function):
                raise ConfigError(f"{meta['path']!r} is not a function.")
            return function
        if form == "source":
            text = (folder / _SOURCE).read_text(encoding="utf-8")
            return _defined(text, str(meta["name"]), meta["imports"])
        if form == "pickle":
            return cloudpickle.loads((folder / _FUNCTION).read_bytes())
        raise UntrustedError(what="a stored function", reason=f"its form {form!r} is unknown")

    def predictor(self, model: Any) -> Predictor:
        return CallablePredictor(model)

    def settle(self, device: str, meta: Meta) -> None:
        """Its own code decides what it does with the GPU that it sees."""
        self.device = None if device == "auto" else device

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """The function gets the data, the verb, and labels by name."""
        x, *labels = data
        result = loaded.model(x, verb, **({"labels": labels[0]} if labels else {}), **options)
        if isinstance(result, Exception):  # omega|ml's way to fail
            raise result
        return plain(result)


def _source(obj: Any) -> tuple[str, dict[str, str]] | None:
    """The text of a plain function and the modules it names; None if that is not all it needs."""
    if not isinstance(obj, types.FunctionType) or obj.__name__ == "<lambda>" or obj.__closure__:
        return None
    try:
        source = textwrap.dedent(inspect.getsource(obj))
        used = inspect.getclosurevars(obj).globals
    except (OSError, TypeError, ValueError):
        return None
    if source.startswith("@") and getattr(obj, PLAIN, False):
        node = ast.parse(source).body[0]
        if isinstance(node, ast.FunctionDef) and len(node.decorator_list) == 1:
            source = "".join(source.splitlines(keepends=True)[node.lineno - 1 :])
    if source.startswith("@") or not all(isinstance(value, types.ModuleType) for value in used.values()):
        return None
    imports = {name: value.__name__ for name, value in used.items()}
    try:
        _defined(source, obj.__name__, imports)
    except Exception:  # noqa: BLE001  the text alone does not make the function, whatever the reason
        return None
    return source, imports


def _defined(source: str, name: str, imports: Mapping[str, str]) -> Any:
    names: dict[str, Any] = {"__name__": "kindler_stored", "__builtins__": builtins}
    names |= {alias: importlib.import_module(module) for alias, module in imports.items()}
    # Annotations stay text: what they name need not be there.
    exec(compile(source, "<stored function>", "exec", __future__.annotations.compiler_flag), names)
    return names[name]


class PickleKind(OwnMethods):
    """Any object; and `.pt`, `.pth`, `.pkl` and `.joblib` files, which are kept as they are."""

    kind = "pickle"
    needs_trust = True
    _inside: ModelKind | None = None

    def can(self, obj: Any) -> bool:
        return True

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        shown = f"the file {str(obj)!r}" if isinstance(obj, Path) else f"a {type(obj).__qualname__}"
        require_trust(trusted, what=shown, reason="it is a pickle, and reading a pickle can run any program")
        if isinstance(obj, Path):
            shutil.copyfile(obj, folder / f"object{obj.suffix}")
            return {"file": f"object{obj.suffix}"}
        try:
            (folder / _OBJECT).write_bytes(cloudpickle.dumps(obj))
        except Exception as exc:  # the object's own code says why it cannot be
            raise ConfigError(f"{shown} cannot be pickled: {exc!r}.") from exc
        return {"file": _OBJECT}

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        require_trust(trusted, what="a stored pickle", reason="reading a pickle can run any program")
        path = confined(folder, meta["file"])
        if path.suffix in _TORCH:
            import torch

            return torch.load(path, weights_only=False)
        if path.suffix == ".joblib":
            import joblib

            return joblib.load(path)
        return cloudpickle.loads(path.read_bytes())

    def predictor(self, model: Any) -> Predictor:
        """A pickled model of another kind predicts as that kind does, and where it was told to."""
        kind = MODEL_KINDS.kind_of(model)
        if not isinstance(kind, PickleKind):
            if self.device is not None:
                kind.settle(self.device, {})
                self._inside = kind
            return kind.predictor(model)
        if not callable(getattr(model, "predict", None)):
            raise ConfigError(f"a {type(model).__qualname__} cannot predict: it has no predict().")
        return CallablePredictor(model)

    def settle(self, device: str, meta: Meta) -> None:
        """What is in it is known once it was read; code of the user's own does as it likes."""
        self.device = None if device == "auto" else device

    def device_bytes(self, meta: Meta) -> int:
        return 0 if self._inside is None else self._inside.device_bytes({})

    def put_again(self, meta: Meta) -> dict[str, Any]:
        return {"kind": self.kind}
