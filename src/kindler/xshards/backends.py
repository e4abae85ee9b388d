"""Chooses where shards live: in Spark where a session runs, on this machine otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from kindler.data.shards.backend import ShardBackend
from kindler.data.shards.codec import Packed
from kindler.errors import ConfigError
from kindler.xshards.shared_value import active_session, session


def choose(engine: str) -> str:
    if engine not in ("auto", "local", "spark"):
        raise ConfigError(f"engine={engine!r}: expected 'auto', 'local' or 'spark'.")
    if engine != "auto":
        return engine
    return "local" if active_session() is None else "spark"


def put(shards: Iterable[Packed], engine: str) -> ShardBackend:
    if engine == "local":
        from kindler.xshards.local import LocalShards

        return LocalShards.of(shards)
    from kindler.spark.shards import SparkShards

    return SparkShards.of(session(), shards)


def slots(engine: str) -> int:
    if engine == "local":
        from kindler.engine.local import slots as local_slots

        return local_slots()
    from kindler.spark.executors import slots as spark_slots

    return spark_slots(session())
