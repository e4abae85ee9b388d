"""The shelf of datasets: tables, arrays, records, values, and functions that make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Literal

from kindler.errors import AlreadyExistsError, ConfigError
from kindler.models.function import FunctionKind
from kindler.models.kind import Handler, known_only
from kindler.shelves.datasets.appendable import Parts, renumber, renumbered
from kindler.shelves.shelf import Shelf, listed
from kindler.store import Address, Version
from kindler.store.selectors import parse

Mode = Literal["fail", "replace", "append"]

_MODES = ("fail", "replace", "append")
_TRIES = 1000


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
        """Store a dataset.

        Args:
            obj: The data; or a `Path` of a file of it.
            name: The name, without a version.
            mode: What to do if the name is there: "fail", "replace" (a new version without the old rows) or
                "append" (a new version with them; what is there is not written again). Earlier versions stay.
            attributes: What to remember of it; anything that JSON has.
            tag: A tag, or several, that move to the new version.
            kind: What to store it as, where several kinds could.
            trusted: Allow functions and objects that can only be pickled. The reader must too.
            **options: What only some kinds know.

        Raises:
            AlreadyExistsError: The name is there, and `mode` is "fail".
            DataError: A value that cannot be stored, or rows that do not fit those that are there.
        """
        return self._put(
            obj, name, mode=mode, attributes=attributes, tag=tag, kind=kind, trusted=trusted, **options
        )

    def _put(
        self,
        obj: Any,
        name: str,
        *,
        mode: Mode,
        attributes: Mapping[str, Any] | None = None,
        tag: str | Sequence[str] | None = None,
        kind: str | None = None,
        trusted: bool = False,
        replaces: int | None = None,
        **options: Any,
    ) -> Version:
        """See `put`; with `replaces`, raises OvertakenError unless that is the newest version (0: none)."""
        from kindler.store.catalog import OvertakenError

        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r}: there are {', '.join(_MODES)}.")
        address = self._address(name)
        handler = self._kinds.taking(obj, self.shelf, kind)
        known_only(options, handler.put_options, what=f"put of kind {handler.kind!r}")
        latest = None if mode == "replace" else self._latest(address, mode)
        if latest is not None:
            obj = _appendable(handler, latest).fitted(obj, latest.meta)
        with self.store.stage() as folder:
            elsewhere = handler.write_blobs(obj, self.store)
            files, meta = elsewhere or ((), handler.write(obj, folder, trusted=trusted, **options))
            for _ in range(_TRIES):
                shared, joined = list(files), meta
                if latest is not None:
                    first = len(latest.files)
                    joined = _appendable(handler, latest).joined(latest.meta, meta)
                    renumber(folder, first)
                    shared = [
                        *latest.files,
                        *(replace(f, path=renumbered(f.path, first + i)) for i, f in enumerate(files)),
                    ]
                try:
                    return self.store.publish(
                        address,
                        folder,
                        kind=handler.kind,
                        meta=joined,
                        attributes=attributes,
                        tags=listed(tag),
                        shared=shared,
                        after=replaces if mode == "replace" else 0 if latest is None else latest.number,
                        grows=latest,
                    )
                except OvertakenError:
                    if mode == "replace":
                        raise
                    latest = self._latest(address, mode)  # another was quicker; its rows come before ours
        raise ConfigError(f"{name!r} is being written to by too many at once.")

    def get(
        self,
        name: str,
        *,
        version: int | str | None = None,
        trusted: bool = False,
        local: Any = None,
        lazy: bool = False,
        **options: Any,
    ) -> Any:
        """Read a dataset.

        Args:
            name: The name, which may say which version.
            version: A number or a tag, instead.
            trusted: Allow what runs code that was stored: functions and pickles.
            local: Copy the version's files into this folder, which must not be there, and return the folder.
            lazy: Read nothing yet: a handle with `value`, `iterate(chunksize)`, `files` and a length.
            **options: For tables `columns`, a list of names; `filter`, a pyarrow expression or a dict such as
                `{"x__gt": 3}`, or such keywords; `as_`, "pandas", "arrow" or "spark" if not as it was put;
                and `spark`, the session for the last. For a virtual dataset the function's arguments.

        Raises:
            NotFoundError: There is no such name or version.
            UntrustedError: Reading it would run code, and `trusted` was not given.
            DamagedError: The stored bytes are not those that were stored.
        """
        stored = self.metadata(name, version=version)
        handler = self._kinds.handler(stored.kind)
        elsewhere = handler.read_blobs(stored, self.store, options) if local is None else None
        if elsewhere is not None:
            return elsewhere
        if isinstance(handler, FunctionKind) and local is None and not lazy:
            return super().get(str(stored), trusted=trusted)(**options)
        if not lazy:
            return super().get(str(stored), trusted=trusted, local=local, **options)
        if not isinstance(handler, Parts):
            raise ConfigError(f"{name!r} is of kind {stored.kind!r}, which is read at once.")
        self._check_get(handler, options)
        with ExitStack() as resources:
            folder = resources.enter_context(self.store.files(stored))
            return handler.open(folder, stored.meta, **options).hold(stored, resources.pop_all())

    def iterate(self, name: str, chunksize: int = 65_536, **options: Any) -> Iterator[Any]:
        """A dataset in pieces of `chunksize` rows, as what was put; `options` as in `get`."""
        with self.get(name, lazy=True, **options) as handle:
            yield from handle.iterate(chunksize)

    def _latest(self, address: Address, mode: Mode = "append") -> Version | None:
        latest = self.store.seek(self.bucket, self.shelf, parse(address.name))
        if mode == "fail" and latest is not None:
            raise AlreadyExistsError(
                f"the dataset {address.name!r} already exists.\nHint: mode='replace' makes a new version of"
                " it, mode='append' one with these rows after the others.",
                name=address.name,
            )
        return latest


def _appendable(handler: Handler, latest: Version) -> Parts:
    if handler.kind != latest.kind:
        raise ConfigError(f"{latest.name!r} is of kind {latest.kind!r}, and this of kind {handler.kind!r}.")
    if not isinstance(handler, Parts):
        raise ConfigError(f"nothing can be appended to {latest.name!r}, which is of kind {latest.kind!r}.")
    return handler
