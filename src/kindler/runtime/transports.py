"""kombu's transports, for queues that anybody may have written to: what kombu leaves open.

The one place that relies on more of kombu than its documented interface: on the classes of messages, and for
Redis on `Channel._put`, two methods of `QoS` and the index of unacknowledged tasks.
tests/runtime/test_mishaps.py tests each.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kombu.transport import pyamqp, redis, virtual

from kindler.runtime.broker import REPLIES, REPLIES_KEPT_S

_log = logging.getLogger("kindler.runtime")


def _keep_compressed(headers: Any) -> None:
    """kombu would decompress what it receives, perhaps to a thousand times its size. We never compress."""
    (headers or {}).pop("compression", None)


class _AmqpMessage(pyamqp.Message):  # type: ignore[misc]
    def __init__(self, message: Any, channel: Any = None, **options: Any) -> None:
        _keep_compressed(message.properties.get("application_headers"))
        super().__init__(message, channel=channel, **options)


class _AmqpChannel(pyamqp.Channel):  # type: ignore[misc]
    Message = _AmqpMessage


class _AmqpConnection(pyamqp.Connection):  # type: ignore[misc]
    Channel = _AmqpChannel


class Amqp(pyamqp.Transport):  # type: ignore[misc]
    Connection = _AmqpConnection


class Amqps(pyamqp.SSLTransport):  # type: ignore[misc]
    Connection = _AmqpConnection


class _RedisMessage(virtual.Message):  # type: ignore[misc]
    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        _keep_compressed(payload.get("headers"))
        super().__init__(payload, channel=channel, **options)


class _QoS(redis.QoS):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._since = time.monotonic()

    def restore_visible(self, *args: Any, **options: Any) -> None:
        """After Redis was away, workers that live get the time to renew their leases."""
        if time.monotonic() - self._since > self.visibility_timeout:
            super().restore_visible(*args, **options)

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """What cannot be given back to its queue would keep everything behind it from that."""
        try:
            super().restore_by_tag(tag, client, leftmost)
        except Exception as exc:
            if isinstance(exc, self.channel.connection_errors) and not isinstance(exc, KeyError):
                raise
            _log.error("dropped an unacknowledged task that is not a valid message: %r", exc)
            self.reject(tag)


class _RedisChannel(redis.Channel):  # type: ignore[misc]
    QoS = _QoS
    Message = _RedisMessage
    do_restore = False  # a task whose worker lost its connection still runs, and keeps its lease

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """A client that is gone does not read its replies; only it could let them expire."""
        super()._put(queue, message, **options)
        if queue.startswith(REPLIES):
            with self.conn_or_acquire() as client:
                client.expire(queue, round(REPLIES_KEPT_S))


class Redis(redis.Transport):  # type: ignore[misc]
    Channel = _RedisChannel


def renew(channel: Any, delivery_tag: str) -> None:
    """Let the lease of a task begin anew."""
    with channel.conn_or_acquire() as client:
        client.zadd(channel.unacked_index_key, {delivery_tag: time.time()}, xx=True)
