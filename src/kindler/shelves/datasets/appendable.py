"""Datasets that consist of parts, so that more can be added without writing what is there again.

A part is one file, `part-00000.suffix` and on, in the order of the rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from kindler.models.kind import Handler


class Opened(Protocol):
    """The files of a dataset, looked into but not read."""

    @property
    def files(self) -> Sequence[Path]:
        """The parts, in order."""

    @property
    def value(self) -> Any:
        """All of it, as what was put."""

    def chunks(self, size: int) -> Iterator[Any]:
        """The same, in pieces of so many rows."""

    def __len__(self) -> int: ...


class Parts(Handler):
    """A kind whose datasets have parts.

    `write` has one more argument, `part`: the number of the first part that it writes.
    """

    def joined(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        """What `read` must know of both, one after the other.

        Raises:
            DataError: They do not fit together.
        """
        raise NotImplementedError

    def fitted(self, obj: Any, old: Mapping[str, Any]) -> Any:
        """The object in the form in which it can follow what is there."""
        return obj

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> Opened:
        """Look into the files; reading comes later."""
        raise NotImplementedError

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        return self.open(folder, meta, **options).value


class Handle:
    """A dataset that is read when it is asked for. Its files stay until it is closed, or no longer used.

    Attributes:
        version: The version that it reads.
    """

    def __init__(self, version: Any, opened: Opened, resources: ExitStack) -> None:
        self.version = version
        self._opened = opened
        self._finalizer = weakref.finalize(self, resources.close)

    @property
    def files(self) -> list[Path]:
        """The files, checked; to read, not to write. Paths are good as long as the handle is."""
        return list(self._opened.files)

    @property
    def value(self) -> Any:
        """All of it, as what was put."""
        return self._opened.value

    def iterate(self, chunksize: int = 65_536) -> Iterator[Any]:
        """The same, in pieces of so many rows."""
        return self._opened.chunks(chunksize)

    def close(self) -> None:
        """Let the files go."""
        self._finalizer()

    def __len__(self) -> int:
        return len(self._opened)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<handle of {self.version}>"


def part_name(number: int, suffix: str) -> str:
    """The file of a part."""
    return f"part-{number:05d}{suffix}"


def parts_in(folder: Path) -> list[Path]:
    """The parts in a folder, in order."""
    return sorted(folder.glob("part-*"), key=lambda path: int(path.name.split(".")[0].removeprefix("part-")))


def renumbered(path: str, number: int) -> str:
    """The file of a part, with another number."""
    return part_name(number, path[path.index(".") :])


def renumber(folder: Path, first: int) -> None:
    """Let the parts begin with this number."""
    parts = parts_in(folder)
    names = [renumbered(path.name, first + i) for i, path in enumerate(parts)]
    # Away first: a new name may be the old one of another.
    aside = [path.rename(folder / f"aside-{i}") for i, path in enumerate(parts)]
    for path, name in zip(aside, names, strict=True):
        path.rename(folder / name)
