"""The engine of a broker, the worker's side: `kindler worker`.

Celery takes tasks from the queues, one for each process; the processes are those of the local engine, which
runs a task again when one of them is lost. A task is acknowledged when its result was sent: if this whole
program dies, the broker gives the task to another.
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
from celery.worker.control import control_command

from kindler.errors import FrameError, NotFoundError
from kindler.runtime.local import LocalEngine
from kindler.runtime.messages import Report, Task, described
from kindler.runtime.messaging import CANCEL, CONTENT_TYPE, TASK, lease_of, make_app, queue_of
from kindler.runtime.parcels import Parcels

__all__ = ["run_worker"]

Receive: TypeAlias = Callable[[Any], None]

_log = logging.getLogger("kindler.runtime")
_HEARTBEAT_S = 30.0
_REMEMBERED = 10_000
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
    """Run tasks until the program is told to stop; gives its exit status.

    Args:
        store: The store's URL.
        broker: The broker's URL.
        labels: The tasks of which labels it takes.
        workers: How many at a time; None is one a core, and not more than four.
        trusted: Whether it runs functions and pickles of the store, for tasks that ask for it.
        say: Hears that it is ready.
    """
    app = make_app(broker, heartbeat_s=_HEARTBEAT_S)
    engine = LocalEngine(store, workers=workers, trusted=trusted, labels=tuple(labels))
    desk = _Desk(app, engine, Parcels(store))
    desk.parcels.tidy()

    def run(message: Any) -> None:
        desk.run(message)

    def cancel(state: Any, task_id: str, **_: Any) -> None:
        desk.cancel(task_id)

    app.task(name=TASK, shared=False)(run)
    control_command(name=CANCEL, args=[("task_id", str)])(cancel)
    app.steps["consumer"].add(_step(lease_of(broker)[1]))

    def ready(**_: Any) -> None:
        say(f"ready: {engine.workers} at a time, labels {', '.join(labels)}")

    signals.worker_ready.connect(ready, weak=False)
    try:
        worker = app.Worker(
            hostname=f"kindler-{socket.gethostname()}-{os.getpid()}",
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
        desk.parcels.close()


class _Desk:
    """Takes tasks from Celery, hands them to the engine, sends reports to whoever asked."""

    def __init__(self, app: Any, engine: LocalEngine, parcels: Parcels) -> None:
        self.parcels = parcels
        self._app = app
        self._engine = engine
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def run(self, message: Any) -> None:
        """Celery's task: ends when the result was sent."""
        try:
            task = Task.read(self.parcels.unpack(message))
        except (FrameError, NotFoundError) as exc:
            _log.error("a task was refused: %s", exc)
            return
        if task.id in self._cancelled:
            return
        ended = threading.Event()
        last: list[Report] = []

        def hear(report: Report) -> None:
            if report.state == "running":
                self._tell(task, report)
                return
            last.append(report)
            ended.set()

        try:
            self._engine.submit(task, hear)
        except Exception as exc:  # noqa: BLE001 - the edge of a task: whoever asked is told
            hear(Report("failed", error=described(exc)))
        ended.wait()
        try:
            self._reply(task, last[0])
        except Exception as exc:
            # Not acknowledged: it comes again, to this worker or another.
            raise Reject(str(exc), requeue=True) from exc
        self.parcels.drop(message)

    def cancel(self, task_id: str) -> None:
        """Celery's control command."""
        self._cancelled[task_id] = None
        while len(self._cancelled) > _REMEMBERED:
            self._cancelled.popitem(last=False)
        self._engine.cancel(task_id)

    def _tell(self, task: Task, report: Report) -> None:
        """What may be missed: the task goes on without it."""
        try:
            self._reply(task, report)
        except Exception as exc:  # noqa: BLE001 - each transport has its own errors
            _log.warning("%s could not be told that its task runs: %s", task.reply_to, exc)

    def _reply(self, task: Task, report: Report) -> None:
        if not task.reply_to:
            return
        message = self.parcels.pack(report.frame(task.id), f"{task.id}-reply")
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


def _step(lease_s: float) -> type[Any]:
    """A step of Celery's consumer that guards its door, and renews leases where the broker is Redis."""

    class Step(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def __init__(self, consumer: Any, **options: Any) -> None:
            super().__init__(consumer, **options)
            self._timer: Any = None
            consumer.create_task_handler = _guarded(consumer, consumer.create_task_handler)

        def start(self, consumer: Any) -> None:
            if consumer.connection.transport.driver_type == "redis" and consumer.hub is not None:
                self._timer = consumer.hub.call_repeatedly(lease_s / 3, _renew, consumer)

        def stop(self, consumer: Any) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Step


def _guarded(consumer: Any, make: Callable[..., Receive]) -> Callable[..., Receive]:
    """Refuses messages that are none of ours before Celery looks into them: some would end the worker."""

    def make_guarded(*args: Any, **options: Any) -> Receive:
        receive = make(*args, **options)

        def received(message: Any) -> None:
            try:
                if message.content_type != CONTENT_TYPE:
                    raise FrameError(f"it is {str(message.content_type)[:60]!r}")
                message.payload  # noqa: B018 - read now, while nothing depends on it
                receive(message)
            except Exception as exc:
                if isinstance(exc, consumer.connection_errors):
                    raise
                _log.error("a message was refused: %s", exc)
                if not message.acknowledged:
                    message.reject_log_error(_log, consumer.connection_errors)

        return received

    return make_guarded


def _renew(consumer: Any) -> None:
    channel = consumer.task_consumer.channel
    running = list(channel.qos._delivered)
    if running:
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(running, time.time()), xx=True)
