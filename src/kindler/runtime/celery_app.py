"""What both sides of a broker share: the Celery application, its one task, and the message format.

Messages are frames of ours. The application accepts nothing else; in particular, no pickles.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode

import celery
import kombu
import kombu.exceptions
from kombu.serialization import register

from kindler.errors import ConfigError
from kindler.frame import Frame
from kindler.runtime import value_codec
from kindler.runtime.messages import pack, unpack
from kindler.runtime.reply_queues import REPLIES_KEPT_S

CONTENT_TYPE = "application/x-kindler-frame"
TASK = "kindler.run"
CANCEL = "kindler_cancel"
LOAD = "kindler_load"

_SERIALIZER = "kindler"
_LEASE_S = 30.0
_CONNECT_S = 5.0
_ANSWER_S = 30.0


def make_app(url: str) -> Any:
    """The application, for a client or a worker.

    Args:
        url: The broker: `redis://` or `amqp://`. For Redis, `?lease_s=30` is how long a task belongs to a
            worker that gives no sign of life; all clients and workers of the broker must use the same.
    """
    register(_SERIALIZER, _dumps, _loads, content_type=CONTENT_TYPE, content_encoding="binary")
    bare, lease_s = lease_of(url)
    app = celery.Celery("kindler", broker=bare, set_as_current=False, fixups=[])
    app.conf.update(
        task_serializer=_SERIALIZER,
        accept_content=[_SERIALIZER],
        task_default_queue=queue_of("default"),
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_redirect_stdouts=False,
        # Celery would change it back in the middle of what RabbitMQ sends, and stand still.
        worker_enable_prefetch_count_reduction=False,
        control_exchange="kindler",
        broker_connection_timeout=_CONNECT_S,
        broker_heartbeat=0,  # pooled connections could not answer
        broker_transport_options=_transport_options(bare, lease_s),
    )
    if bare.startswith("redis"):
        app.conf.broker_transport = "kindler.runtime.redis_transport:Transport"
    return app


def errors_of(app: Any) -> tuple[type[BaseException], ...]:
    """What is raised when the broker cannot be reached."""
    errors = app.connection_for_write().connection_errors
    # kombu's Redis counts a KeyError among them.
    return (kombu.exceptions.OperationalError, OSError, *(one for one in errors if one is not KeyError))


def lease_of(url: str) -> tuple[str, float]:
    """The broker's own URL, and the seconds of a lease.

    >>> lease_of("redis://host/0?lease_s=5")
    ('redis://host/0', 5.0)
    """
    bare, _, query = url.partition("?")
    parameters = dict(parse_qsl(query))
    try:
        lease_s = float(parameters.pop("lease_s", _LEASE_S))
    except ValueError:
        lease_s = 0.0
    if not lease_s > 0:
        raise ConfigError(f"lease_s in the broker's URL must be a positive number; received {query!r}.")
    return bare + (f"?{urlencode(parameters)}" if parameters else ""), lease_s


def queue_of(label: str) -> str:
    """The queue of the tasks with a label."""
    return f"kindler.{label}"


def reply_queue(name: str) -> Any:
    """A client's own queue; it expires after an hour without use."""
    return kombu.Queue(
        name, exchange=kombu.Exchange(""), routing_key=name, durable=True, expires=REPLIES_KEPT_S
    )


def _transport_options(url: str, lease_s: float) -> dict[str, Any]:
    if not url.startswith("redis"):
        # Otherwise messages sent over a connection that the other side has closed are lost silently.
        return {"confirm_publish": True}
    # Redis knows of no connection that broke: a task whose lease is not renewed goes back to its queue.
    return {
        "socket_connect_timeout": _CONNECT_S,
        "socket_timeout": _ANSWER_S,
        "visibility_timeout": lease_s,
        "unacked_restore_interval": max(1.0, lease_s / 3),
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": lease_s,  # of a worker that dies while it gives tasks back
    }


def _dumps(value: Any) -> bytes:
    tree, buffers = value_codec.encode(value)
    return pack(Frame("value", {"value": tree}, tuple(buffers)))


def _loads(content: Any) -> Any:
    frame = unpack(content)
    return value_codec.decode(frame.fields.get("value"), frame.buffers)
