"""Finds the Spark session that shards live in. pyspark is not imported to see that there is none."""

from __future__ import annotations

import sys
from typing import Any


def active_session() -> Any:
    """The running Spark session, or None."""
    if "pyspark.sql" not in sys.modules:
        return None
    from kindler.spark.session import running

    return running()


def session() -> Any:
    """The running session, or a new one."""
    from kindler.spark.session import init

    return init()
