"""One package under two names: importing a module of the one gives that of the other."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["alias"]


def alias(name: str, target: str) -> None:
    """Let `name` and all modules in it be those of `target`.

    Args:
        name: The second name of a package.
        target: The package.
    """
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, target))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, target: str) -> None:
        self.name, self.target = name, target

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        real = self.target + fullname.removeprefix(self.name)
        found = importlib.util.find_spec(real)
        return None if found is None else ModuleSpec(fullname, _Loader(real), is_package=_holds_others(found))


class _Loader(Loader):
    """Gives the module itself, which keeps its own name and spec."""

    def __init__(self, real: str) -> None:
        self.real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _holds_others(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None
