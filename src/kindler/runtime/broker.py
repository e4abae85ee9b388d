"""The broker engine, client side, by kombu: tasks go to Redis or RabbitMQ, reports come back.

A task waits in the queue of its label until a worker takes it (`broker_worker.py`, which `kindler worker`
starts). A client has one queue for the reports on all its tasks. Commands to all workers (`load`, `cancel`)
are broadcast by kombu's mailbox. Messages too large for a broker go through the store. Also here is what both
sides share: the queues, connections and large messages.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qsl, urlencode

import kombu
import kombu.exceptions
import kombu.pidbox
import kombu.pools
import numpy as np

from kindler.errors import BrokerError, ConfigError, FrameError, StoreError, TaskCancelledError
from kindler.frame import Frame
from kindler.runtime.engine import Listener, Load
from kindler.runtime.messages import Report, Task, pack, unpack
from kindler.shelves.datasets import Datasets
from kindler.store import Address, VersionStore

REPLIES = "kindler.reply."  # and a name of the client's own
REPLIES_KEPT_S = 3600.0  # after the last use
MAILBOX = kombu.pidbox.Mailbox("kindler", type="fanout", accept=["json"])
LOOK_S = 0.5  # between two looks at other things, of those who wait for the broker

_log = logging.getLogger("kindler.runtime")
_CONTENT_TYPE = "application/x-kindler-frame"
_LEASE_S = 30.0
_CONNECT_S = 5.0
_ANSWER_S = 30.0  # of a broker
_ANSWERS_S = 0.5  # how long to collect answers: nobody knows how many workers there are
_LOAD_KEPT_S = 2.0
_MOST_DROPPED = 100  # items in a row that are no messages, after which the connection is suspected
_LARGEST_BYTES = 1 << 20  # of a message that goes through the broker
_FOLDER = ".runtime"  # of larger ones, in the store
_LARGE_KEPT = timedelta(days=1)
_MOST_CONNECTIONS = 10
_NO_ROUTE = 312  # of AMQP
_CONNECTING = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.0, "interval_max": 0.1}
_PUBLISHING = {"max_retries": 3, "interval_start": 0.1, "interval_step": 0.3, "interval_max": 1.0}


class Broker:
    """The address of a broker, and how to reach it.

    Args:
        url: `redis://` or `amqp://`. For Redis, `?lease_s=30` is how long a task belongs to a worker that
            gives no sign of life; all clients and workers of the broker must use the same.

    >>> Broker("redis://host/0?lease_s=5").lease_s
    5.0
    """

    def __init__(self, url: str) -> None:
        self.kind = url.partition(":")[0]
        self.is_redis = self.kind.startswith("redis")
        bare, _, query = url.partition("?")
        parameters = dict(parse_qsl(query))
        try:
            self.lease_s = float(parameters.pop("lease_s", _LEASE_S))
        except ValueError:
            self.lease_s = 0.0
        if not self.lease_s > 0:
            raise ConfigError(f"lease_s in the broker's URL must be a positive number; received {query!r}.")
        self._url = bare + (f"?{urlencode(parameters)}" if parameters else "")

    def connection(self, heartbeat_s: float = 0.0) -> Any:
        options: dict[str, Any] = {"connect_timeout": _CONNECT_S, "heartbeat": heartbeat_s}
        if self.kind == "rediss" and "ssl_" not in self._url:
            options["ssl"] = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
        # Or messages sent to RabbitMQ over a connection that it has closed are lost silently.
        options["transport_options"] = {"confirm_publish": True}
        if self.is_redis:
            # It knows of no connection that broke: a task whose lease is not renewed goes back to its queue.
            options["transport_options"] = {
                "socket_connect_timeout": _CONNECT_S,
                "socket_timeout": _ANSWER_S,
                "visibility_timeout": self.lease_s,
                "unacked_restore_throttle": max(1, round(self.lease_s / 3 / LOOK_S)),
                "unacked_mutex_expire": self.lease_s,  # of a worker that dies while it gives tasks back
            }
        transport = "Redis" if self.is_redis else self.kind.capitalize()
        return kombu.Connection(self._url, transport=f"kindler.runtime.transports:{transport}", **options)

    @functools.cached_property
    def errors(self) -> tuple[type[BaseException], ...]:
        """What is raised when the broker cannot be reached."""
        errors = self.connection().connection_errors
        # kombu's Redis counts a KeyError among them.
        return (kombu.exceptions.OperationalError, OSError, *(one for one in errors if one is not KeyError))


def task_queue(label: str) -> Any:
    return kombu.Queue(f"kindler.{label}", exchange=kombu.Exchange(""), routing_key=f"kindler.{label}")


def publish(producer: Any, body: bytes, to: str, **options: Any) -> None:
    options |= {"content_type": _CONTENT_TYPE, "content_encoding": "binary", "confirm_timeout": _ANSWER_S}
    producer.publish(body, exchange="", routing_key=to, **options)


def is_unroutable(exc: BaseException) -> bool:
    return getattr(exc, "reply_code", None) == _NO_ROUTE


def content_of(message: Any) -> bytes:
    """The content of a message; raises FrameError if no client or worker of ours can have sent it."""
    if message.content_type != _CONTENT_TYPE:
        raise FrameError(f"unexpected content type {str(message.content_type)[:60]!r}.")
    if not isinstance(message.body, bytes | memoryview) or len(message.body) > 2 * _LARGEST_BYTES:
        raise FrameError(f"unexpected body, or a body of more than {2 * _LARGEST_BYTES} bytes.")
    return bytes(message.body)


class Link:
    """A connection to the broker that consumes, and is made again after it was lost. Of one thread.

    `consume` is called with a new channel, and starts and returns its consumer. RabbitMQ gets a sign of life
    every `heartbeat_s`; `drain` must be called as often.
    """

    def __init__(self, broker: Broker, consume: Callable[[Any], Any], heartbeat_s: float = 0.0) -> None:
        self._broker = broker
        self._consume = consume
        self._heartbeat_s = heartbeat_s
        self._producer: Any = None
        self._dropped = self._failures = 0
        self.connection: Any = None
        self.channel: Any = None
        self.consumer: Any = None
        self.was_open = threading.Event()

    @property
    def is_open(self) -> bool:
        """Whether it is connected, as far as is known. kombu would connect again, and not consume."""
        return self.connection is not None and bool(self.connection.connected)

    def open(self) -> None:
        if self.is_open:
            return
        self.close()
        connection = self._broker.connection(self._heartbeat_s)
        try:
            connection.ensure_connection(**_CONNECTING)
            self.channel = connection.channel()
            self.consumer = self._consume(self.channel)
        except BaseException:
            _release(connection)
            raise
        self.connection = connection
        self.was_open.set()

    def drain(self, timeout_s: float) -> None:
        """Wait for something to arrive. Whoever can write to Redis can put anything into a queue; what kombu
        cannot read is dropped, with a line in the log."""
        if not self.is_open:
            raise ConnectionResetError("it was closed")
        try:
            self.connection.drain_events(timeout=timeout_s)
            self._dropped = 0
        except (TimeoutError, queue.Empty):
            pass
        except Exception as exc:
            self._dropped += 1
            own = isinstance(exc, self._broker.errors) or not self._broker.is_redis
            if own or self._dropped > _MOST_DROPPED:
                raise
            _log.error("dropped an item of a queue that is not a message: %s", repr(exc)[:200])
        self.connection.heartbeat_check()

    def publish(self, body: bytes, to: str, **properties: Any) -> None:
        """Send a message over a channel of its own: an error may close that, and not the consumer's. RabbitMQ
        refuses it if there is no such queue (`is_unroutable`)."""
        if self._producer is None:
            self._producer = kombu.Producer(self.connection.channel())
        try:
            publish(self._producer, body, to, mandatory=True, **properties)
        except BaseException:
            producer, self._producer = self._producer, None
            with contextlib.suppress(Exception):
                producer.channel.close()  # what still comes over it is about this message
            raise

    def turn(self, work: Callable[[], None], stop: threading.Event) -> None:
        """One turn of a thread's loop: do what is due, then receive. A lost connection is made again in the
        next turn."""
        try:
            work()
            self.open()
            self._failures = 0
            self.drain(LOOK_S)
        except Exception as exc:  # noqa: BLE001 - each transport has its own errors, and tasks must not be lost
            self._failures += 1
            pause_s = min(0.5 * self._failures, 5.0)
            _log.warning("lost the connection to the broker, reconnecting in %g s: %s", pause_s, exc)
            self.close()
            stop.wait(pause_s)

    def close(self) -> None:
        """Disconnect; RabbitMQ gives what was not acknowledged to others."""
        connection, self.connection, self._producer = self.connection, None, None
        if connection is not None:
            _release(connection)


def _release(connection: Any) -> None:
    try:
        connection.release()
    except Exception as exc:  # noqa: BLE001 - it is broken, and is left behind
        _log.info("could not close a broken connection to the broker: %r", exc)


@dataclass(slots=True)
class _PendingTask:
    task: Task
    listen: Listener
    message: bytes  # the task as it was sent
    deadline: float = 0.0  # of the next report
    taken: bool = False  # whether a worker has reported on it
    sends: int = 0
    missing_since: float | None = None  # when it was in no queue, and no worker had reported on it

    def extend_deadline(self) -> None:
        # A worker that dies reports nothing, and the task may wait, and run, once more.
        self.deadline = time.monotonic() + self.task.wait_s + self.task.timeout_s


class BrokerEngine:
    """Runs tasks on the workers of a broker, which have the same store."""

    def __init__(self, store: str, broker: str) -> None:
        self._broker = Broker(broker)
        self._messages = LargeMessages(store)
        name = REPLIES + uuid.uuid4().hex
        self.replies = kombu.Queue(
            name, exchange=kombu.Exchange(""), routing_key=name, expires=REPLIES_KEPT_S
        )
        self._link = Link(self._broker, self._consume)
        self._connections = self._broker.connection().Pool(_MOST_CONNECTIONS)
        self._producers = kombu.pools.ProducerPool(self._connections, limit=_MOST_CONNECTIONS)
        self._pending: dict[str, _PendingTask] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._looked = 0.0
        self._load: tuple[float, Load] | None = None

    def submit(self, task: Task, listen: Listener) -> None:
        if self._stop.is_set():
            raise TaskCancelledError("the runtime is closed.")
        pending = _PendingTask(task, listen, self._messages.pack(task.frame(), task.id))
        pending.extend_deadline()
        with self._lock:
            self._pending[task.id] = pending
        try:
            self._send(pending)
        except self._broker.errors as exc:
            with self._lock:
                arrived = pending.taken  # and only the broker's answer was lost
                if not arrived:
                    del self._pending[task.id]
            if not arrived:
                self._messages.drop(pending.message)
                raise _unreachable(exc) from exc
        with self._lock:
            if self._pending and self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="kindler-replies", daemon=True)
                self._thread.start()

    def cancel(self, task_id: str) -> None:
        """Ask the workers to cancel the task, and ignore what they still report of it."""
        with self._lock:
            pending = self._pending.get(task_id)
        if pending is not None:
            self._abandon(task_id, Report.cancelled(f"{pending.task} was cancelled."))

    def load(self) -> Load:
        """The load; the answer is cached for a moment."""
        now = time.monotonic()
        if self._load is not None and now - self._load[0] < _LOAD_KEPT_S:
            return self._load[1]
        try:
            with self._broker.connection() as connection:
                connection.ensure_connection(**_PUBLISHING)
                answers = MAILBOX(connection).multi_call("load", timeout=_ANSWERS_S) or []
            loads = [load for answer in answers for load in answer.values() if "labels" in load]
            with self._lock:
                labels = {pending.task.label for pending in self._pending.values()}
            labels |= {"default", *(label for load in loads for label in load["labels"])}
            waiting = self._waiting(labels)
        except self._broker.errors as exc:
            raise _unreachable(exc) from exc
        workers, busy = (sum(load[name] for load in loads) for name in ("workers", "busy"))
        self._load = now, Load(engine=self._broker.kind, workers=workers, busy=busy, waiting=waiting)
        return self._load[1]

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            names = list(self._pending)
            thread = self._thread
        for name in names:
            self.cancel(name)
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)
        self._link.close()
        if self._link.was_open.is_set():
            try:
                with self._broker.connection() as connection:
                    self.replies(connection.default_channel).delete()
            except self._broker.errors as exc:
                _log.info("could not delete the reply queue, which will expire: %s", exc)
        self._producers.force_close_all()
        self._connections.force_close_all()
        self._messages.close()

    def _send(self, pending: _PendingTask) -> None:
        task, to = pending.task, task_queue(pending.task.label)
        pending.sends += 1
        with self._producers.acquire(block=True) as producer:
            publish(
                producer,
                pending.message,
                to.name,
                declare=[to, self.replies],
                correlation_id=task.id,
                reply_to=self.replies.name,
                headers={"retries": task.max_retries},
                retry=True,
                retry_policy=_PUBLISHING,
            )

    def _abandon(self, task_id: str, report: Report) -> None:
        """End a task here, ask the workers to do so, and take its message out of the store."""
        with self._lock:
            pending = self._pending.pop(task_id, None)
        if pending is None:
            return
        pending.listen(report)
        try:
            with self._broker.connection() as connection:
                connection.ensure_connection(**_PUBLISHING)
                MAILBOX(connection).abcast("cancel", {"task_id": task_id})
        except self._broker.errors as exc:
            _log.warning("could not ask the workers to cancel %s: %s", pending.task, exc)
        self._messages.drop(pending.message)

    def _waiting(self, labels: Iterable[str]) -> int:
        count = 0
        with self._broker.connection() as connection:
            for label in labels:
                try:
                    with connection.channel() as channel:
                        count += channel.queue_declare(task_queue(label).name, passive=True).message_count
                except connection.channel_errors:
                    continue  # nobody has used it yet
        return count

    def _listen(self) -> None:
        """Receive reports as long as some are awaited."""
        while True:
            with self._lock:
                if not self._pending or self._stop.is_set():
                    self._thread = None
                    return
            self._link.turn(self._find_lost, self._stop)

    def _consume(self, channel: Any) -> Any:
        consumer = kombu.Consumer(channel, [self.replies], on_message=self._receive, no_ack=True)
        consumer.consume()
        return consumer

    def _receive(self, message: Any) -> None:
        task_id, content = str(message.properties.get("correlation_id")), b""
        try:
            content = content_of(message)
            read_id, report = Report.read(self._messages.unpack(content))
            if read_id != task_id:
                raise FrameError(f"it belongs to the task {read_id[:40]!r}.")
        except (FrameError, StoreError, OSError) as exc:
            _log.warning("rejected a reply: %s", exc)
            unread = BrokerError(f"the task ended, but its result cannot be read here: {exc}")
            report = Report.failed(unread)
        self._messages.drop(content)
        with self._lock:
            pending = self._pending.get(task_id)
            if pending is None:
                return
            pending.taken = True
            pending.extend_deadline()
            if report.state != "running":
                del self._pending[task_id]
        pending.listen(report)

    def _find_lost(self) -> None:
        """Fail the tasks without a report for too long. Send tasks again that a worker of Redis took from the
        queue without a report: it was stopped, or lost, before it could note that it has them, and only the
        client can miss them. RabbitMQ itself notices a worker that gives no sign of life.
        """
        now, lease_s = time.monotonic(), self._broker.lease_s
        with self._lock:
            pending = list(self._pending.values())
        for one in pending:
            if one.deadline < now:
                self._abandon(one.task.id, Report.failed(_overdue(one.task)))
        if not self._broker.is_redis or now - self._looked < lease_s / 3:
            return
        self._looked = now
        silent = [one for one in pending if not one.taken and one.deadline >= now]
        sizes = {label: self._waiting({label}) for label in {one.task.label for one in silent}}
        for one in silent:
            if sizes[one.task.label]:
                one.missing_since = None  # it may be among those that wait
            elif one.missing_since is None:
                one.missing_since = now
            elif now - one.missing_since > lease_s:
                self._send_again(one)

    def _send_again(self, pending: _PendingTask) -> None:
        task, pending.missing_since = pending.task, None
        if pending.sends <= task.max_retries:
            _log.warning("%s was taken by a worker that does not respond; sending it again", task)
            self._send(pending)
            return
        error = BrokerError(
            f"{task} was sent {pending.sends} times, but no worker that took it responded.\n"
            "Hint: a worker may be stopped or hanging; for more attempts: runtime.options(max_retries=...)."
        )
        self._abandon(task.id, Report.failed(error))


def _unreachable(exc: BaseException) -> BrokerError:
    return BrokerError(
        f"cannot reach the broker: {exc}.\nHint: its URL is set by KINDLER_BROKER or Store(broker=...)."
    )


def _overdue(task: Task) -> BrokerError:
    label = "" if task.label == "default" else f" --label {task.label}"
    return BrokerError(
        f"{task} was abandoned: no worker reported on it for {task.wait_s + task.timeout_s:g} s.\n"
        f"Hint: start a worker with `kindler worker{label}`, or wait longer: runtime.options(wait_s=...)."
    )


class LargeMessages:
    """Packs and unpacks frames; those too large for a broker go through the store, as hidden datasets that
    their reader deletes, or any worker after a day. The broker then carries a frame of kind "parcel" that
    names the dataset. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store: VersionStore | None = None
        self._lock = threading.Lock()

    def pack(self, frame: Frame, name: str) -> bytes:
        """A frame as a message; `name` identifies it in the store."""
        content = pack(frame)
        if len(content) <= _LARGEST_BYTES:
            return content
        self._shelf().put(np.frombuffer(content, np.uint8), f"{_FOLDER}/{name}", mode="replace")
        return pack(Frame("parcel", {"name": name}))

    def unpack(self, content: bytes) -> Frame:
        """The frame of a message; raises FrameError, and NotFoundError if it is no longer in the store."""
        frame = unpack(content)
        if frame.kind != "parcel":
            return frame
        inside = self._shelf().get(_stored_name(frame))
        if not isinstance(inside, np.ndarray) or inside.dtype != np.uint8:
            raise FrameError("a message in the store is not an array of bytes.")
        return unpack(np.ascontiguousarray(inside).reshape(-1).data)

    def drop(self, content: bytes) -> None:
        """Delete the content of a message from the store, if it is there; after the last read."""
        try:
            frame = unpack(content)
            if frame.kind == "parcel":
                self._forget(_stored_name(frame))
        except FrameError:
            pass  # not one of ours
        except (StoreError, OSError) as exc:
            _log.warning("could not delete a large message, retrying after a day: %s", exc)

    def drop_old(self) -> None:
        """Delete messages that were not deleted by a reader."""
        limit = datetime.now(timezone.utc) - _LARGE_KEPT
        try:
            for version in self._shelf().newest(f"{_FOLDER}/*", hidden=True):
                if version.created < limit:
                    self._forget(version.name)
        except (StoreError, OSError) as exc:
            _log.warning("could not delete large messages that were never read: %s", exc)

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()

    def _forget(self, name: str) -> None:
        shelf = self._shelf()
        shelf.store.forget(Address(shelf.bucket, shelf.shelf, name))

    def _shelf(self) -> Datasets:
        with self._lock:
            if self._store is None:
                self._store = VersionStore.open(self._url)
            return Datasets(self._store, "default")


def _stored_name(frame: Frame) -> str:
    name = frame.fields.get("name")
    if not isinstance(name, str) or not name.replace("-", "").isalnum():
        raise FrameError("a message in the store has no valid name.")
    return f"{_FOLDER}/{name}"
