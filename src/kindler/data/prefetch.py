"""Make the next items while the current one is being used."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
J = TypeVar("J")


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BaseException | None


def ahead(items: Iterator[T], *, depth: int, name: str) -> Generator[T, None, None]:
    """A thread runs at most `depth` items ahead; it starts with the first `next`, and has ended when the
    generator has. Errors of `items` are raised here."""
    slots = threading.Semaphore(depth)
    ready: queue.SimpleQueue[T | _Ended] = queue.SimpleQueue()
    stopped = threading.Event()

    def make() -> None:
        try:
            while slots.acquire() and not stopped.is_set():
                ready.put(next(items))
        except StopIteration:
            ready.put(_Ended(None))
        except BaseException as exc:  # noqa: BLE001 (it is raised by whoever waits for the next item)
            ready.put(_Ended(exc))

    thread = threading.Thread(target=make, name=name, daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _Ended):
            slots.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        slots.release()
        thread.join()
        close = getattr(items, "close", None)
        if close is not None:
            close()


def in_pool(
    jobs: Iterable[J], make: Callable[[J], T], *, threads: int, name: str
) -> Generator[T, None, None]:
    """Maps in order, in threads that run slightly ahead and have ended when the generator has. `jobs` is
    consumed in the caller's thread; an error is raised where its item would have come."""
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(make, job))
                if len(waiting) > threads + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
