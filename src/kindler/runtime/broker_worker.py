"""The broker engine, worker side: `kindler worker`.

Each task that may run has a slot: a thread with a connection of its own that takes one task at a time, gives
it to the local engine, and keeps it, and the connection, while it runs. A task is acknowledged after its last
report was sent. If this program dies, the broker delivers the task to another worker, which counts that.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import kombu

from kindler import sandbox
from kindler.errors import BrokerError, FrameError, StoreError, WorkerLostError
from kindler.runtime.broker import (
    LOOK_S,
    MAILBOX,
    REPLIES,
    Broker,
    LargeMessages,
    Link,
    content_of,
    is_unroutable,
    task_queue,
)
from kindler.runtime.local import LocalEngine
from kindler.runtime.messages import Report, Task, pack

_log = logging.getLogger("kindler.runtime")
_HEARTBEAT_S = 30.0  # of RabbitMQ
_GLANCE_S = 0.01
_TIDY_S = 3600.0
_NEWS_S = 60.0  # between two reports that a task is running
_REMEMBERED = 10_000  # tasks that have ended
_MOST_REFUSED = 4  # times that a reply is refused by a broker that is there
_LAST_TRIES = 10  # to send a reply, of a worker that is to stop


class Worker:
    """Runs the tasks of a broker: what the slots share, and the commands of clients.

    A task may come more than once: the broker, or the connection to it, was lost before it was acknowledged.
    So `running` and `finished` have the ids of tasks.
    """

    def __init__(
        self, store: str, broker: str, *, labels: Sequence[str], workers: int | None, trusted: bool
    ) -> None:
        self.broker = Broker(broker)
        self.engine = LocalEngine(store, workers=workers, trusted=trusted, labels=tuple(labels))
        self.messages = LargeMessages(store)
        self.labels = list(labels)
        self.stopping = threading.Event()
        self.running: dict[str, threading.Event] = {}
        self.finished: OrderedDict[str, None] = OrderedDict()
        self.pool = ThreadPoolExecutor(self.engine.workers, thread_name_prefix="kindler-task")
        self._commands = Link(self.broker, self._consume, _HEARTBEAT_S)
        self._lock = threading.Lock()
        self._restore_at = 0.0
        if not trusted and (reason := sandbox.unavailable_reason()) is not None:
            _log.warning(
                "sandboxing is unavailable: %s. Only scikit-learn and PyTorch models can be called.\nHint:"
                " --trusted allows all models, if you trust everyone who can write to the store.",
                reason,
            )

    def run(self, say: Callable[[str], None]) -> None:
        """Run tasks until the program gets SIGINT or SIGTERM, and those to their end. `say` is called with a
        line of text when the worker is ready."""

        def stop(*_: Any) -> None:
            self.stopping.set()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)  # a second signal does not wait for tasks

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        slots = [_Slot(self) for _ in range(self.engine.workers)]
        threads = [threading.Thread(target=slot.run, name="kindler-slot", daemon=True) for slot in slots]
        threads.append(threading.Thread(target=self._listen, name="kindler-commands", daemon=True))
        for thread in threads:
            thread.start()
        for link in [self._commands, *(slot.link for slot in slots)]:
            while not link.was_open.wait(LOOK_S) and not self.stopping.is_set():
                pass
        if not self.stopping.is_set():
            say(f"ready: {self.engine.workers} tasks at a time, labels {', '.join(self.labels)}")
        while not self.stopping.is_set():
            self.messages.drop_old()
            self.stopping.wait(_TIDY_S)
        for thread in threads:
            thread.join()
        self.engine.close()
        self.pool.shutdown()
        self.messages.close()

    def _listen(self) -> None:
        while not self.stopping.is_set():
            self._commands.turn(self._restore_lost, self.stopping)
        self._commands.close()

    def _consume(self, channel: Any) -> Any:
        name = f"kindler-{socket.gethostname()}-{os.getpid()}"
        handlers = {"load": self._load, "cancel": self._cancel}
        node = MAILBOX(channel.connection.client).Node(name, channel=channel, handlers=handlers)

        def dispatch(body: Any, message: Any) -> None:
            try:
                node.handle_message(body, message)
            except Exception as exc:  # noqa: BLE001 - a command that no client of ours sends
                _log.warning("rejected a command: %r", exc)

        return node.listen(channel, callback=dispatch)

    def _restore_lost(self) -> None:
        """Give tasks whose lease is over back to their queues; slots do so only when they have been idle."""
        if self.broker.is_redis and self._commands.is_open and time.monotonic() >= self._restore_at:
            self._restore_at = time.monotonic() + self.broker.lease_s / 3
            self._commands.channel.qos.restore_visible(num=None, interval=1)

    def _load(self, _: Any) -> dict[str, Any]:
        load = self.engine.load()
        return {"workers": load.workers, "busy": load.busy, "labels": self.labels}

    def _cancel(self, _: Any, task_id: str) -> None:
        self.remember(task_id)
        self.engine.cancel(task_id)

    def remember(self, task_id: str) -> None:
        with self._lock:
            self.finished[task_id] = None
            while len(self.finished) > _REMEMBERED:
                self.finished.popitem(last=False)

    def reply(self, task_id: str, content: bytes) -> bytes:
        """Run the task of a message to its end; returns the message with its last report."""
        try:
            task = Task.read(self.messages.unpack(content))
            if task.id != task_id:
                raise FrameError("its id does not match its message.")
        except (FrameError, StoreError, OSError) as exc:
            _log.error("rejected a task: %s", exc)
            return failed(task_id, BrokerError(f"a worker cannot read the task: {exc}"))
        last: queue.SimpleQueue[Report] = queue.SimpleQueue()

        def listen(report: Report) -> None:
            if report.state != "running":
                last.put(report)

        try:
            self.engine.submit(task, listen)
            return self.messages.pack(last.get().frame(task_id), f"{task_id}-reply")
        except (StoreError, OSError) as exc:
            return failed(task_id, _unsent("stored", exc))
        except Exception as exc:  # noqa: BLE001 - the edge of a task: the client gets the error
            return failed(task_id, exc)


class _Slot:
    """Takes one task at a time from the queues, over a connection of its own, and answers for it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._broker = worker.broker
        self._tick_s = min(5.0, worker.broker.lease_s / 3)
        self._arrived: deque[Any] = deque()
        self.link = Link(worker.broker, self._consume, _HEARTBEAT_S)

    def run(self) -> None:
        while not self._worker.stopping.is_set():
            self.link.turn(self._take_all, self._worker.stopping)
        try:
            self._give_back()
        except Exception as exc:  # noqa: BLE001 - the broker does it, later
            _log.info("could not return a task to its queue: %r", exc)
        self.link.close()

    def _consume(self, channel: Any) -> Any:
        self._arrived.clear()  # RabbitMQ delivers them again, Redis after their lease
        queues = [task_queue(label) for label in self._worker.labels]
        consumer = kombu.Consumer(channel, queues, on_message=self._arrived.append)
        # Of all queues together; RabbitMQ 4 knows a limit of each of them only.
        each = channel.connection.client.qos_semantics_matches_spec
        consumer.qos(prefetch_count=1, apply_global=not each)
        consumer.consume()
        return consumer

    def _take_all(self) -> None:
        # What came over a connection that was lost is delivered again.
        while self._arrived and self.link.is_open and not self._worker.stopping.is_set():
            self._take(self._arrived.popleft())

    def _take(self, message: Any) -> None:
        """Run the task of a message, send its last report, and only then acknowledge it."""
        try:
            content, (task_id, retries) = content_of(message), _of_task(message)
        except FrameError as exc:
            _log.error("rejected a message: %s", exc)
            message.reject()
            return
        worker, ended = self._worker, threading.Event()
        while (earlier := worker.running.setdefault(task_id, ended)) is not ended:
            if not earlier.wait(self._tick_s):  # it came again, and still runs here
                self._keep(message)
        try:
            if task_id not in worker.finished:
                lost = bool(message.delivery_info.get("redelivered"))
                if lost and retries > 0:
                    self._hand_on(message, retries - 1)
                    return
                reply = failed(task_id, _lost()) if lost else self._run(message, task_id, content)
                self._deliver(message, task_id, reply)
                worker.remember(task_id)
            worker.messages.drop(content)
            self._acknowledge(message)
        finally:
            del worker.running[task_id]
            ended.set()

    def _run(self, message: Any, task_id: str, content: bytes) -> bytes:
        """Run the task in another thread; this one keeps it, and tells the client that it is running."""
        reply: Future[bytes] = self._worker.pool.submit(self._worker.reply, task_id, content)
        # At once, before a process has started: a client sends a task again that nobody seems to have.
        news_at = time.monotonic()
        while True:
            if time.monotonic() >= news_at:
                news_at += _NEWS_S
                try:
                    self._publish(message, task_id, pack(Report("running").frame(task_id)))
                except Exception as exc:  # noqa: BLE001 - each transport has its own errors; it may get lost
                    _log.warning("could not report that the task %s is running: %s", task_id, exc)
            if wait([reply], timeout=self._tick_s).done:
                return reply.result()
            self._keep(message)

    def _keep(self, message: Any) -> None:
        """Tell the broker that this worker lives, and has the task."""
        try:
            if self._broker.is_redis:
                from kindler.runtime.transports import renew

                self.link.open()
                renew(self.link.channel, message.delivery_tag)
            elif self.link.is_open:
                self.link.drain(_GLANCE_S)
        except Exception as exc:  # noqa: BLE001 - each transport has its own errors
            _log.warning("lost the connection to the broker; the running task continues: %s", exc)
            self.link.close()

    def _deliver(self, message: Any, task_id: str, reply: bytes) -> None:
        """Send the last report, as soon as the broker is there; or the error, if it refuses that. A report
        that cannot be sent never makes a task run again."""
        refused = 0
        for attempt in itertools.count(1):
            try:
                self.link.open()
                self._publish(message, task_id, reply)
                return
            except self._broker.errors as exc:
                _log.warning("could not send the result of the task %s: %s", task_id, exc)
                self.link.close()
                if self._worker.stopping.is_set() and attempt >= _LAST_TRIES:
                    raise
            except Exception as exc:  # noqa: BLE001 - each transport has its own errors
                _log.warning("could not send the result of the task %s: %s", task_id, exc)
                refused += 1
                if refused > _MOST_REFUSED:
                    return
                if not is_unroutable(exc):  # a client that lives will declare its queue again
                    reply = failed(task_id, _unsent("sent", exc))
            time.sleep(min(0.5 * attempt, 5.0))

    def _publish(self, message: Any, task_id: str, reply: bytes) -> None:
        to = message.properties.get("reply_to")
        if isinstance(to, str) and to.startswith(REPLIES) and self.link.is_open:
            self.link.publish(reply, to, correlation_id=task_id)

    def _acknowledge(self, message: Any) -> None:
        if self._worker.stopping.is_set():
            self.link.consumer.cancel()  # or RabbitMQ would send the next task
        # Redis knows a task by its tag alone; RabbitMQ has already given those of a lost channel to others.
        if self._broker.is_redis or message.channel is self.link.channel:
            self.link.channel.basic_ack(message.delivery_tag)

    def _hand_on(self, message: Any, retries: int) -> None:
        """Put a task back into its queue, with the number of times that its worker may still be lost."""
        same = {name: message.properties.get(name) for name in ("correlation_id", "reply_to")}
        to = message.delivery_info["routing_key"]
        self.link.publish(bytes(message.body), to, headers={"retries": retries}, **same)
        self._acknowledge(message)

    def _give_back(self) -> None:
        """At the end: a task that has arrived, and was not begun, was not lost."""
        if not self.link.is_open:
            return
        if self._broker.is_redis:
            self.link.channel.close()  # which reads what it has asked for
            self.link.channel = self.link.connection.channel()
        else:
            self.link.consumer.cancel()
        while self._arrived:
            message = self._arrived.popleft()
            self._hand_on(message, _of_task(message)[1])


def _of_task(message: Any) -> tuple[str, int]:
    """The id of a message's task, and how often its worker may still be lost."""
    task_id, retries = message.properties.get("correlation_id"), message.headers.get("retries")
    if not isinstance(task_id, str) or not task_id or type(retries) is not int:
        raise FrameError(f"unexpected headers {str(message.headers)[:200]}.")
    return task_id, retries


def failed(task_id: str, error: BaseException) -> bytes:
    return pack(Report.failed(error).frame(task_id))


def _unsent(verb: str, problem: Exception) -> BrokerError:
    return BrokerError(f"the task ended, but its result could not be {verb}: {problem}")


def _lost() -> WorkerLostError:
    reason = "it was lost before it had a result, and the task's max_retries are used up"
    return WorkerLostError(reason, rank=None, host="an unknown host")
