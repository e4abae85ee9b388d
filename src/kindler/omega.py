"""One object with all shelves: `om.models`, `om.datasets`, `om.scripts`; `om[bucket]` has those of a bucket.

Opens the store when it is first used. What the shelves do is in `kindler.shelves`.
"""

from __future__ import annotations

import os
import threading

from kindler.shelves.datasets import Datasets
from kindler.shelves.models import Models
from kindler.shelves.scripts import Scripts
from kindler.store import Store, Swept
from kindler.store.names import check_bucket

__all__ = ["Omega", "om"]


class _Opened:
    """A store that is opened on first use, shared by the objects of all its buckets."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._store: Store | None = None
        self._lock = threading.Lock()

    def store(self) -> Store:
        with self._lock:
            if self._store is None:
                self._store = Store.open(self._url)
            return self._store

    def change(self, url: str | None) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
            self._url, self._store = url, None


class Omega:
    """The shelves of one bucket of a store.

    Args:
        url: The store: a folder, `sqlite:///file?blobs=URL`, `postgresql://user@host/db?blobs=URL` or `memory://`.
            None takes `KINDLER_STORE`, or a folder among the user's data.
        bucket: The bucket.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None, *, bucket: str = "default") -> None:
        self.bucket = check_bucket(bucket)
        self._opened = _Opened(None if url is None else os.fspath(url))

    def __getitem__(self, bucket: str) -> Omega:
        """The same store's shelves in another bucket, which need not exist."""
        other = Omega(bucket=bucket)
        other._opened = self._opened
        return other

    def __repr__(self) -> str:
        return f"Omega(bucket={self.bucket!r})"

    @property
    def store(self) -> Store:
        """The store, opened if it was not yet."""
        return self._opened.store()

    @property
    def models(self) -> Models:
        """The shelf of models."""
        return Models(self.store, self.bucket)

    @property
    def datasets(self) -> Datasets:
        """The shelf of datasets."""
        return Datasets(self.store, self.bucket)

    @property
    def scripts(self) -> Scripts:
        """The shelf of functions."""
        return Scripts(self.store, self.bucket)

    @property
    def buckets(self) -> list[str]:
        """The buckets that hold something."""
        return self.store.buckets()

    def setup(self, url: str | os.PathLike[str] | None = None) -> Omega:
        """Use another store from now on, in all buckets; None is the default one."""
        self._opened.change(None if url is None else os.fspath(url))
        return self

    def sweep(self, grace_s: float = 3600.0) -> Swept:
        """Remove what nothing needs: the bytes of dropped versions, and what killed processes left."""
        return self.store.sweep(grace_s)

    def close(self) -> None:
        """Close the store's connections; what is used again opens them again."""
        self.store.close()


om = Omega()
"""The default store: `KINDLER_STORE`, or a folder among the user's data; see `Omega`."""
