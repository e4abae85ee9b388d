"""The broker engine, worker side: `kindler worker`.

Celery takes tasks from the queues, one for each process; the processes are those of the local engine, which
retries a task when one of them is lost. A task is acknowledged after its result was sent: if this whole
program dies, the broker delivers the task to another worker.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from celery import bootsteps, signals
from celery.exceptions import Reject
from celery.worker.consumer import Consumer
from celery.worker.control import control_command, inspect_command
from celery.worker.state import maybe_shutdown

from kindler import jail
from kindler.errors import FrameError, NotFoundError
from kindler.runtime.celery_app import CANCEL, CONTENT_TYPE, LOAD, TASK, lease_of, make_app, queue_of
from kindler.runtime.large_messages import LargeMessages
from kindler.runtime.local import LocalEngine
from kindler.runtime.messages import Report, Task, described

__all__ = ["run_worker"]

Receive: TypeAlias = Callable[[Any], None]

_log = logging.getLogger("kindler.runtime")
_HEARTBEAT_S = 30.0
_REMEMBERED = 10_000
_AWAKE_S = 0.5
_RECONNECTING = {"interval_start": 0.5, "interval_step": 0.5, "interval_max": 5.0}
_PUBLISHING = {"max_retries": 10, "interval_start": 0.1, "interval_step": 0.5, "interval_max": 3.0}


def run_worker(
    store: str,
    broker: str,
    *,
    labels: Sequence[str] = ("default",),
    workers: int | None = None,
    trusted: bool = False,
    say: Callable[[str], None] = _log.info,
) -> int:
    """Run tasks until the program is stopped; returns its exit status.

    Args:
        store: The store's URL.
        broker: The broker's URL.
        labels: The labels of the tasks to take.
        workers: Tasks to run at a time; None is one per core, at most four.
        trusted: Whether tasks that request it may run functions and pickles of the store.
        say: Called with a line of text when the worker is ready.
    """
    lacking = None if trusted else jail.lacking()
    if lacking is not None:
        _log.warning(
            "models cannot be locked in here: %s. Only those of scikit-learn and PyTorch are called.\nHint:"
            " --trusted calls all of them, if you trust everybody who can write to the store.",
            lacking,
        )
    app = make_app(broker)
    engine = LocalEngine(store, workers=workers, trusted=trusted, labels=tuple(labels))
    runner = _TaskRunner(app, engine, LargeMessages(store))
    runner.messages.tidy()

    def run(message: Any) -> None:
        runner.run(message)

    def cancel(state: Any, task_id: str, **_: Any) -> None:
        runner.cancel(task_id)

    def load(state: Any) -> dict[str, Any]:
        current = engine.load()
        return {"workers": current.workers, "busy": current.busy, "labels": list(labels)}

    app.task(name=TASK, shared=False)(run)
    inspect_command(name=LOAD)(load)
    control_command(name=CANCEL, args=[("task_id", str)])(cancel)
    app.steps["consumer"].add(_step(lease_of(broker)[1]))

    def ready(**_: Any) -> None:
        say(f"ready: {engine.workers} tasks at a time, labels {', '.join(labels)}")

    signals.worker_ready.connect(ready, weak=False)
    try:
        worker = app.Worker(
            hostname=f"kindler-{socket.gethostname()}-{os.getpid()}",
            consumer_cls=_Consumer,
            pool="threads",
            concurrency=engine.workers,
            queues=[queue_of(label) for label in labels],
            loglevel="WARNING",
            quiet=True,
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        worker.start()
        return int(worker.exitcode or 0)
    finally:
        signals.worker_ready.disconnect(ready)
        engine.close()
        runner.messages.close()


class _TaskRunner:
    """Takes tasks from Celery, runs them on the engine, and sends the reports to the client.

    A task may come more than once: the broker, or the connection to it, was lost before it was acknowledged.
    """

    def __init__(self, app: Any, engine: LocalEngine, messages: LargeMessages) -> None:
        self.messages = messages
        self._app = app
        self._engine = engine
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    def run(self, message: Any) -> None:
        """Celery's task; returns after the result was sent."""
        try:
            task = Task.read(self.messages.unpack(message))
        except (FrameError, NotFoundError) as exc:
            _log.error("rejected a task: %s", exc)
            return
        sent = threading.Event()
        while (earlier := self._running.setdefault(task.id, sent)) is not sent:
            earlier.wait()
        try:
            if task.id not in self._over:
                self._reply(task, self._ended(task))
                self._remember(task.id)
                self.messages.drop(message)
        except Exception as exc:
            # Not acknowledged, so it is delivered again, to this worker or another.
            raise Reject(str(exc), requeue=True) from exc
        finally:
            del self._running[task.id]
            sent.set()

    def cancel(self, task_id: str) -> None:
        """Celery's control command."""
        self._remember(task_id)
        self._engine.cancel(task_id)

    def _ended(self, task: Task) -> Report:
        """Run a task to its end; returns the last report and sends the others."""
        ended = threading.Event()
        last: list[Report] = []

        def listen(report: Report) -> None:
            if report.state == "running":
                self._notify(task, report)
                return
            last.append(report)
            ended.set()

        try:
            self._engine.submit(task, listen)
        except Exception as exc:  # noqa: BLE001 - the edge of a task: the client gets the error
            listen(Report("failed", error=described(exc)))
        ended.wait()
        return last[0]

    def _remember(self, task_id: str) -> None:
        with self._lock:
            self._over[task_id] = None
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)

    def _notify(self, task: Task, report: Report) -> None:
        """Send a report that may get lost: the task runs on without it."""
        try:
            self._reply(task, report)
        except Exception as exc:  # noqa: BLE001 - each transport has its own errors
            _log.warning("could not tell %s that its task is running: %s", task.reply_to, exc)

    def _reply(self, task: Task, report: Report) -> None:
        if not task.reply_to:
            return
        message = self.messages.pack(report.frame(task.id), f"{task.id}-reply")
        with self._app.amqp.producer_pool.acquire(block=True) as producer:
            producer.publish(
                message,
                exchange="",
                routing_key=task.reply_to,
                serializer=None,
                content_type=CONTENT_TYPE,
                content_encoding="binary",
                retry=True,
                retry_policy=_PUBLISHING,
            )


class _Consumer(Consumer):  # type: ignore[misc]
    """Celery's consumer, reconnecting more often, and rejecting messages that are not ours."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "amqheartbeat": _HEARTBEAT_S})

    def ensure_connected(self, connection: Any) -> Any:
        """See Celery."""

        def away(exc: Exception, interval: float) -> None:
            _log.warning("lost the connection to the broker, reconnecting in %g s: %s", interval, exc)

        return connection.ensure_connection(away, **_RECONNECTING, callback=maybe_shutdown)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """See Celery."""
        try:
            super().on_connection_error_after_connected(exc)
        except Exception as error:  # noqa: BLE001 - kombu's Redis fails to give back tasks that are not acknowledged
            _log.info("the lost connection was not closed cleanly: %r", error)

    def create_task_handler(self, *args: Any, **options: Any) -> Receive:
        """See Celery."""
        receive = super().create_task_handler(*args, **options)

        def received(message: Any) -> None:
            try:
                if message.content_type != CONTENT_TYPE:
                    raise FrameError(f"unexpected content type {str(message.content_type)[:60]!r}")
                message.payload  # noqa: B018 - read now, while nothing depends on it
                message.ack_log_error = _harmless(message.ack_log_error)
                message.reject_log_error = _harmless(message.reject_log_error)
                receive(message)
            except Exception as exc:
                if isinstance(exc, self.connection_errors):
                    raise
                # Celery would end the worker for some of them.
                _log.error("rejected a message: %s", exc)
                if not message.acknowledged:
                    message.reject_log_error(_log, self.connection_errors)

        return received


def _harmless(answer: Callable[..., None]) -> Callable[..., None]:
    """Ignore errors of an answer to the broker: without it the message is delivered again."""

    def answered(*args: Any, **options: Any) -> None:
        try:
            answer(*args, **options)
        except Exception as exc:  # noqa: BLE001 - kombu's Redis raises what it does not call an error
            _log.info("could not acknowledge a task, which will be delivered again: %r", exc)

    return answered


def _step(lease_s: float) -> type[Any]:
    """A step of Celery's consumer that wakes it, and renews leases where the broker is Redis."""

    class Step(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def __init__(self, consumer: Any, **options: Any) -> None:
            super().__init__(consumer, **options)
            self._timers: list[Any] = []

        def start(self, consumer: Any) -> None:
            every = consumer.hub.call_repeatedly
            self._timers = [every(_AWAKE_S, _look_up)]
            if consumer.connection.transport.driver_type == "redis":
                self._timers.append(every(lease_s / 3, _renew, consumer))

        def stop(self, consumer: Any) -> None:
            while self._timers:
                self._timers.pop().cancel()

    return Step


def _look_up() -> None:
    """Wakes Celery's loop, which notices only then that it is to stop."""


def _renew(consumer: Any) -> None:
    channel = consumer.task_consumer.channel
    running = list(channel.qos._delivered)
    if running:
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(running, time.time()), xx=True)
