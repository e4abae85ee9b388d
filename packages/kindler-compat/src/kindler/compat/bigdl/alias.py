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

_TARGETS: dict[str, str] = {}


def alias(name: str, target: str) -> None:
    """Let `name` and all modules in it be those of `target`."""
    _TARGETS[name] = target
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        name = fullname
        while name not in _TARGETS:
            name, _, last = name.rpartition(".")
            if not last:
                return None
        real = _TARGETS[name] + fullname.removeprefix(name)
        spec = importlib.util.find_spec(real)
        if spec is None:
            return None
        return ModuleSpec(fullname, _Loader(real), is_package=spec.submodule_search_locations is not None)


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
