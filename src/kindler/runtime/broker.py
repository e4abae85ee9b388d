"""The broker engine, client side: tasks go to Celery's queues, reports come back on the client's own queue.

The worker side is `broker_worker.py`, which `kindler worker` starts.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kindler.errors import BrokerError, FrameError, KindlerError, StoreError, TaskCancelledError
from kindler.runtime.celery_app import (
    CANCEL,
    CONTENT_TYPE,
    LOAD,
    TASK,
    errors_of,
    lease_of,
    make_app,
    queue_of,
    reply_queue,
)
from kindler.runtime.engine import Listener, Load
from kindler.runtime.large_messages import LargeMessages, whose
from kindler.runtime.messages import Report, Task, described
from kindler.runtime.reply_queues import REPLIES

_log = logging.getLogger("kindler.runtime")
_LOOK_S = 1.0
_BACKOFF_S = 1.0
_ANSWERS_S = 0.5  # how long to collect answers: nobody knows how many workers there are
_LOAD_KEPT_S = 2.0
_PUBLISHING = {"max_retries": 3, "interval_start": 0.1, "interval_step": 0.3, "interval_max": 1.0}


@dataclass(slots=True)
class _PendingTask:
    """A submitted task, and the deadline of its next report.

    Attributes:
        message: The task as it was sent.
        taken: Whether a worker has reported on it.
        sends: How often it was sent.
        missing_since: Since when it is in no queue and no worker has reported on it.
    """

    task: Task
    listen: Listener
    message: bytes
    deadline: float = 0.0
    taken: bool = False
    sends: int = 0
    missing_since: float | None = None

    def extend_deadline(self) -> None:
        # A worker that dies reports nothing, and the task may wait, and run, once more.
        self.deadline = time.monotonic() + self.task.wait_s + self.task.timeout_s


class BrokerEngine:
    """Runs tasks on the workers of a broker. See `Engine`.

    Args:
        store: The store's URL; workers have the same one.
        broker: The broker's URL.
    """

    def __init__(self, store: str, broker: str) -> None:
        self._kind = broker.partition(":")[0]
        self._app = make_app(broker)
        self._lease_s = lease_of(broker)[1]
        self._looked = 0.0
        # Celery would ask workers over a connection that may have broken, and try for ever.
        self._app.control.mailbox.producer_pool = None
        self._away = errors_of(self._app)
        self._messages = LargeMessages(store)
        self._replies = reply_queue(REPLIES + uuid.uuid4().hex)
        self._awaited: dict[str, _PendingTask] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection: Any = None
        self._declared = False
        self._stop = threading.Event()
        self._load: tuple[float, Load] | None = None

    def submit(self, task: Task, listen: Listener) -> None:
        """See `Engine`.

        Raises:
            BrokerError: The broker cannot be reached.
        """
        if self._stop.is_set():
            raise TaskCancelledError("the runtime is closed.")
        task = task.replying_to(self._replies.name)
        message = self._messages.pack(task.frame(), task.id)
        awaited = _PendingTask(task, listen, message)
        awaited.extend_deadline()
        with self._lock:
            self._awaited[task.id] = awaited
        try:
            self._declare()
            self._send(awaited)
        except self._away as exc:
            with self._lock:
                self._awaited.pop(task.id, None)
            self._messages.drop(message)
            raise _unreachable(exc) from exc
        with self._lock:
            if self._awaited and self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="kindler-replies", daemon=True)
                self._thread.start()

    def _send(self, awaited: _PendingTask) -> None:
        task = awaited.task
        awaited.sends += 1
        self._app.send_task(
            TASK,
            args=[awaited.message],
            task_id=task.id,
            queue=queue_of(task.label),
            argsrepr=f"({task},)",
            ignore_result=True,
            retry=True,
            retry_policy=_PUBLISHING,
        )

    def cancel(self, task_id: str) -> None:
        """See `Engine`. Asks the workers to cancel the task, and ignores what they still report of it."""
        with self._lock:
            awaited = self._awaited.pop(task_id, None)
        if awaited is not None:
            self._abandon(awaited, "cancelled", TaskCancelledError(f"{awaited.task} was cancelled."))

    def load(self) -> Load:
        """See `Engine`. The answer is cached for a moment."""
        now = time.monotonic()
        if self._load is not None and now - self._load[0] < _LOAD_KEPT_S:
            return self._load[1]
        try:
            answers = self._ask(LOAD, reply=True, timeout=_ANSWERS_S) or []
            loads = [load for answer in answers for load in answer.values() if "labels" in load]
            with self._lock:
                labels = {awaited.task.label for awaited in self._awaited.values()}
            labels |= {"default", *(label for load in loads for label in load["labels"])}
            waiting = self._waiting(labels)
        except self._away as exc:
            raise _unreachable(exc) from exc
        total = Load(
            engine=self._kind,
            workers=sum(load["workers"] for load in loads),
            busy=sum(load["busy"] for load in loads),
            waiting=waiting,
        )
        self._load = now, total
        return total

    def close(self) -> None:
        """See `Engine`."""
        self._stop.set()
        with self._lock:
            names = list(self._awaited)
            thread = self._thread
        for name in names:
            self.cancel(name)
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)
        self._disconnect()
        if self._declared:
            try:
                with self._app.connection_for_write() as connection:
                    self._replies(connection.default_channel).delete()
            except self._away as exc:
                _log.info("could not delete the reply queue, which will expire: %s", exc)
        self._app.close()
        self._messages.close()

    def _abandon(self, awaited: _PendingTask, state: str, error: KindlerError) -> None:
        awaited.listen(Report(state, error=described(error)))
        try:
            self._ask(CANCEL, arguments={"task_id": awaited.task.id})
        except self._away as exc:
            _log.warning("could not ask the workers to cancel %s: %s", awaited.task, exc)

    def _ask(self, command: str, **options: Any) -> Any:
        """Broadcast a command; returns the workers' answers if `reply` is set."""
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(**_PUBLISHING)
            return self._app.control.broadcast(command, connection=connection, **options)

    def _waiting(self, labels: Iterable[str]) -> int:
        count = 0
        with self._app.connection_for_read() as connection:
            for label in labels:
                try:
                    with connection.channel() as channel:
                        count += channel.queue_declare(queue_of(label), passive=True).message_count
                except connection.channel_errors:
                    continue  # nobody has used it yet
        return count

    def _declare(self) -> None:
        """Declare the reply queue before a task is sent: replies to a missing queue are dropped."""
        with self._lock:
            if self._thread is not None and self._declared:
                return  # it is listened to, so it has not expired
            with self._app.amqp.producer_pool.acquire(block=True) as producer:
                queue = self._replies(producer.channel)
                producer.connection.ensure(queue, queue.declare, **_PUBLISHING)()
            self._declared = True

    def _listen(self) -> None:
        """Receive reports as long as some are awaited."""
        while True:
            with self._lock:
                if not self._awaited or self._stop.is_set():
                    self._thread = None
                    return
            self._give_up()
            try:
                try:
                    self._connected().drain_events(timeout=_LOOK_S)
                except TimeoutError:
                    self._look_for_missing()
            except Exception as exc:  # noqa: BLE001 - each transport has its own errors, and tasks must not be lost
                _log.warning("lost the connection to the broker, reconnecting: %s", exc)
                self._disconnect()
                self._stop.wait(_BACKOFF_S)

    def _give_up(self) -> None:
        """Fail the tasks without a report for too long."""
        now = time.monotonic()
        with self._lock:
            late = [name for name, awaited in self._awaited.items() if awaited.deadline < now]
            overdue = [self._awaited.pop(name) for name in late]
        for awaited in overdue:
            silence = awaited.task.wait_s + awaited.task.timeout_s
            self._abandon(awaited, "failed", _overdue(awaited.task, silence))

    def _look_for_missing(self) -> None:
        """Send tasks again that a worker of Redis took from the queue without a report.

        It was stopped, or lost, before it could note that it has them; only the client can miss them then.
        RabbitMQ itself notices a worker that gives no sign of life.
        """
        now = time.monotonic()
        if not self._kind.startswith("redis") or now - self._looked < self._lease_s / 3:
            return
        self._looked = now
        with self._lock:
            silent = [awaited for awaited in self._awaited.values() if not awaited.taken]
        sizes = {label: self._waiting({label}) for label in {awaited.task.label for awaited in silent}}
        for awaited in silent:
            if sizes[awaited.task.label]:
                awaited.missing_since = None  # it may be among those that wait
            elif awaited.missing_since is None:
                awaited.missing_since = now
            elif now - awaited.missing_since > self._lease_s:
                self._send_again(awaited)

    def _send_again(self, awaited: _PendingTask) -> None:
        task, awaited.missing_since = awaited.task, None
        if awaited.sends <= task.max_retries:
            _log.warning("%s was taken by a worker that gives no sign of life; sending it again", task)
            self._send(awaited)
            return
        with self._lock:
            if self._awaited.pop(task.id, None) is None:
                return
        self._abandon(
            awaited,
            "failed",
            BrokerError(
                f"{task} was sent {awaited.sends} times, and no worker that took it gave a sign of life.\n"
                "Hint: a worker may be stopped, or hang; more attempts: runtime.options(max_retries=...)."
            ),
        )

    def _connected(self) -> Any:
        if self._connection is None:
            connection = self._app.connection_for_read(heartbeat=0)
            try:
                connection.ensure_connection(**_PUBLISHING)
                consumer = connection.Consumer(
                    [self._replies], on_message=self._receive, no_ack=True, accept=[CONTENT_TYPE]
                )
                consumer.consume()
            except BaseException:
                connection.release()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.release()
            except Exception as exc:  # noqa: BLE001 - it is broken, and is left behind
                _log.info("could not close a broken connection to the broker: %s", exc)

    def _receive(self, message: Any) -> None:
        content = b""
        try:
            content = _content(message)
            task_id, report = Report.read(self._messages.unpack(content))
            self._messages.drop(content)
        except (FrameError, StoreError, OSError) as exc:
            _log.warning("rejected a reply: %s", exc)
            task_id, report = whose(content)[0], Report("failed", error=described(_unreadable(exc)))
        with self._lock:
            awaited = self._awaited.get(task_id)
            if awaited is None:
                return
            awaited.taken = True
            awaited.extend_deadline()
            if report.state != "running":
                del self._awaited[task_id]
        awaited.listen(report)


def _content(message: Any) -> bytes:
    if message.content_type != CONTENT_TYPE:
        raise FrameError(f"unexpected content type {str(message.content_type)[:60]!r}.")
    return bytes(message.body)


def _unreachable(exc: BaseException) -> BrokerError:
    return BrokerError(
        f"cannot reach the broker: {exc}.\nHint: its URL is set by KINDLER_BROKER or Omega(broker=...)."
    )


def _unreadable(exc: BaseException) -> BrokerError:
    return BrokerError(f"the task has ended, and its result, in the store, cannot be read here: {exc}")


def _overdue(task: Task, silence_s: float) -> BrokerError:
    label = "" if task.label == "default" else f" --label {task.label}"
    return BrokerError(
        f"{task} was abandoned: no worker reported on it for {silence_s:g} s.\n"
        f"Hint: start a worker with `kindler worker{label}`, or wait longer: runtime.options(wait_s=...)."
    )
