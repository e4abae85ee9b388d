"""Large bytes that Spark brings to its executors once, however many frames and tasks need them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, SupportsBytes

from pyspark.sql import SparkSession

from kindler.spark.session import is_connect

_LARGE_BYTES = 1 << 20  # smaller ones travel with the task
_KEPT = 8
_lock = threading.Lock()
_lent: OrderedDict[tuple[str, str], _Lent] = OrderedDict()


class _Lent:
    """Bytes in a broadcast variable; a task fetches them when it needs them."""

    def __init__(self, broadcast: Any) -> None:
        self._broadcast = broadcast

    def __bytes__(self) -> bytes:
        data: bytes = self._broadcast.value
        return data


def lent(spark: SparkSession, digest: str, data: bytes) -> bytes | SupportsBytes:
    """What gives these bytes in tasks of the session; they themselves where they are few, or over Connect.

    Args:
        spark: The session.
        digest: Tells these bytes from all others.
        data: The bytes.
    """
    if len(data) < _LARGE_BYTES or is_connect(spark):
        return data
    context = spark.sparkContext
    key = str(context.applicationId), digest
    with _lock:
        for other in [other for other in _lent if other[0] != key[0]]:
            del _lent[other]  # its session has ended
        if key not in _lent:
            _lent[key] = _Lent(context.broadcast(data))
        _lent.move_to_end(key)
        while len(_lent) > _KEPT:
            _lent.popitem(last=False)  # Spark lets go of it with the last frame that needs it
        return _lent[key]
