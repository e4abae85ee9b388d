"""Datasets that consist of parts, so that more can be added without writing what is there again.

A part is one file, `part-00000.suffix` and on, in the order of the rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError
from kindler.models.kind import Handler


class Handle:
    """A dataset that is read when it is asked for. Its files stay until it is closed, or no longer used.

    Attributes:
        version: The version that it reads.
        files: The files, checked; to read, not to write. Paths are good as long as the handle is.
    """

    version: Any = None

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._finalizer: Callable[[], object] = lambda: None

    def hold(self, version: Any, resources: ExitStack) -> Handle:
        """Close the resources with the handle."""
        self.version = version
        self._finalizer = weakref.finalize(self, resources.close)
        return self

    @property
    def value(self) -> Any:
        """All of it, as what was put."""
        raise NotImplementedError

    def iterate(self, chunksize: int = 65_536) -> Iterator[Any]:
        """The same, in pieces of `chunksize` rows."""
        if chunksize < 1:
            raise ConfigError(f"chunksize={chunksize}: must be at least 1.")
        return self._chunks(chunksize)

    def _chunks(self, size: int) -> Iterator[Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Let the files go."""
        self._finalizer()

    def __len__(self) -> int:
        raise NotImplementedError

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<handle of {self.version}>"


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

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> Handle:
        """Look into the files; reading comes later."""
        raise NotImplementedError

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        return self.open(folder, meta, **options).value


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
