"""`SharedValue`: a value that travels once to each process, not with each shard."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import cloudpickle

from kindler.data.shards.backend import ShardFolder
from kindler.errors import ConfigError

_home: ContextVar[str | None] = ContextVar("kindler_shards_home", default=None)
_KEPT = 8
_loaded: dict[str, Any] = {}  # what this process has fetched last, by the value's id


class SharedValue:
    """A value for functions that work on shards, such as a lookup table.

    It is sent once to each process that needs it. Pass it as an argument of
    `XShards.transform_shard`, where it arrives as the value itself, or use `.value` in a function.

    Args:
        data: Anything that pickles.

    Example:
        >>> from kindler import SharedValue
        >>> names = SharedValue({1: "one"})
        >>> names.value
        {1: 'one'}
        >>> names.unpersist()
    """

    def __init__(self, data: Any) -> None:
        self._id = secrets.token_hex(8)
        self._data = data
        # By the session's id, None for this machine. The session is kept with its carrier: as long as it
        # lives, no other one has its id.
        self._carriers: dict[int | None, tuple[Any, Any]] = {}
        self._held: list[Any] = []
        self._gone = False

    @property
    def value(self) -> Any:
        """The value."""
        self._check()
        return self._data

    def unpersist(self) -> None:
        """Delete every copy except those of running work; the value can no longer be used."""
        self._gone = True
        carriers, self._carriers = self._carriers, {}
        for _, carrier in carriers.values():
            if hasattr(carrier, "unpersist"):
                carrier.unpersist()
        for folder in self._held:
            folder.delete()
        self._held.clear()
        self._data = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arrived, (self._id, self._carrier(_home.get()))

    def _check(self) -> None:
        if self._gone:
            raise ConfigError("this SharedValue was unpersisted.\nHint: create a new one from the data.")

    def _carrier(self, home: str | None) -> Any:
        self._check()
        session = active_session() if home != "local" else None
        key = None if session is None else id(session)
        if key not in self._carriers:
            made = str(self._file()) if session is None else self._on_spark(session)
            self._carriers[key] = session, made
        return self._carriers[key][1]

    def _file(self) -> Path:
        folder = ShardFolder()
        self._held.append(folder)
        path = folder.path / f"kindler-shared-{self._id}.pickle"
        path.write_bytes(cloudpickle.dumps(self._data, protocol=5))
        return path

    def _on_spark(self, session: Any) -> Any:
        classic = not type(session).__module__.startswith("pyspark.sql.connect")
        if classic and hasattr(type(session), "sparkContext"):
            return session.sparkContext.broadcast(self._data)
        path = self._file()
        session.addArtifact(str(path), file=True)
        return _Artifact(path.name)


class _Artifact:
    def __init__(self, name: str) -> None:
        self.name = name


class _Arrived:
    """A SharedValue in another process."""

    def __init__(self, key: str, carrier: Any) -> None:
        self._key = key
        self._carrier = carrier

    @property
    def value(self) -> Any:
        if self._key not in _loaded:
            while len(_loaded) >= _KEPT:  # a worker that Spark reuses must not hold all it ever saw
                _loaded.pop(next(iter(_loaded)))
            _loaded[self._key] = _fetch(self._carrier)
        return _loaded[self._key]

    def unpersist(self) -> None:
        """Forget this process's copy; only the process that made the value can delete it."""
        _loaded.pop(self._key, None)


def _fetch(carrier: Any) -> Any:
    if isinstance(carrier, _Artifact):
        from kindler.spark.shards import artifact_path

        carrier = artifact_path(carrier.name)
    if not isinstance(carrier, str):
        return carrier.value
    with open(carrier, "rb") as file:
        return pickle.load(file)


def active_session() -> Any:
    """Does not import pyspark if nobody has."""
    if "pyspark.sql" not in sys.modules:
        return None
    from kindler.spark.session import running

    return running()


def session() -> Any:
    from kindler.spark.session import init

    return init()


@contextlib.contextmanager
def shipping_to(home: str) -> Iterator[None]:
    """Values pickled in this block go to processes of that home."""
    token = _home.set(home)
    try:
        yield
    finally:
        _home.reset(token)


def check(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, SharedValue):
            argument._check()


def unwrapped(argument: Any) -> Any:
    return argument.value if isinstance(argument, SharedValue | _Arrived) else argument
