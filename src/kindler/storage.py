"""`kindler.Store`: models, datasets and functions of one bucket, and the runtime that executes on them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from kindler.shelves.datasets import Datasets
from kindler.shelves.models import Models
from kindler.shelves.shelf import Scripts
from kindler.store import Swept, Verified, VersionStore, urls
from kindler.store.names import check_bucket

if TYPE_CHECKING:
    from kindler.runtime.engine import Engine
    from kindler.runtime.runtime import Runtime


class _Opened:
    """A store that is opened on first use, shared by the objects of all its buckets."""

    def __init__(self, url: str | None, broker: str | None = None) -> None:
        self._url = url
        self._broker = broker
        self._store: VersionStore | None = None
        self._engine: Engine | None = None
        self._lock = threading.RLock()

    def store(self) -> VersionStore:
        with self._lock:
            if self._store is None:
                self._store = VersionStore.open(self._url)
            return self._store

    @property
    def url(self) -> str:
        return urls.default_url(os.environ) if self._url is None else self._url

    def engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                from kindler.runtime.engine import open_engine

                self._engine = open_engine(self.store().url, self._broker)
            return self._engine

    def change(self, url: str | None, broker: str | None) -> None:
        with self._lock:
            self.close()
            self._url, self._broker, self._store = url, broker, None

    def close(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
            if self._store is not None:
                self._store.close()
        if engine is not None:
            engine.close()


class Store:
    """A store of models, datasets and functions, and a runtime that executes on them elsewhere.

    `store.models`, `store.datasets` and `store.scripts` are its shelves; `store[bucket]` is the same store
    with another bucket. The store is opened, and `store.runtime` started, on first use; use `with
    kindler.Store(url) as store`, or `close`, to close both.

    Args:
        url: The store: a folder, `sqlite:///file?blobs=URL`, `postgresql://user@host/db?blobs=URL` or
            `memory://`. None uses `KINDLER_STORE`, or a folder in the user's data directory.
        bucket: The bucket.
        broker: The broker of the runtime's workers: `redis://host/0` or `amqp://user@host//`. None uses
            `KINDLER_BROKER`, or workers on this machine.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        bucket: str = "default",
        broker: str | None = None,
    ) -> None:
        self.bucket = check_bucket(bucket)
        self._opened = _Opened(None if url is None else os.fspath(url), broker)

    def __getitem__(self, bucket: str) -> Store:
        """The same store's shelves in another bucket, which need not exist."""
        other = Store(bucket=bucket)
        other._opened = self._opened
        return other

    def __repr__(self) -> str:
        return f"Store({urls.shown(self._opened.url)!r}, bucket={self.bucket!r})"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def store(self) -> VersionStore:
        """Names, versions and files of all shelves and buckets, opened on first use."""
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
    def runtime(self) -> Runtime:
        """Runs stored models and functions elsewhere."""
        from kindler.runtime.runtime import Runtime

        return Runtime(self.store, self.bucket, self.engine)

    def engine(self) -> Engine:
        """The engine that runs the tasks of `runtime`, started on first use."""
        return self._opened.engine()

    @property
    def buckets(self) -> list[str]:
        """The buckets that are not empty."""
        return self.store.buckets()

    def setup(self, url: str | os.PathLike[str] | None = None, *, broker: str | None = None) -> Store:
        """Use another store and broker from now on, in all buckets; None is the default."""
        self._opened.change(None if url is None else os.fspath(url), broker)
        return self

    def sweep(self, grace_s: float = 3600.0) -> Swept:
        """Remove unneeded data: the bytes of dropped versions, and what killed processes left behind."""
        return self.store.sweep(grace_s)

    def verify(self) -> Verified:
        """Read all stored bytes, and check that they are unchanged."""
        return self.store.verify()

    def close(self) -> None:
        """Close the store and end the runtime's workers; both reopen when used again."""
        self._opened.close()


om = Store()
"""The default store: `KINDLER_STORE`, or a folder among the user's data; see `Store`."""
