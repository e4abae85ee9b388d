"""Functions: by import path, by source, or pickled. Read, they are functions: datasets call them at once.

Nothing is imported or executed without `trusted`: which code runs would otherwise be for whoever writes to
the store to say.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from kindler.errors import ConfigError, UntrustedError
from kindler.models.kind import ModelKind, require_trust
from kindler.models.predictor import CallablePredictor, Predictor, plain

if TYPE_CHECKING:
    from kindler.models.loaded import LoadedModel

PLAIN = "kindler_plain"  # an attribute that a decorator sets which returns the function as it is
_SOURCE, _PICKLE = "function.py", "function.pickle"


class FunctionKind(ModelKind):
    """Functions and classes that can be called."""

    kind: ClassVar[str] = "function"
    needs_trust: ClassVar[bool] = True
    verbs: ClassVar[tuple[str, ...] | None] = None

    def can(self, obj: Any) -> bool:
        return callable(obj) and not isinstance(obj, Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        marks = {"virtual": True} if getattr(obj, PLAIN, False) else {}
        return self._written(obj, folder, trusted=trusted) | marks

    def _written(self, obj: Any, folder: Path, *, trusted: bool) -> dict[str, Any]:
        path = _import_path(obj)
        if path is not None:
            return {"form": "import", "path": path}
        parts = _source(obj)
        if parts is not None:
            source, imports = parts
            (folder / _SOURCE).write_text(source, encoding="utf-8")
            return {"form": "source", "name": obj.__name__, "imports": imports}
        require_trust(
            trusted,
            what=f"the function {getattr(obj, '__qualname__', obj)!r}",
            reason="it cannot be imported, and it uses names from around it, which its source alone does not"
            " have, so it would be pickled",
        )
        (folder / _PICKLE).write_bytes(cloudpickle.dumps(obj))
        return {"form": "pickle"}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """Return the function itself; who calls it is for the shelf to say."""
        form = meta["form"]
        require_trust(trusted, what="a stored function", reason=f"it is code, stored by {form}")
        if form == "import":
            return _imported(str(meta["path"]))
        if form == "source":
            text = (folder / _SOURCE).read_text(encoding="utf-8")
            return _defined(text, str(meta["name"]), meta["imports"])
        if form == "pickle":
            return cloudpickle.loads((folder / _PICKLE).read_bytes())
        raise UntrustedError(what="a stored function", reason=f"its form {form!r} is not known")

    def predictor(self, model: Any) -> Predictor:
        return CallablePredictor(model)

    def settle(self, device: str, meta: Mapping[str, Any]) -> None:
        """Its own code decides what it does with the GPU that it sees."""
        self.device = None if device == "auto" else device

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """The function gets the data, the verb, and labels by name."""
        x, *labels = data
        result = loaded.model(x, verb, **({"labels": labels[0]} if labels else {}), **options)
        if isinstance(result, Exception):  # omega|ml's way to fail
            raise result
        return plain(result)


def _undecorated(source: str) -> str:
    """The text of a function without its one decorator."""
    node = ast.parse(source).body[0]
    one = isinstance(node, ast.FunctionDef) and len(node.decorator_list) == 1
    return "".join(source.splitlines(keepends=True)[node.lineno - 1 :]) if one else source


def _defined(source: str, name: str, imports: Mapping[str, str]) -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "kindler_stored", "__builtins__": builtins}
    names |= {alias: importlib.import_module(module) for alias, module in imports.items()}
    # Annotations stay text: what they name need not be there.
    exec(compile(source, "<stored function>", "exec", __future__.annotations.compiler_flag), names)
    made: Callable[..., Any] = names[name]
    return made


def _import_path(obj: Any) -> str | None:
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module in (None, "__main__", "builtins") or name is None or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is obj else None


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"the stored function {path!r} cannot be imported here: {exc}.") from exc
    if not callable(found):
        raise ConfigError(f"{path!r} is not a function.")
    checked: Callable[..., Any] = found
    return checked


def _source(obj: Any) -> tuple[str, dict[str, str]] | None:
    """The text of a plain function and the modules it names; None if that is not all it needs."""
    if not isinstance(obj, types.FunctionType) or obj.__name__ == "<lambda>" or obj.__closure__:
        return None
    try:
        source = textwrap.dedent(inspect.getsource(obj))
        used = inspect.getclosurevars(obj).globals
    except (OSError, TypeError, ValueError):
        return None
    if source.startswith("@"):
        source = _undecorated(source) if getattr(obj, PLAIN, False) else source
    if source.startswith("@") or not all(isinstance(value, types.ModuleType) for value in used.values()):
        return None
    imports = {name: value.__name__ for name, value in used.items()}
    try:
        _defined(source, obj.__name__, imports)
    except Exception:  # noqa: BLE001  the text alone does not make the function, whatever the reason
        return None
    return source, imports
