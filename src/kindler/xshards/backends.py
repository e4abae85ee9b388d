"""Which home: Spark's where a session runs, this machine's otherwise. pyspark is not imported to find out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from kindler.data.shards.backend import Held
from kindler.data.shards.codec import Packed
from kindler.errors import ConfigError

__all__ = ["active_session", "choose", "put", "session", "slots"]


def active_session() -> Any:
    """The running Spark session, or None."""
    if "pyspark.sql" not in sys.modules:
        return None
    from kindler.spark.session import running

    return running()


def choose(home: str) -> str:
    """The home to use for "auto", "local" or "spark"."""
    if home not in ("auto", "local", "spark"):
        raise ConfigError(f"home={home!r}: it is 'auto', 'local' or 'spark'.")
    if home != "auto":
        return home
    return "local" if active_session() is None else "spark"


def session() -> Any:
    """The running session, or a new one."""
    from kindler.spark.session import init

    return init()


def put(shards: Iterable[Packed], home: str) -> Held:
    """Shards of this process, in the home that `choose` gave."""
    if home == "local":
        from kindler.xshards.local import LocalShards

        return LocalShards.of(shards)
    from kindler.spark.shards import SparkShards

    return SparkShards.of(session(), shards)


def slots(home: str) -> int:
    """How many shards can be worked on at once there."""
    if home == "local":
        from kindler.engine.local import slots as local_slots

        return local_slots()
    from kindler.spark.slots import slots as spark_slots

    return spark_slots(session())
