"""Tables of parts that are found by name, and whose code loads on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from kindler.errors import ConfigError, MissingExtraError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One backend.

    Attributes:
        name: What users write.
        target: Where its code is, as "module:attribute".
        package: The package that the code imports.
        extra: The pip extra of kindler that installs the package.
        preload: A function without arguments, as "module:attribute", that imports what is slow and starts no
            thread.
    """

    name: str
    target: str
    package: str = ""
    extra: str = ""
    preload: str = ""


S = TypeVar("S", bound=Spec)


class Registry(Generic[S]):
    """Rows by name; a missing package is answered with what to install.

    Rows of other distributions join through entry points, each of which names a `Spec`. They are looked up
    after the rows given here, so a built-in row cannot be replaced.

    Args:
        kind: What the rows are, for messages: "framework".
        specs: The rows.
        group: The group of entry points to look in, such as "kindler.frameworks"; "" for none.
    """

    def __init__(self, kind: str, specs: Iterable[S], *, group: str = "") -> None:
        self.kind, self.group = kind, group
        self._specs = {spec.name: spec for spec in specs}
        self._plugins: dict[str, S] = {}

    @property
    def built_in(self) -> tuple[S, ...]:
        """The rows given here, without those of entry points."""
        return tuple(self._specs.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rows, including installed entry points."""
        return tuple(dict.fromkeys([*self._specs, *sorted(entry.name for entry in self._entries())]))

    def spec(self, name: str) -> S:
        """The row of that name.

        Raises:
            ConfigError: There is none; the message lists the names and the closest one.
        """
        row = self._specs.get(name) or self._plugins.get(name) or self._from_entry_point(name)
        if row is not None:
            return row
        names = self.names
        near = did_you_mean(name, names)
        raise ConfigError(f"unknown {self.kind} {name!r}.{near} There are: {', '.join(names)}.")

    def load(self, name: str) -> Any:
        """Import the row's target.

        Raises:
            ConfigError: There is no such row.
            MissingExtraError: The package that its code needs is not installed.
        """
        spec = self.spec(name)
        module, _, attribute = spec.target.partition(":")
        what = f"{self.kind} {spec.name!r}"
        return getattr(imported(module, what=what, package=spec.package, extra=spec.extra), attribute)

    def _entries(self) -> Iterable[EntryPoint]:
        return entry_points(group=self.group) if self.group else ()

    def _from_entry_point(self, name: str) -> S | None:
        entry = next((entry for entry in self._entries() if entry.name == name), None)
        if entry is None:
            return None
        row = entry.load()
        if not isinstance(row, Spec) or row.name != name:
            raise ConfigError(
                f"the entry point {name!r} of {self.group!r} names {row!r} ({entry.value}).\n"
                f"Hint: it must name a kindler.registry.Spec whose name is {name!r}."
            )
        self._plugins[name] = cast(S, row)
        return self._plugins[name]


def imported(module: str, *, what: str, extra: str, package: str | None = None) -> Any:
    """A module of another package, or one that imports `package`.

    Raises:
        MissingExtraError: The package is not installed.
    """
    package = module.partition(".")[0] if package is None else package
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        # Any other missing module is a bug of that code, and says so itself.
        if not package or (exc.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(what=what, package=package, extra=extra) from exc
