"""The shelf of datasets: tables, arrays, records, values, and functions that make them.

Most kinds consist of parts, so that rows can be appended without writing again what is there. A part is one
file, `part-00000.suffix` and on, in the order of the rows.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from kindler.errors import AlreadyExistsError, ConfigError
from kindler.models.code import FunctionKind
from kindler.models.kind import Handler
from kindler.shelves.shelf import Shelf
from kindler.store import Address, OvertakenError, Version
from kindler.store.names import Selector

Mode = Literal["fail", "replace", "append"]

_MODES = ("fail", "replace", "append")
_TRIES = 1000
P = TypeVar("P")


class Handle:
    """A dataset that is read on demand. Its files are kept until the handle is closed or no longer used.

    Attributes:
        version: The version that it reads.
        files: The files, verified and read-only. Paths are valid as long as the handle.
    """

    version: Any = None

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._finalizer: Callable[[], object] = lambda: None

    def _hold(self, version: Version, resources: ExitStack) -> Handle:
        self.version = version
        self._finalizer = weakref.finalize(self, resources.close)
        return self

    @property
    def value(self) -> Any:
        """The whole dataset, in the form in which it was put."""
        raise NotImplementedError

    def iterate(self, chunksize: int = 65_536) -> Iterator[Any]:
        """The same in pieces of `chunksize` rows."""
        if chunksize < 1:
            raise ConfigError(f"chunksize={chunksize}: must be at least 1.")
        return self._chunks(chunksize)

    def _chunks(self, size: int) -> Iterator[Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Release the files."""
        self._finalizer()

    def __len__(self) -> int:
        raise NotImplementedError

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<handle of {self.version}>"


class PartsHandler(Handler):
    """A kind whose datasets have parts; `write` makes the one that `part_name(0, suffix)` names."""

    def append_meta(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        """The metadata of both, one after the other; a DataError if they do not fit together."""
        raise NotImplementedError

    def conform(self, obj: Any, old: Mapping[str, Any]) -> Any:
        """The object in the form in which it can follow what is there."""
        return obj

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> Handle:
        """Look into the files; reading comes later."""
        raise NotImplementedError

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        return self.open(folder, meta, **options).value


class Datasets(Shelf):
    """Datasets, by name.

    pandas and Arrow tables and Spark DataFrames are Parquet files, numpy arrays .npy files,
    `tf.train.Example` records TFRecord files, and plain Python values JSON. A function is a virtual dataset:
    it is called when it is read.
    """

    shelf: ClassVar[str] = "datasets"

    def put(
        self,
        obj: Any,
        name: str,
        *,
        mode: Mode = "fail",
        attributes: Mapping[str, Any] | None = None,
        tag: str | Sequence[str] | None = None,
        kind: str | None = None,
        trusted: bool = False,
        **options: Any,
    ) -> Version:
        """Store a dataset; arguments that are not listed here are those of `Shelf.put`.

        Args:
            obj: The data, or the `Path` of a file that holds it.
            mode: What to do if the name exists: "fail", "replace" (a new version without the old rows) or
                "append" (a new version that adds these rows; existing rows are not written again). Earlier
                versions stay.

        Raises:
            AlreadyExistsError: The name exists, and `mode` is "fail".
            DataError: A value that cannot be stored, or rows that do not match the existing ones.
        """
        return self._put(
            obj, name, mode, attributes=attributes, tag=tag, kind=kind, trusted=trusted, **options
        )

    def _put(
        self,
        obj: Any,
        name: str,
        mode: Mode,
        *,
        attributes: Mapping[str, Any] | None = None,
        tag: str | Sequence[str] | None = None,
        kind: str | None = None,
        trusted: bool = False,
        replaces: int | None = None,
        **options: Any,
    ) -> Version:
        """See `put`; with `replaces`, raises OvertakenError unless that is the newest version (0: none)."""
        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r}: must be one of {', '.join(_MODES)}.")
        address = self._address(name)
        handler = self._handler(obj, kind, options)
        latest = None if mode == "replace" else self._latest(address, mode)
        if latest is not None:
            obj = _appendable(handler, latest).conform(obj, latest.meta)
        with self.store.stage() as folder:
            elsewhere = handler.write_blobs(obj, self.store)
            files, meta = elsewhere or ((), handler.write(obj, folder, trusted=trusted, **options))
            for _ in range(_TRIES):
                shared, joined = list(files), meta
                if latest is not None:
                    first = len(latest.files)
                    joined = _appendable(handler, latest).append_meta(latest.meta, meta)
                    _renumber(folder, first)
                    ours = (replace(f, path=_renumbered(f.path, first + i)) for i, f in enumerate(files))
                    shared = [*latest.files, *ours]
                try:
                    return self.store.publish(
                        address,
                        folder,
                        kind=handler.kind,
                        meta=joined,
                        attributes=attributes,
                        tags=tag,
                        shared=shared,
                        after=replaces if mode == "replace" else 0 if latest is None else latest.number,
                        grows=latest,
                    )
                except OvertakenError:
                    if mode == "replace":
                        raise
                    latest = self._latest(address, mode)  # another was quicker; its rows come before ours
        raise ConfigError(f"too many processes are appending to {name!r} at once.")

    def get(
        self,
        name: str,
        *,
        version: int | str | None = None,
        trusted: bool = False,
        local: str | os.PathLike[str] | None = None,
        lazy: bool = False,
        **options: Any,
    ) -> Any:
        """Read a dataset; arguments that are not listed here are those of `Shelf.get`.

        Args:
            trusted: Allow what runs stored code: functions and pickles.
            lazy: Read nothing yet; return a handle with `value`, `iterate(chunksize)`, `files` and a length.
            **options: For tables `columns`, a list of names; `filter`, a pyarrow expression or a dict such as
                `{"x__gt": 3}`, or keywords of that form; `as_`: "pandas", "arrow" or "spark" instead of the
                form in which it was put; and `spark`, the session for "spark". For a virtual dataset, the
                function's arguments.
        """
        stored = self.metadata(name, version=version)
        if local is not None:
            return self._read(stored, trusted, local, {})
        handler = self._kinds.handler(stored.kind)
        elsewhere = handler.read_blobs(stored, self.store, options)
        if elsewhere is not None:
            return elsewhere
        if isinstance(handler, FunctionKind) and not lazy:
            return self._read(stored, trusted, None, {})(**options)
        if not lazy:
            return self._read(stored, trusted, None, options)
        if not isinstance(handler, PartsHandler):
            raise ConfigError(f"{name!r} is of kind {stored.kind!r}, which cannot be read in pieces.")
        self._check_get(handler, options)
        with ExitStack() as resources:
            folder = resources.enter_context(self.store.files(stored))
            return handler.open(folder, stored.meta, **options)._hold(stored, resources.pop_all())

    def iterate(self, name: str, chunksize: int = 65_536, **options: Any) -> Iterator[Any]:
        """A dataset in pieces of `chunksize` rows, in the form in which it was put; `options` as in `get`."""
        with self.get(name, lazy=True, **options) as handle:
            yield from handle.iterate(chunksize)

    def _latest(self, address: Address, mode: Mode = "append") -> Version | None:
        latest = self.store.seek(self.bucket, self.shelf, Selector(address.name))
        if mode == "fail" and latest is not None:
            raise AlreadyExistsError(
                f"the dataset {address.name!r} already exists.\nHint: mode='replace' stores a new version,"
                f" mode='append' a new version with these rows appended.",
                name=address.name,
            )
        return latest


def _appendable(handler: Handler, latest: Version) -> PartsHandler:
    if handler.kind != latest.kind:
        raise ConfigError(
            f"{latest.name!r} is of kind {latest.kind!r}, but this is of kind {handler.kind!r}."
        )
    if not isinstance(handler, PartsHandler):
        raise ConfigError(f"cannot append to {latest.name!r}, which is of kind {latest.kind!r}.")
    return handler


def rechunk(
    pieces: Iterable[P], size: int, length: Callable[[P], int], cut: Callable[[P, int, int], P]
) -> Iterator[list[P]]:
    """Lists of pieces that have `size` rows together, of pieces of any length; the last may have fewer."""
    chunk: list[P] = []
    rows = 0
    for piece in pieces:
        at = 0
        while at < length(piece):
            part = cut(piece, at, at + size - rows)
            chunk, at, rows = [*chunk, part], at + length(part), rows + length(part)
            if rows == size:
                yield chunk
                chunk, rows = [], 0
    if chunk:
        yield chunk


def part_name(number: int, suffix: str) -> str:
    """The file of a part."""
    return f"part-{number:05d}{suffix}"


def parts_in(folder: Path) -> list[Path]:
    """The parts in a folder, in order."""
    return sorted(folder.glob("part-*"), key=lambda path: int(path.name.split(".")[0].removeprefix("part-")))


def _renumbered(path: str, number: int) -> str:
    return part_name(number, path[path.index(".") :])


def _renumber(folder: Path, first: int) -> None:
    """Let the parts begin with this number."""
    parts = parts_in(folder)
    # Away first: a new name may be the old one of another.
    aside = [path.rename(folder / f"aside-{i}") for i, path in enumerate(parts)]
    for i, (path, part) in enumerate(zip(aside, parts, strict=True)):
        path.rename(folder / _renumbered(part.name, first + i))
