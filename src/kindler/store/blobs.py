"""Blobs: immutable bytes named by their SHA-256, in files, in an object store or in memory.

Whether anything still needs a blob is for the catalog to say.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, quote

from kindler.errors import ConfigError, DamagedError, StoreError
from kindler.files import make_folder, sync
from kindler.registry import imported
from kindler.store.files import check_whole, disk_errors, sha256_of, staging_folder, user_folder
from kindler.store.urls import folder_of

_CHUNK_BYTES = 1 << 20


class Blobs(Protocol):
    """Bytes by their hash.

    Any number of processes may write the same blob at once: whoever sees it sees all of it.

    Attributes:
        url: Where they are; another process opens them with it.
        stage: Where files are best prepared; on the blobs' own disk where they are files.
    """

    url: str
    stage: Path

    def put(self, source: Path, sha256: str) -> None:
        """Keep the file's bytes under that hash; the file itself may be taken over and is not changed."""

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        """Make `target` a file of those bytes, which were checked. Only a private one may be written to.

        Raises:
            DamagedError: The blob is gone, or is not what its name says.
        """

    def has(self, sha256: str) -> bool:
        """Whether the blob is there."""

    def old(self, grace_s: float) -> Iterator[str]:
        """All blobs that were last put more than `grace_s` seconds ago."""

    def remove(self, hashes: Iterable[str]) -> None:
        """Remove blobs; those that are gone already are fine."""


def open_blobs(url: str) -> Blobs:
    """The blobs at a file://, s3://, gs://, az:// or memory:// URL.

    Raises:
        ConfigError: It is another one.
        MissingExtraError: What it needs is not installed.
    """
    scheme = url.partition("://")[0]
    if scheme == "file":
        return FileBlobs(folder_of(url))
    if scheme == "memory":
        return MemoryBlobs()
    if scheme in ("s3", "gs", "az"):
        return ObjectBlobs(url)
    raise ConfigError(
        f"unknown blob scheme {scheme}://.\nHint: use file://, s3://, gs://, az:// or memory://."
    )


class FileBlobs:
    """Blobs in files of a folder: blobs/ab/abcdef..., never written in place."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{quote(str(folder))}"
        self.stage = folder / "staging"
        self._folder = folder

    def put(self, source: Path, sha256: str) -> None:
        target = self._path(sha256)
        exists = target.exists()
        if exists and _renewed(target, sha256):
            return
        try:
            make_folder(target.parent)
            # On the disk, not only on its way there: a row must never outlive its bytes.
            sync(source)
            source.chmod(0o444)
            if exists or not _linked(source, target):
                self._copy(source, target)
            sync(target.parent)
        except PermissionError as exc:
            raise StoreError(f"cannot write to the store at {self._folder / 'blobs'}: {exc}.") from exc

    def _copy(self, source: Path, target: Path) -> None:
        """Beside, then renamed: over a damaged blob, one of somebody else, or from another disk."""
        with staging_folder(self.stage) as folder:
            copy = folder / target.name
            shutil.copyfile(source, copy)
            sync(copy)
            copy.chmod(0o444)
            os.replace(copy, target)

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        blob = self._path(sha256)
        if not blob.exists():
            raise DamagedError(sha256=sha256, problem="it is missing")
        check_whole(blob, sha256)
        if not private:
            with suppress(OSError):
                os.link(blob, target)
                return
        with blob.open("rb") as source, target.open("xb") as copy:  # never into a file that is there
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)

    def has(self, sha256: str) -> bool:
        return self._path(sha256).exists()

    def old(self, grace_s: float) -> Iterator[str]:
        limit = time.time() - grace_s
        for path in sorted(self._folder.glob("blobs/??/*")):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= limit:
                    yield path.name

    def remove(self, hashes: Iterable[str]) -> None:
        with disk_errors(self._folder):
            for sha256 in hashes:
                self._path(sha256).unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self._folder / _key(sha256)


class MemoryBlobs:
    """Blobs in this process, for tests and trials."""

    url = "memory://"

    def __init__(self) -> None:
        self.stage = user_folder()
        self._blobs: dict[str, tuple[bytes, float]] = {}

    def put(self, source: Path, sha256: str) -> None:
        self._blobs[sha256] = (source.read_bytes(), time.time())

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        if not self.has(sha256):
            raise DamagedError(sha256=sha256, problem="it is missing")
        target.write_bytes(self._blobs[sha256][0])
        check_whole(target, sha256)

    def has(self, sha256: str) -> bool:
        return sha256 in self._blobs

    def old(self, grace_s: float) -> Iterator[str]:
        limit = time.time() - grace_s
        return iter([sha256 for sha256, (_, when) in list(self._blobs.items()) if when <= limit])

    def remove(self, hashes: Iterable[str]) -> None:
        for sha256 in hashes:
            self._blobs.pop(sha256, None)


class ObjectBlobs:
    """Blobs as objects PREFIX/blobs/ab/abcdef..., in S3 and what speaks its language, Google Cloud or Azure.

    Credentials and endpoints come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), or as the
    URL's own settings: s3://bucket/prefix?endpoint=http://host:9000&region=us-east-1.
    """

    def __init__(self, url: str) -> None:
        bare, _, query = url.partition("?")
        what = f"a store at {bare.partition('://')[0]}://"
        self._api = imported("obstore", what=what, package="obstore", extra="s3")
        settings = dict(parse_qsl(query))
        plain = settings.get("endpoint", "").startswith("http://")
        self._store = import_module("obstore.store").from_url(
            bare, config=settings, client_options={"allow_http": True} if plain else {}
        )
        self._errors = (import_module("obstore.exceptions").BaseError, OSError)
        self.url, self.stage = url, user_folder()

    def put(self, source: Path, sha256: str) -> None:
        self._call("writing", sha256, lambda key: self._api.put(self._store, key, source))

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        def copy(key: str) -> None:
            with target.open("xb") as file:
                for chunk in self._api.get(self._store, key).stream(min_chunk_size=_CHUNK_BYTES):
                    file.write(memoryview(chunk))

        try:
            self._call("reading", sha256, copy)
        except FileNotFoundError as exc:
            raise DamagedError(sha256=sha256, problem="it is missing") from exc
        check_whole(target, sha256)

    def has(self, sha256: str) -> bool:
        try:
            self._call("looking for", sha256, lambda key: self._api.head(self._store, key))
        except FileNotFoundError:
            return False
        return True

    def old(self, grace_s: float) -> Iterator[str]:
        limit = datetime.now(timezone.utc) - timedelta(seconds=grace_s)
        for page in self._api.list(self._store, "blobs"):
            yield from (entry["path"].rpartition("/")[2] for entry in page if entry["last_modified"] <= limit)

    def remove(self, hashes: Iterable[str]) -> None:
        keys = [_key(sha256) for sha256 in hashes]
        if keys:
            self._call("removing", "", lambda _: self._api.delete(self._store, keys))

    def _call(self, doing: str, sha256: str, work: Callable[[str], Any]) -> None:
        try:
            work(_key(sha256))
        except FileNotFoundError:
            raise
        except self._errors as exc:
            raise StoreError(f"{doing} {_key(sha256)} of {self.url.partition('?')[0]}: {exc}") from exc


def _key(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"


def _renewed(path: Path, sha256: str) -> bool:
    """Whether the blob is whole, and counts as put now, so that no sweep takes it for debris.

    A damaged one is healed by whoever puts it again.
    """
    try:
        if sha256_of(path) != sha256:
            return False
        os.utime(path)
    except OSError:
        return False
    return True


def _linked(source: Path, target: Path) -> bool:
    """Whether the file could be taken over without a copy."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass  # another process has put the same just now
    except OSError:
        return False  # another disk, or one without links
    return True
