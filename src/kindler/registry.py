"""Tables of parts that are found by name, and whose code loads on first use. Importing one loads no part."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kindler.errors import ConfigError, MissingExtraError

__all__ = ["Registry", "Spec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One backend.

    Attributes:
        name: What users write.
        target: Where its code is, as "module:attribute".
        package: The distribution that the code imports, as Python names it.
        extra: The pip extra of kindler that brings the package.
        preload: A function without arguments that imports what is slow and starts no thread, as
            "module:attribute".
    """

    name: str
    target: str
    package: str = ""
    extra: str = ""
    preload: str = ""


class Registry:
    """Rows by name; a missing package is answered with what to install.

    Args:
        kind: What the rows are, for messages: "framework".
        specs: The rows.
    """

    def __init__(self, kind: str, specs: Iterable[Spec]) -> None:
        self.kind = kind
        self._specs = {spec.name: spec for spec in specs}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rows."""
        return tuple(self._specs)

    def spec(self, name: str) -> Spec:
        """The row of that name.

        Raises:
            ConfigError: There is none; says which there are and which is nearest.
        """
        found = self._specs.get(name)
        if found is not None:
            return found
        near = difflib.get_close_matches(str(name), self._specs, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown {self.kind} {name!r}.{hint} There are: {', '.join(self._specs)}.")

    def load(self, name: str) -> Any:
        """What the row's target names, imported now.

        Raises:
            ConfigError: There is no such row.
            MissingExtraError: The package that its code needs is not installed.
        """
        spec = self.spec(name)
        return self._resolve(spec, spec.target)

    def preload(self, name: str) -> None:
        """Import what is slow to import, ahead of need."""
        spec = self.spec(name)
        if spec.preload:
            self._resolve(spec, spec.preload)()

    def _resolve(self, spec: Spec, target: str) -> Any:
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as exc:
            # Any other missing module is a bug of that code, and says so itself.
            if not spec.package or (exc.name or "").partition(".")[0] != spec.package:
                raise
            what = f"{self.kind} {spec.name!r}"
            raise MissingExtraError(what=what, package=spec.package, extra=spec.extra) from exc
