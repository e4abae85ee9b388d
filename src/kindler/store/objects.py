"""Blobs in an object store: S3 and what speaks its language, Google Cloud Storage, Azure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from kindler.errors import DamagedError, StoreError
from kindler.store.files import check_whole

T = TypeVar("T")


class ObjectBlobs:
    """Blobs as objects: PREFIX/blobs/ab/abcdef...

    Credentials and endpoints come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), or as the
    URL's own settings: s3://bucket/prefix?endpoint=http://host:9000&region=us-east-1.
    """

    def __init__(self, url: str, stage: Path) -> None:
        parts = urlsplit(url)
        settings: dict[str, Any] = dict(parse_qsl(parts.query))
        client: dict[str, Any] = {}
        if settings.get("endpoint", "").startswith("http://"):
            client["allow_http"] = True
        bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
        self.url = url
        self.stage = stage
        make: Any = from_url  # typed for each of the stores, of which only the URL says which
        self._store: Any = make(bare, config=settings, client_options=client)

    def put(self, source: Path, sha256: str) -> None:
        self._call("writing", sha256, lambda key: obstore.put(self._store, key, source))

    def get(self, sha256: str, target: Path, *, private: bool = False) -> None:
        def copy(key: str) -> None:
            with target.open("xb") as file:
                for chunk in obstore.get(self._store, key).stream(min_chunk_size=1 << 20):
                    file.write(memoryview(chunk))

        try:
            self._call("reading", sha256, copy)
        except FileNotFoundError as exc:
            raise DamagedError(sha256=sha256, problem="it is missing") from exc
        check_whole(target, sha256)

    def has(self, sha256: str) -> bool:
        try:
            self._call("looking for", sha256, lambda key: obstore.head(self._store, key))
        except FileNotFoundError:
            return False
        return True

    def old(self, grace_s: float) -> Iterator[str]:
        limit = datetime.now(timezone.utc) - timedelta(seconds=grace_s)
        for page in obstore.list(self._store, "blobs"):
            yield from (entry["path"].rpartition("/")[2] for entry in page if entry["last_modified"] <= limit)

    def remove(self, hashes: Iterable[str]) -> None:
        keys = [_key(sha256) for sha256 in hashes]
        if keys:
            self._call("removing", "", lambda _: obstore.delete(self._store, keys))

    def _call(self, doing: str, sha256: str, work: Callable[[str], T]) -> T:
        try:
            return work(_key(sha256))
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as exc:
            raise StoreError(f"{doing} {_key(sha256)} of {self.url.partition('?')[0]}: {exc}") from exc


def _key(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"
