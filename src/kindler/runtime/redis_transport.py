"""kombu's transport for Redis, for queues that anybody may have written to: what kombu leaves open.

The one place that relies on more of kombu than its documented interface: on `Channel._put`, on two methods of
`QoS` and on the index of unacknowledged tasks. tests/runtime/test_mishaps.py tests each.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from kombu.transport import redis, virtual

from kindler.runtime.broker import REPLIES, REPLIES_KEPT_S

_log = logging.getLogger("kindler.runtime")


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
            _log.error("dropped a task that no worker acknowledged, and that is not a message: %r", exc)
            self.reject(tag)


class _Message(virtual.Message):  # type: ignore[misc]
    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        if (payload.get("headers") or {}).get("compression"):
            raise ValueError("it is compressed")  # to a thousandth of its size, perhaps
        super().__init__(payload, channel=channel, **options)


class _Channel(redis.Channel):  # type: ignore[misc]
    QoS = _QoS
    Message = _Message
    do_restore = False  # a task whose worker lost its connection still runs, and keeps its lease

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """A client that is gone does not read its replies; only it could let them expire."""
        super()._put(queue, message, **options)
        if queue.startswith(REPLIES):
            with self.conn_or_acquire() as client:
                client.expire(queue, round(REPLIES_KEPT_S))


class Transport(redis.Transport):  # type: ignore[misc]
    Channel = _Channel


def renew(channel: Any, delivery_tag: str) -> None:
    """Let the lease of a task begin anew."""
    with channel.conn_or_acquire() as client:
        client.zadd(channel.unacked_index_key, {delivery_tag: time.time()}, xx=True)
