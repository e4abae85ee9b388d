"""The engine of a broker, the client's side: tasks go to Celery's queues, reports come back on a queue of
its own.

The other side is `broker_worker.py`, which `kindler worker` starts.
"""

from __future__ import annotations

import logging
import threading
import uuid
from typing import Any

import kombu.exceptions

from kindler.errors import BrokerError, FrameError, KindlerError, StoreError, TaskCancelledError
from kindler.runtime.engines import Listener
from kindler.runtime.messages import Report, Task, described
from kindler.runtime.messaging import CANCEL, CONTENT_TYPE, TASK, make_app, queue_of, reply_queue
from kindler.runtime.parcels import Parcels

__all__ = ["BrokerEngine"]

_log = logging.getLogger("kindler.runtime")
_LOOK_S = 1.0
_BACKOFF_S = 1.0
_PUBLISHING = {"max_retries": 3, "interval_start": 0.1, "interval_step": 0.3, "interval_max": 1.0}


class BrokerEngine:
    """Runs tasks on the workers of a broker. See `Engine`.

    Args:
        store: The store's URL; workers have the same one.
        broker: The broker's URL.
    """

    def __init__(self, store: str, broker: str) -> None:
        self._app = make_app(broker)
        self._parcels = Parcels(store)
        self._replies = reply_queue(f"kindler.reply.{uuid.uuid4().hex}")
        self._listeners: dict[str, Listener] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection: Any = None
        self._consumer: Any = None
        self._declared = False
        self._stop = threading.Event()

    def submit(self, task: Task, listen: Listener) -> None:
        """See `Engine`.

        Raises:
            BrokerError: The broker cannot be reached.
        """
        if self._stop.is_set():
            raise TaskCancelledError("the runtime is closed.")
        task = task.replying_to(self._replies.name)
        message = self._parcels.pack(task.frame(), task.id)
        with self._lock:
            self._listeners[task.id] = listen
        try:
            self._declare()
            self._app.send_task(
                TASK,
                args=[message],
                task_id=task.id,
                queue=queue_of(task.label),
                argsrepr=f"({task.verb}() of {task.name!r},)",
                ignore_result=True,
                retry=True,
                retry_policy=_PUBLISHING,
            )
        except (kombu.exceptions.OperationalError, OSError) as exc:
            with self._lock:
                self._listeners.pop(task.id, None)
            raise _unreachable(exc) from exc
        with self._lock:
            if self._listeners and self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="kindler-replies", daemon=True)
                self._thread.start()

    def cancel(self, task_id: str) -> None:
        """See `Engine`. Workers that are there are told; what they still say of the task is not heard."""
        with self._lock:
            listen = self._listeners.pop(task_id, None)
        if listen is None:
            return
        try:
            self._app.control.broadcast(CANCEL, arguments={"task_id": task_id})
        except (kombu.exceptions.OperationalError, OSError) as exc:
            _log.warning("the broker could not be told to cancel %s: %s", task_id, exc)
        listen(Report("cancelled", error=described(TaskCancelledError("the task was cancelled."))))

    def close(self) -> None:
        """See `Engine`."""
        with self._lock:
            names = list(self._listeners)
            thread = self._thread
        for name in names:
            self.cancel(name)
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)
        self._disconnect()
        if self._declared:
            try:
                with self._app.connection_for_write() as connection:
                    self._replies(connection.default_channel).delete()
            except (kombu.exceptions.OperationalError, OSError) as exc:
                _log.info("the queue of replies stays until it expires: %s", exc)
        self._app.close()
        self._parcels.close()

    def _declare(self) -> None:
        """Replies to a queue that is not there are dropped: it comes before the first task."""
        with self._lock:
            if self._declared:
                return
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(**_PUBLISHING)
                self._replies(connection.default_channel).declare()
            self._declared = True

    def _listen(self) -> None:
        """Hear reports as long as some are awaited."""
        while True:
            with self._lock:
                if not self._listeners or self._stop.is_set():
                    self._thread = None
                    return
            try:
                self._connected().drain_events(timeout=_LOOK_S)
            except TimeoutError:
                continue
            except Exception as exc:  # noqa: BLE001 - each transport has its own errors, and tasks must not be lost
                _log.warning("the broker is away, and is tried again: %s", exc)
                self._disconnect()
                self._stop.wait(_BACKOFF_S)

    def _connected(self) -> Any:
        if self._connection is None:
            connection = self._app.connection_for_read(heartbeat=0)
            try:
                connection.ensure_connection(**_PUBLISHING)
                self._consumer = connection.Consumer(
                    [self._replies], on_message=self._heard, no_ack=True, accept=[CONTENT_TYPE]
                )
                self._consumer.consume()
            except BaseException:
                connection.release()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection, self._consumer = self._connection, None, None
        if connection is not None:
            try:
                connection.release()
            except Exception as exc:  # noqa: BLE001 - it is broken, and is left behind
                _log.info("a broken connection to the broker: %s", exc)

    def _heard(self, message: Any) -> None:
        try:
            content = _content(message)
            task_id, report = Report.read(self._parcels.unpack(content))
            self._parcels.drop(content)
        except (FrameError, StoreError) as exc:
            _log.warning("a reply was refused: %s", exc)
            return
        with self._lock:
            listen = (
                self._listeners.get(task_id)
                if report.state == "running"
                else self._listeners.pop(task_id, None)
            )
        if listen is not None:
            listen(report)


def _content(message: Any) -> bytes:
    if message.content_type != CONTENT_TYPE:
        raise FrameError(f"it is {str(message.content_type)[:60]!r}.")
    return bytes(message.body)


def _unreachable(exc: BaseException) -> KindlerError:
    return BrokerError(f"the broker cannot be reached: {exc}.\nHint: KINDLER_BROKER, or Omega(broker=...).")
