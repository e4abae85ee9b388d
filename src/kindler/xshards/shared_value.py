"""`SharedValue`: a value that is sent once to each process, not with each shard."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import cloudpickle

from kindler.data.shards.backend import ShardFolder
from kindler.errors import ConfigError

_engine: ContextVar[str | None] = ContextVar("kindler_shards_engine", default=None)
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
        # By the session's id, None for this machine. The session is kept with its loader: as long as it
        # lives, no other one has its id.
        self._loaders: dict[int | None, tuple[Any, Callable[[], Any]]] = {}
        self._releases: list[Callable[[], Any]] = []
        self._gone = False

    @property
    def value(self) -> Any:
        """The value."""
        self._check()
        return self._data

    def unpersist(self) -> None:
        """Delete every copy except those of running work; the value can no longer be used."""
        self._gone, self._data = True, None
        self._loaders.clear()
        while self._releases:
            self._releases.pop()()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arrived, (self._id, self._loader(_engine.get()))

    def _check(self) -> None:
        if self._gone:
            raise ConfigError("this SharedValue was unpersisted.\nHint: create a new one from the data.")

    def _loader(self, engine: str | None) -> Callable[[], Any]:
        """What fetches the value in a process of that engine."""
        self._check()
        session = active_session() if engine != "local" else None
        key = None if session is None else id(session)
        if key not in self._loaders:
            self._loaders[key] = session, self._sent(session)
        return self._loaders[key][1]

    def _sent(self, session: Any) -> Callable[[], Any]:
        classic = not type(session).__module__.startswith("pyspark.sql.connect")
        if classic and hasattr(type(session), "sparkContext"):
            broadcast = session.sparkContext.broadcast(self._data)
            self._releases.append(broadcast.unpersist)
            return partial(getattr, broadcast, "value")
        folder = ShardFolder()
        self._releases.append(folder.delete)
        path = folder.path / f"kindler-shared-{self._id}.pickle"
        path.write_bytes(cloudpickle.dumps(self._data, protocol=5))
        if session is None:
            return partial(_read, str(path))
        session.addArtifact(str(path), file=True)
        return partial(_read_artifact, path.name)


class _Arrived:
    """A SharedValue in another process."""

    def __init__(self, key: str, load: Callable[[], Any]) -> None:
        self._key, self._load = key, load

    @property
    def value(self) -> Any:
        if self._key not in _loaded:
            while len(_loaded) >= _KEPT:  # a worker that Spark reuses must not hold all it ever saw
                _loaded.pop(next(iter(_loaded)))
            _loaded[self._key] = self._load()
        return _loaded[self._key]

    def unpersist(self) -> None:
        """Forget this process's copy; only the process that made the value can delete it."""
        _loaded.pop(self._key, None)


def _read(path: str) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)


def _read_artifact(name: str) -> Any:
    from kindler.spark.shards import artifact_path

    return _read(artifact_path(name))


def active_session() -> Any:
    """Does not import pyspark if it is not imported yet."""
    if "pyspark.sql" not in sys.modules:
        return None
    from kindler.spark.session import running

    return running()


def session() -> Any:
    from kindler.spark.session import init

    return init()


@contextlib.contextmanager
def shipping_to(engine: str) -> Iterator[None]:
    """Values pickled in this block go to processes of that engine."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)


def check(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, SharedValue):
            argument._check()


def unwrapped(argument: Any) -> Any:
    return argument.value if isinstance(argument, SharedValue | _Arrived) else argument
