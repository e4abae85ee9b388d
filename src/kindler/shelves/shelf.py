"""A shelf: the verbs for the names of one kind of thing in one bucket.

How objects become files is for the kinds' handlers, where the files lie for the store.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import AlreadyExistsError, ConfigError
from kindler.models.kind import Handler, reject_unknown
from kindler.models.registry import MODEL_KINDS, Kinds, Row
from kindler.store import Address, Version, VersionStore, archive
from kindler.store.names import check_bucket, parse_selector


def _row(kind: str, handler: str, loaded: tuple[str, ...] = (), suffixes: tuple[str, ...] = ()) -> Row:
    return Row(kind, f"kindler.shelves.{handler}", ("datasets",), loaded=loaded, suffixes=suffixes)


# Everything that can be stored. No framework is loaded for it.
KINDS = Kinds(
    [
        _row("parquet", "tables:ParquetHandler", ("pandas", "pyarrow", "pyspark"), (".parquet",)),
        _row("numpy", "_arrays:NumpyHandler", ("numpy",), (".npy",)),
        _row("tfrecord", "_tfrecord:TfrecordHandler", ("tensorflow",), (".tfrecord", ".tfrecords")),
        _row("arrays", "_arrays:ArraysHandler", ("numpy",)),
        _row("json", "_arrays:JsonHandler", suffixes=(".json",)),
        *MODEL_KINDS.rows,
    ]
)


class Shelf:
    """Names and their versions.

    A name may select a version: `net` is the newest, `net@3` the third, `net@prod` the one with that tag,
    `net^` the one before the newest, `net@prod^` the one before `net@prod`. For an unknown name, version or
    tag, a `NotFoundError` lists what exists.

    Args:
        store: The store.
        bucket: The bucket in the store.
        kinds: What can be stored.
    """

    shelf: ClassVar[str]

    def __init__(self, store: VersionStore, bucket: str = "default", kinds: Kinds = KINDS) -> None:
        self.store = store
        self.bucket = check_bucket(bucket)
        self._kinds = kinds

    def __repr__(self) -> str:
        return f"<{self.shelf} of the bucket {self.bucket!r} in {self.store!r}>"

    def put(
        self,
        obj: Any,
        name: str,
        *,
        attributes: Mapping[str, Any] | None = None,
        tag: str | Sequence[str] | None = None,
        kind: str | None = None,
        trusted: bool = False,
        **options: Any,
    ) -> Version:
        """Store an object as the newest version of a name.

        Readers see the version once it is complete, together with its tags.

        Args:
            obj: The object, or the `Path` of a file or folder that holds one.
            name: The name, without a version.
            attributes: Metadata of your own, as JSON values.
            tag: A tag, or several, that move to the new version.
            kind: The kind to store it as, if several apply.
            trusted: Allow objects that could run code when they are read: pickles, Lambda layers, SavedModels
                that touch files. The reader must, too.
            **options: Options of the kind. For PyTorch `init`, the arguments of its class's constructor, or
                `example`, inputs for `torch.export`.

        Returns:
            The version.

        Raises:
            ConfigError: Invalid name, option or object.
            UntrustedError: Reading it could run code, and `trusted` is not set.
        """
        address = self._address(name)
        if self.shelf == "models" and isinstance(obj, str):
            obj = Path(obj)
        handler = self._handler(obj, kind, options)
        with self.store.stage() as folder:
            meta = handler.write(obj, folder, trusted=trusted, **options)
            version = self.store.publish(
                address, folder, kind=handler.kind, meta=meta, attributes=attributes, tags=tag
            )
        handler.belongs(obj, version)
        return version

    def get(
        self,
        name: str,
        *,
        version: int | str | None = None,
        trusted: bool = False,
        local: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Any:
        """Read an object.

        Args:
            name: The name, optionally with a version.
            version: A number or a tag, if not part of the name.
            trusted: Allow reading to run code that was stored with it.
            local: Copy the version's files into this folder, which must not exist, and return the folder.
                Nothing is loaded.
            **options: Options of the kind.

        Raises:
            UntrustedError: Reading it could run code, and `trusted` is not set.
            DamagedError: The stored bytes are missing or have changed.
        """
        return self._read(self.metadata(name, version=version), trusted, local, options)

    def metadata(self, name: str, *, version: int | str | None = None) -> Version:
        """The record of a version: number, kind, size, time, files, attributes."""
        return self.store.find(self.bucket, self.shelf, parse_selector(name, version))

    def exists(self, name: str, *, version: int | str | None = None) -> bool:
        """Whether the name exists, and the version, if it selects one."""
        return self.store.seek(self.bucket, self.shelf, parse_selector(name, version)) is not None

    def list(
        self,
        pattern: str = "**",
        *,
        hidden: bool = False,
        kind: str | None = None,
        after: str = "",
        limit: int | None = None,
    ) -> builtins.list[str]:
        """The names that match a glob, sorted.

        Args:
            pattern: `*` and `?` match any characters but `/`, `**` matches `/` too, `[ab]` one of these. All
                other characters match themselves; case matters.
            hidden: Include names with a part that begins with `.` or `_`.
            kind: Only those whose newest version is of this kind.
            after: Only names after this one, the last of the previous page.
            limit: The size of a page.
        """
        if kind is None:
            return self.store.names(self.bucket, self.shelf, pattern, hidden=hidden, after=after, limit=limit)
        newest = self.newest(pattern, hidden=hidden, kind=kind, after=after, limit=limit)
        return [version.name for version in newest]

    def newest(
        self,
        pattern: str = "**",
        *,
        hidden: bool = False,
        kind: str | None = None,
        after: str = "",
        limit: int | None = None,
    ) -> builtins.list[Version]:
        """The newest version of each name that `list` returns."""
        return self.store.newest(
            self.bucket, self.shelf, pattern, hidden=hidden, kind=kind, after=after, limit=limit
        )

    def versions(self, name: str) -> builtins.list[Version]:
        """All versions of a name, oldest first."""
        address = self._address(name)
        return self.store.versions(address) or [self.metadata(address.name)]  # which raises, with a hint

    def drop(self, name: str, *, version: int | str | None = None, force: bool = False) -> builtins.list[int]:
        """Delete a name with all its versions and tags, or the one version that it selects.

        The next `sweep` removes the bytes. Numbers are not reused.

        Args:
            name: The name; `name@3` or `name@tag` is one version.
            version: A number or a tag, if not part of the name.
            force: Do not fail if it does not exist.

        Returns:
            The numbers of the deleted versions.
        """
        selector = parse_selector(name, version)
        if force and not self.exists(str(selector)):
            return []
        meant = self.metadata(str(selector))
        return self.store.drop(meant.address, None if selector.is_bare else meant.number)

    def prune(
        self,
        pattern: str = "**",
        *,
        keep: int | None = None,
        days: float | None = None,
        dry_run: bool = False,
    ) -> builtins.list[str]:
        """Delete old versions. Tagged versions stay, and so does the newest of each name.

        Args:
            pattern: A glob of names.
            keep: Keep this number of the newest versions of each name.
            days: Keep versions that are younger than this many days. With both, a version stays if either of
                them keeps it.
            dry_run: Only return what would be deleted.

        Returns:
            The deleted versions, such as "net@3". The next `sweep` removes their bytes.

        Raises:
            ConfigError: Neither `keep` nor `days` was passed, or one of them is invalid.
        """
        if keep is None and days is None:
            raise ConfigError("prune() needs keep=... or days=...: what to keep.")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r}: must be 1 or more.")
        if days is not None and (isinstance(days, bool) or not 0 <= days < 1e6):
            raise ConfigError(f"days={days!r}: must be 0 or more.")
        gone = []
        until = datetime.now(timezone.utc) - timedelta(days=days) if days is not None else None
        for name in self.list(pattern, hidden=True):
            history = self.store.history(self._address(name))
            protected = self._protected(name)
            for number, created in history[: -(keep or 1)]:
                if number not in protected and (until is None or created < until):
                    if not dry_run:
                        self.store.drop(self._address(name), number)
                    gone.append(f"{name}@{number}")
        return gone

    def _protected(self, name: str) -> set[int]:
        """Versions that `prune` leaves."""
        return set(self.tags(name).values())

    def tag(self, name: str, tag: str) -> Version:
        """Move a tag to a version."""
        version = self.metadata(name)
        self.store.tag(version, tag)
        return version

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag of a name."""
        self.store.untag(self._address(name), tag)

    def tags(self, name: str) -> dict[str, int]:
        """The tags of a name, and the numbers of the versions they point to."""
        return self.store.tags(self._address(name))

    def promote(self, name: str, *, bucket: str | None = None, tag: str | None = None) -> Version:
        """Promote a version: make it the newest in another bucket, or move a tag to it.

        Args:
            name: The name, optionally with a version.
            bucket: The bucket where it becomes the newest version; its bytes are shared.
            tag: The tag that moves to it.
        """
        if bucket is None and tag is None:
            raise ConfigError("promote() needs bucket=... or tag=...: where to.")
        if bucket is None or bucket == self.bucket:
            if tag is None:
                raise ConfigError(
                    f"promote({name!r}, bucket={bucket!r}): it is already in that bucket.\n"
                    "Hint: pass another bucket, or tag=... to move a tag to it."
                )
            return self.tag(name, tag)
        return self.copy(name, parse_selector(name).name, bucket=bucket, tag=tag)

    def copy(
        self, name: str, to: str, *, bucket: str | None = None, tag: str | Sequence[str] | None = None
    ) -> Version:
        """Make a version the newest one of another name; its bytes are shared.

        Args:
            name: The name, optionally with a version.
            to: The other name.
            bucket: The bucket of the other name; by default this one.
            tag: A tag, or several, that move to the new version.
        """
        target = self._address(to, bucket)
        source = self.metadata(name)
        if target == source.address:
            raise ConfigError(f"copy({name!r}, {to!r}): the two names are the same.")
        return self.store.publish(
            target,
            kind=source.kind,
            meta=source.meta,
            attributes=source.attributes,
            tags=tag,
            shared=source.files,
        )

    def export(self, name: str, path: str | os.PathLike[str]) -> Path:
        """Write a version to one file: a zip of its files and its record, with hashes.

        Returns:
            The path.
        """
        version, target = self.metadata(name), Path(path)
        with self.store.files(version) as folder:
            archive.write(version, folder, target)
        return target

    def import_(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        tag: str | Sequence[str] | None = None,
    ) -> Version:
        """Store a file that `export` wrote as the newest version of a name. Nothing in it is executed.

        Args:
            path: The file.
            name: The name; by default the one it had.
            tag: A tag, or several, that move to the new version.

        Raises:
            ConfigError: It is not such a file, or is from another shelf.
            DamagedError: A file in it does not match its hash.
        """
        with self.store.stage() as folder:
            record = archive.extract(Path(path), folder)
            if record.shelf != self.shelf:
                raise ConfigError(f"{path} is an archive from the shelf {record.shelf}, not {self.shelf}.")
            self._kinds.handler(record.kind)
            return self.store.publish(
                self._address(record.name if name is None else name),
                folder,
                kind=record.kind,
                meta=record.meta,
                attributes=record.attributes,
                tags=tag,
            )

    def _handler(self, obj: Any, kind: str | None, options: Mapping[str, Any]) -> Handler:
        """What stores an object with these options."""
        handler = self._kinds.taking(obj, self.shelf, kind)
        reject_unknown(options, handler.put_options, what=f"put of kind {handler.kind!r}")
        return handler

    def _read(
        self, stored: Version, trusted: bool, local: str | os.PathLike[str] | None, options: Mapping[str, Any]
    ) -> Any:
        if local is not None:
            folder = Path(local)
            try:
                folder.mkdir(parents=True)
            except FileExistsError as exc:
                raise AlreadyExistsError(f"local={str(folder)!r} already exists.", name=str(folder)) from exc
            self.store.copy_files(stored, folder)
            return folder
        handler = self._kinds.handler(stored.kind)
        self._check_get(handler, options)
        with self.store.files(stored) as folder:
            obj = handler.read(folder, stored.meta, trusted=trusted, **options)
        handler.belongs(obj, stored)
        return obj

    def _check_get(self, handler: Handler, options: Mapping[str, Any]) -> None:
        if not handler.takes_any:
            reject_unknown(options, handler.get_options, what=f"get of kind {handler.kind!r}")

    def _address(self, name: str, bucket: str | None = None) -> Address:
        selector = parse_selector(name)
        if not selector.is_bare:
            raise ConfigError(f"{name!r} names a version; a name alone is needed here.")
        return Address(self.bucket if bucket is None else bucket, self.shelf, selector.name)


class Scripts(Shelf):
    """Functions to be run, stored by import path or source."""

    shelf: ClassVar[str] = "scripts"
