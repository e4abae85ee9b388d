"""A store: files in, immutable versions out. Joins a catalog and blobs, and knows nothing of what files mean.

Publishing is: files to blobs, then one transaction. A process that dies before the transaction leaves only
debris, which nobody sees and `sweep` removes.
"""

from __future__ import annotations

import difflib
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kindler.errors import DamagedError, NotFoundError, StoreError
from kindler.registry import imported
from kindler.store import urls
from kindler.store.blobs import Blobs, open_blobs
from kindler.store.files import staging_folder, sweep_staging, user_folder
from kindler.store.names import Selector, check_path, check_tag
from kindler.store.versions import Address, File, Version, check_files, files_in

if TYPE_CHECKING:
    from kindler.store.catalog import Catalog

_SWEPT_AT_ONCE = 200
_SHOWN = 20  # versions and tags in an error
_COMPARED = 50  # names that a misspelled one is compared with
_SUGGESTIONS, _SUGGESTIONS_S = 20, 10.0  # so many for misspelled names in so many seconds


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed.

    Attributes:
        blobs: The number of blobs that no version needs.
        folders: The number of folders left by processes that are gone.
    """

    blobs: int
    folders: int


@dataclass(frozen=True, slots=True)
class Damage:
    """A blob that is missing or has changed."""

    sha256: str
    problem: str
    versions: tuple[str, ...]  # some of those that need it, such as "default/models/net@3"


@dataclass(frozen=True, slots=True)
class Verified:
    """How many blobs a verification has read, and which are damaged."""

    blobs: int
    damaged: tuple[Damage, ...]


class VersionStore:
    """Named, versioned files.

    Create one with `VersionStore.open`. Any number of processes and threads may use the same store. From the
    catalog it has `newest(bucket, shelf, pattern)`, `names(bucket, shelf, pattern)`, `versions(address)`,
    `history(address)`, `drop(address, number)`, `tags(address)`, `tag(version, tag)`, `untag(address, tag)`,
    `all_tags(bucket, shelf)` and `buckets()`.
    """

    def __init__(self, url: str, catalog: Catalog, blobs: Blobs) -> None:
        self.url = url
        self.blobs = blobs
        self.catalog = catalog
        self.newest, self.names, self.buckets = catalog.newest, catalog.names, catalog.buckets
        self.versions, self.history, self.drop = catalog.versions, catalog.history, catalog.drop
        self.tag, self.untag = catalog.tag, catalog.untag
        self.tags, self.all_tags = catalog.tags, catalog.all_tags
        self._suggested: deque[float] = deque(maxlen=_SUGGESTIONS)

    @classmethod
    def open(cls, url: str | os.PathLike[str] | None = None) -> VersionStore:
        """Open a store; it is created if it does not exist.

        Args:
            url: A folder, `sqlite:///file?blobs=URL`, `postgresql://user@host/db?blobs=URL` or `memory://`.
                None uses `KINDLER_STORE`, or a folder in the user's data directory.

        Raises:
            ConfigError: The form of the URL is unknown, or the URL of a new store does not say where to put
                the blobs.
            MissingExtraError: A package that it needs is not installed.
            StoreError: The database cannot be reached.
        """
        known = urls.default_url(os.environ) if url is None else os.fspath(url)
        imported("sqlalchemy", what="the store", package="sqlalchemy", extra="store")
        from kindler.store.catalog import Catalog

        catalog = Catalog(known)
        blobs = catalog.blobs
        if blobs == urls.RELATIVE:
            catalog_file = Path(urls.parse(known).catalog.removeprefix("sqlite:///"))
            blobs = f"file://{quote(str(catalog_file.parent))}"
        return cls(known, catalog, open_blobs(blobs))

    @staticmethod
    def is_there(url: str | os.PathLike[str] | None = None) -> bool:
        """Whether there is a store; a remote one is assumed to exist."""
        place = urls.parse(urls.default_url(os.environ) if url is None else os.fspath(url))
        path = place.catalog.removeprefix("sqlite:///")
        return path == place.catalog or Path(path).exists()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.blobs.url == "memory://":
            raise StoreError("an in-memory store belongs to its process and cannot be pickled.")
        return VersionStore.open, (self.url,)

    def __repr__(self) -> str:
        return f"VersionStore({urls.shown(self.url)!r})"

    def close(self) -> None:
        """Close the connections to the catalog; they are opened again when needed."""
        self.catalog.database.close()

    def stage(self) -> AbstractContextManager[Path]:
        """An empty folder to prepare files in, removed after the block.

        It is on the same disk as the blobs; for a read-only store, it is in a folder of the user.
        """
        return staging_folder(self.blobs.stage if self._may_write() else user_folder())

    def publish(
        self,
        address: Address,
        folder: Path | None = None,
        *,
        kind: str,
        meta: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
        tags: str | Sequence[str] | None = None,
        shared: Sequence[File] = (),
        after: int | None = None,
        grows: Version | None = None,
    ) -> Version:
        """Publish files as the newest version of a name.

        Args:
            address: Where.
            folder: A folder with its files, preferably from `stage`; they must no longer change.
            kind: The kind that reads it.
            meta: What the kind needs to read it.
            attributes: The user's attributes.
            tags: A tag, or several, that move to it atomically.
            shared: Files whose blobs are in the store already.
            after: The number that the newest version must have (0: no version may exist).
            grows: The version with the number `after`, if this one has all its files and more: the catalog
                then records only what is new.

        Raises:
            OvertakenError: The newest version is not `after`.
            StoreError: A shared blob is gone.
        """
        moved = [check_tag(tag) for tag in ([tags] if isinstance(tags, str) else tags or ())]
        ours = {} if folder is None else files_in(folder)
        draft = Version.draft(
            address, kind=kind, files=[*shared, *ours], meta=meta or {}, attributes=attributes or {}
        )
        sources = {file.sha256: path for file, path in ours.items()}
        for sha256, path in sources.items():
            self.blobs.put(path, sha256)

        def has(sha256: str) -> bool:
            if self.blobs.has(sha256):
                return True
            if sha256 not in sources:
                return False
            # A sweep took it for debris just now; within this transaction, none comes between.
            self.blobs.put(sources[sha256], sha256)
            return True

        return self.catalog.publish(draft, has=has, tags=moved, after=after, grows=grows)

    def find(self, bucket: str, shelf: str, selector: Selector) -> Version:
        """The version that a selector names.

        Raises:
            NotFoundError: It does not exist; the message suggests what does, unless many unknown names were
                looked up just before.
        """
        version = self.seek(bucket, shelf, selector)
        if version is None:
            raise self._missing(Address(bucket, shelf, selector.name), selector)
        return version

    def seek(self, bucket: str, shelf: str, selector: Selector) -> Version | None:
        """The same, or None where there is none."""
        return self.catalog.find(Address(bucket, shelf, selector.name), selector)

    def forget(self, address: Address) -> None:
        """Delete a name without a trace: its bytes, and the record of its version numbers.

        For temporary objects with unique names, whose versions were never referred to.
        """
        hashes = sorted({file.sha256 for version in self.versions(address) for file in version.files})
        self.catalog.drop(address, forget=True)
        with self.catalog.unneeded(hashes) as debris:
            self.blobs.remove(debris)

    @contextmanager
    def files(self, version: Version) -> Iterator[Path]:
        """The version's files, checked, in a read-only folder that is removed after the block."""
        with self.stage() as folder:
            self.copy_files(version, folder, private=False)
            yield folder

    def copy_files(self, version: Version, folder: Path, *, private: bool = True) -> None:
        """Copy the version's files into a folder; raises DamagedError if a blob is missing or has changed."""
        check_files(version.files)
        for file in version.files:
            target = folder / check_path(file.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.blobs.get(file.sha256, target, private=private)

    def sweep(self, grace_s: float = 3600.0) -> Swept:
        """Remove unneeded data: blobs of dropped versions, and what killed processes left behind.

        May run at any time, concurrently with any number of writers: nothing that a live one has begun is
        lost.

        Args:
            grace_s: Keep blobs that were written in the last `grace_s` seconds: they may belong to a version
                that is about to be published.
        """
        folders = sweep_staging(self.blobs.stage)
        old, removed = iter(self.blobs.old(grace_s)), 0
        while some := list(islice(old, _SWEPT_AT_ONCE)):
            with self.catalog.unneeded(some) as debris:
                self.blobs.remove(debris)
                removed += len(debris)
        return Swept(blobs=removed, folders=folders)

    def verify(self) -> Verified:
        """Read every blob that a version needs, and check it against its hash.

        A damaged blob is healed by putting the same content again.
        """
        count, damaged, after = 0, [], ""
        while some := self.catalog.hashes(after, _SWEPT_AT_ONCE):
            after = some[-1]
            for sha256 in some:
                count += 1
                problem = self._problem_of(sha256)
                users = self.catalog.users(sha256, _SHOWN) if problem else []
                if problem and users:  # else the last version that needed it was dropped meanwhile
                    damaged.append(Damage(sha256, problem, tuple(users)))
        return Verified(count, tuple(damaged))

    def compact(self) -> tuple[int, int]:
        """Reclaim the space of removed catalog rows.

        Returns:
            The bytes of the catalog before and after; 0 where the database does not say.
        """
        return self.catalog.database.compact()

    def _problem_of(self, sha256: str) -> str | None:
        with self.stage() as folder:
            try:
                self.blobs.get(sha256, folder / sha256)
            except DamagedError as exc:
                return str(exc).splitlines()[0]
            except OSError as exc:
                return str(exc)
        return None

    def _may_write(self) -> bool:
        stage = self.blobs.stage
        return (
            os.access(stage if stage.exists() else stage.parent, os.W_OK | os.X_OK)
            or not stage.parent.exists()
        )

    def _missing(self, address: Address, selector: Selector) -> NotFoundError:
        what = address.shelf.removesuffix("s")
        nowhere = f"{what} in the bucket {address.bucket!r}:"
        # Looking for what might have been meant costs many times what finding a name does: a client that
        # misspells all the time must not keep the others waiting.
        now = time.monotonic()
        if len(self._suggested) == _SUGGESTIONS and now - self._suggested[0] < _SUGGESTIONS_S:
            return NotFoundError(what=nowhere, name=str(selector))
        self._suggested.append(now)
        known = [] if selector.is_bare else self.history(address, _SHOWN)
        if known:
            there = [f"{address.name}@{number}" for number, _ in known]
            there += [f"{address.name}@{tag}" for tag in sorted(self.tags(address))[:_SHOWN]]
            return NotFoundError(what=f"version of the {what}", name=str(selector), available=there)
        near = difflib.get_close_matches(address.name, self._similar(address), n=3)
        return NotFoundError(what=nowhere, name=address.name, available=near)

    def _similar(self, address: Address) -> list[str]:
        """Names that might have been meant: all of a small store, and of a large one those that begin alike.

        Never many: whoever asks for names that there are not must not keep others waiting.
        """
        names = self.names(address.bucket, address.shelf, limit=_COMPARED + 1)
        if len(names) <= _COMPARED:
            return names
        for length in (len(address.name) - 1, len(address.name) // 2, 1):
            pattern = f"{address.name[: max(1, length)]}**"
            if names := self.names(address.bucket, address.shelf, pattern, limit=_COMPARED):
                break
        return names
