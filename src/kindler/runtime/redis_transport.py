"""kombu's transport for Redis, which goes on after an item that is not a message.

Whoever can write to Redis can put anything into a queue. kombu would end the worker for some of it, and
connect again without end for other; here it is dropped with one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty
from typing import Any

from kombu.transport import redis, virtual
from redis.exceptions import DataError, RedisError

from kindler.runtime.reply_queues import REPLIES, REPLIES_KEPT_S

_log = logging.getLogger("kindler.runtime")


class _QoS(redis.QoS):  # type: ignore[misc]
    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """See kombu. What cannot be given back to its queue would keep everything behind it from that."""
        try:
            super().restore_by_tag(tag, client, leftmost)
        except Exception as exc:
            if _is_brokers(exc):
                raise
            _log.error("dropped a task that no worker acknowledged, and that is not a message: %r", exc)
            self._remove_from_indices(tag).execute()


class _Message(virtual.Message):  # type: ignore[misc]
    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        if (payload.get("headers") or {}).get("compression"):
            raise ValueError("it is compressed")  # to a thousandth of its size, perhaps
        super().__init__(payload, channel=channel, **options)


class _Channel(redis.Channel):  # type: ignore[misc]
    QoS = _QoS
    Message = _Message

    def _brpop_read(self, **options: Any) -> Any:
        return _delivered(super()._brpop_read, **options)

    def _receive_one(self, c: Any) -> Any:
        return _delivered(super()._receive_one, c)

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """See kombu. A client that is gone does not read its replies; only it could let them expire."""
        super()._put(queue, message, **options)
        if queue.startswith(REPLIES):
            with self.conn_or_acquire() as client:
                client.expire(queue, round(REPLIES_KEPT_S))


class Transport(redis.Transport):  # type: ignore[misc]
    """See the module."""

    Channel = _Channel


def _delivered(read: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Read and deliver one item."""
    try:
        return read(*args, **options)
    except Exception as exc:
        if _is_brokers(exc):
            raise
        _log.error("dropped an item of a queue that is not a message: %r", _short(exc))
        return True


def _is_brokers(exc: Exception) -> bool:
    """Whether it is about the connection, rather than about what came over it."""
    return isinstance(exc, Empty | OSError | RedisError) and not isinstance(exc, DataError)


def _short(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"[:200]
