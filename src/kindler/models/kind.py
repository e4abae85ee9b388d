"""What a kind of object must be able to do to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import ConfigError, UntrustedError
from kindler.store import File, Store, Version
from kindler.store.names import check_path

__all__ = ["Handler", "confined", "known_only", "require_trust"]


class Handler:
    """Makes files of objects of one kind, and objects of the files.

    Without `trusted`, neither way runs code that came with the object or the files.

    Attributes:
        kind: Its name in the catalog.
        put_options: The arguments of `put` that it knows besides those of all kinds.
        get_options: The same of `get`.
        takes_any: Whether it takes all other arguments of `get` as well.
    """

    kind: ClassVar[str]
    put_options: ClassVar[frozenset[str]] = frozenset()
    get_options: ClassVar[frozenset[str]] = frozenset()
    takes_any: ClassVar[bool] = False

    def can(self, obj: Any) -> bool:
        """Whether the object is of this kind."""
        raise NotImplementedError

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """Write the object's files into an empty folder; returns what `read` must know, as JSON has it."""
        raise NotImplementedError

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """The object again. The folder is gone afterwards, and nothing in it may be changed."""
        raise NotImplementedError

    def located(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Path:
        """Of kinds that are files: the one that their own runtime loads, looked through whoever stored it.

        Raises:
            ConfigError: It is not a file of the version, or the kind is not files.
            UntrustedError: Loading it would read other files, or run code.
        """
        raise ConfigError(f"a model of kind {self.kind!r} is read, and not loaded from a file.")

    def write_blobs(self, obj: Any, store: Store) -> tuple[list[File], dict[str, Any]] | None:
        """Write blobs elsewhere, as Spark's tasks do; None if `write` is to write files here."""
        return None

    def read_blobs(self, version: Version, store: Store, options: Mapping[str, Any]) -> Any:
        """What reads blobs elsewhere, as a frame of Spark's does; None if `read` is to read files here."""
        return None


def confined(folder: Path, name: object) -> Path:
    """A file of a version that its metadata names.

    Raises:
        ConfigError: There is none of that name in the folder, or it leads elsewhere.
    """
    path = folder / check_path(name)
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"the version has no file {name!r}.")
    return path


def known_only(given: Mapping[str, Any], known: frozenset[str], *, what: str) -> dict[str, Any]:
    """The arguments, if all are known.

    Raises:
        ConfigError: Some are not.
    """
    unknown = sorted(set(given) - known)
    if unknown:
        there = f"there are {', '.join(sorted(known))}" if known else "there are none"
        raise ConfigError(f"{what} does not know {', '.join(unknown)}; {there}.")
    return dict(given)


def require_trust(trusted: bool, *, what: str, reason: str) -> None:
    """Refuse what could run the code of others, unless the caller trusts it.

    Raises:
        UntrustedError: The caller does not.
    """
    if not trusted:
        raise UntrustedError(what=what, reason=reason)
