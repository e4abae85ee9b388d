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

from kindler import sandbox
from kindler.errors import BrokerError, FrameError, StoreError
from kindler.runtime.celery_app import (
    CANCEL,
    CONTENT_TYPE,
    LOAD,
    TASK,
    errors_of,
    lease_of,
    make_app,
    queue_of,
)
from kindler.runtime.large_messages import LARGEST_BYTES, LargeMessages, reply_name, whose
from kindler.runtime.local import LocalEngine
from kindler.runtime.messages import Report, Task, described

Receive: TypeAlias = Callable[[Any], None]

_log = logging.getLogger("kindler.runtime")
_HEARTBEAT_S = 30.0
_REMEMBERED = 10_000
_MOST_UNSENT = 100  # reports that are kept while the broker is away
_MOST_FAILURES = 3  # times that sending one of them is tried; each has the retries of _PUBLISHING
_PAUSES_S = (0.0, 1.0, 3.0, 9.0)  # before each attempt to send the error instead of the result
_AWAKE_S = 0.5
_TIDY_S = 3600.0
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
    lacking = None if trusted else sandbox.unavailable_reason()
    if lacking is not None:
        _log.warning(
            "sandboxing is unavailable: %s. Only those of scikit-learn and PyTorch are called.\nHint:"
            " --trusted calls all of them, if you trust everybody who can write to the store.",
            lacking,
        )
    app = make_app(broker)
    engine = LocalEngine(store, workers=workers, trusted=trusted, labels=tuple(labels))
    runner = _TaskRunner(app, engine, LargeMessages(store))
    runner.tidy()

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
    app.steps["consumer"].add(_step(lease_of(broker)[1], runner.tidy))

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
        self._unsent: OrderedDict[str, tuple[Report, int]] = OrderedDict()
        self._away = errors_of(app)

    def run(self, message: Any) -> None:
        """Celery's task; returns after the result was sent, or could not be."""
        try:
            task = Task.read(self.messages.unpack(message))
        except (FrameError, StoreError, OSError) as exc:
            _log.error("rejected a task: %s", exc)
            task_id, queue = whose(message) if isinstance(message, bytes) else ("", "")
            unread = BrokerError(f"a worker cannot read the task, which is in the store: {exc}")
            self._notify(queue, task_id, Report("failed", error=described(unread)))
            return
        sent = threading.Event()
        while (earlier := self._running.setdefault(task.id, sent)) is not sent:
            earlier.wait()
        try:
            if task.id not in self._over:
                report, failures = self._unsent.pop(task.id, (None, 0))
                self._deliver(task, report or self._ended(task), failures)
                self._remember(task.id)
                self.messages.drop(message)
        finally:
            del self._running[task.id]
            sent.set()

    def _deliver(self, task: Task, report: Report, failures: int) -> None:
        """Send the last report of a task, or the error that it cannot be sent. The task is not run again.

        Raises:
            Reject: The broker is away; the task is delivered again, and its report is then sent.
        """
        try:
            self._reply(task.reply_to, task.id, report)
            return
        except self._away as exc:
            if failures < _MOST_FAILURES:
                self._unsent[task.id] = (report, failures + 1)
                while len(self._unsent) > _MOST_UNSENT:
                    self._unsent.popitem(last=False)
                raise Reject(str(exc), requeue=True) from exc
            problem: BaseException = exc
        except Exception as exc:  # noqa: BLE001 - the store's errors and each transport's own
            problem = exc
        _log.error("could not send the result of %s: %s", task, problem)
        error = BrokerError(f"{task} has ended ({report.state}), and its result could not be sent: {problem}")
        failed = Report("failed", error=described(error), log=report.log)
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            if self._notify(task.reply_to, task.id, failed):
                return

    def tidy(self) -> None:
        """Delete large messages that were never read for a day, beside everything else."""
        threading.Thread(target=self._tidy, name="kindler-tidy", daemon=True).start()

    def _tidy(self) -> None:
        try:
            self.messages.tidy()
        except Exception as exc:  # noqa: BLE001 - of the store, which may be away; there is a next time
            _log.warning("could not delete large messages that were never read: %s", exc)

    def cancel(self, task_id: str) -> None:
        """Celery's control command."""
        self._remember(task_id)
        self._engine.cancel(task_id)

    def _ended(self, task: Task) -> Report:
        """Run a task to its end; returns the last report and sends the others."""
        ended = threading.Event()
        last: list[Report] = []
        starts = 0
        # At once, before a process has started: a client sends a task again that nobody seems to have.
        self._notify(task.reply_to, task.id, Report("running"))

        def listen(report: Report) -> None:
            nonlocal starts
            if report.state == "running":
                starts += 1
                if starts > 1:  # on another process: the client waits for that one
                    self._notify(task.reply_to, task.id, report)
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

    def _notify(self, queue: str, task_id: str, report: Report) -> bool:
        """Send a report that may get lost; returns whether it was sent."""
        try:
            self._reply(queue, task_id, report)
        except Exception as exc:  # noqa: BLE001 - each transport has its own errors
            _log.warning("could not tell %s that its task is %s: %s", queue, report.state, exc)
            return False
        return True

    def _reply(self, queue: str, task_id: str, report: Report) -> None:
        if not queue:
            return
        try:
            message = self.messages.pack(report.frame(task_id), reply_name(task_id))
        except OSError as exc:  # a disk that is full, which is no broker that is away
            raise StoreError(f"a message cannot be stored: {exc}") from exc
        with self._app.amqp.producer_pool.acquire(block=True) as producer:
            producer.publish(
                message,
                exchange="",
                routing_key=queue,
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
                _check(message)
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


def _check(message: Any) -> None:
    """Raise for a message that no client of ours sends; Celery would believe what its headers say."""
    if message.content_type != CONTENT_TYPE:
        raise FrameError(f"unexpected content type {str(message.content_type)[:60]!r}")
    if not isinstance(message.body, bytes | memoryview) or len(message.body) > 2 * LARGEST_BYTES:
        raise FrameError(f"unexpected body, or one of more than {2 * LARGEST_BYTES} bytes")
    headers = message.headers
    if headers.get("task") != TASK or not isinstance(headers.get("id"), str) or headers.get("eta"):
        raise FrameError(f"unexpected headers {str(headers)[:200]}")
    message.payload  # noqa: B018 - read now, while nothing depends on it


def _harmless(answer: Callable[..., None]) -> Callable[..., None]:
    """Ignore errors of an answer to the broker: without it the message is delivered again."""

    def answered(*args: Any, **options: Any) -> None:
        try:
            answer(*args, **options)
        except Exception as exc:  # noqa: BLE001 - kombu's Redis raises what it does not call an error
            _log.info("could not acknowledge a task, which will be delivered again: %r", exc)

    return answered


def _step(lease_s: float, tidy: Callable[[], None]) -> type[Any]:
    """A step of Celery's consumer that wakes it, tidies, and renews leases where the broker is Redis."""

    class Step(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def __init__(self, consumer: Any, **options: Any) -> None:
            super().__init__(consumer, **options)
            self._timers: list[Any] = []

        def start(self, consumer: Any) -> None:
            every = consumer.hub.call_repeatedly
            self._timers = [every(_AWAKE_S, _look_up), every(_TIDY_S, tidy)]
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
