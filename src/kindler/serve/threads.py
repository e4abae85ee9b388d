"""Threads that nobody waits for when the process ends, and that go when they have nothing to do.

The standard library's pools are joined at exit, so one call that never returns keeps a server from stopping.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_IDLE_S = 10.0


class Threads(Executor):
    """Runs calls in the order of arrival, on threads that start when they are needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append((future, lambda: fn(*args, **kwargs)))
            if len(self._calls) > self._idle and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. Never waits: what runs is left to run."""
        with self._changed:
            self._closed = True
            while cancel_futures and self._calls:
                self._calls.popleft()[0].cancel()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls or self._closed, _IDLE_S)
                self._idle -= 1
                if not self._calls:
                    self._threads -= 1
                    return
                future, call = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as exc:  # noqa: BLE001 - whoever waits has it
                    future.set_exception(exc)
                else:
                    future.set_result(result)
                    del result
            del future, call
