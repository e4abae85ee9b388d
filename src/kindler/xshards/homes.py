"""Which home: Spark's where a session runs, this machine's otherwise. pyspark is not imported to find out."""

from __future__ import annotations

import sys
from typing import Any

from kindler.errors import ConfigError

__all__ = ["active_session", "choose", "session"]


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
