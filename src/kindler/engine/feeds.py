"""Batches of bytes between the driver and a running worker: in order, bounded, each feed one way.

The writer may be ahead by a window of bytes and then waits; neither end waits for one that is gone. Nothing
here touches a socket, and `Feeds.received` never blocks, so feeds can share a worker's connection.

    feed.open    writer -> reader   name, window
    feed.data    writer -> reader   name, and the batch
    feed.end     writer -> reader   name, problem (None: all was sent)
    feed.taken   reader -> writer   name, size
    feed.closed  reader -> writer   name, reason
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

from kindler import limits
from kindler.errors import FeedError
from kindler.frame import Frame, Piece

Batch: TypeAlias = tuple[bytes, ...]

WINDOW_BYTES = 32 << 20
_BATCH_COST = 256  # of the smallest batch, so that their number is bounded as well
_PREFIX = "feed."
_UNACKNOWLEDGED = 4  # a reader acknowledges at the latest after this part of the window


def is_feed(kind: str) -> bool:
    return kind.startswith(_PREFIX)


def _size(batch: tuple[Piece, ...]) -> int:
    return _BATCH_COST + sum(memoryview(piece).nbytes for piece in batch)


class Feeds:
    def __init__(
        self,
        other: str,
        send: Callable[..., None] | None = None,
        *,
        waiting: Callable[[], None] = lambda: None,
        changed: threading.Condition | None = None,
    ) -> None:
        self.other = other  # who is at the other side, for messages
        # Notified whenever something came; one that several `Feeds` share lets a program wait for any.
        self.changed = changed or threading.Condition()
        self.waiting = waiting  # called about every second while a reader waits
        self._send = send  # sends a frame; None until `connect`, and what is written meanwhile is kept
        self._unsent: list[tuple[str, tuple[Piece, ...], dict[str, Any]]] = []
        self._writers: dict[str, FeedWriter] = {}
        self._readers: dict[str, FeedReader] = {}
        self._over: tuple[str | None] | None = None

    def writer(self, name: str, window_bytes: int = WINDOW_BYTES) -> FeedWriter:
        with self.changed:
            if name not in self._writers:
                self._writers[name] = FeedWriter(self, name, window_bytes)
                self.emit("open", name=name, window=window_bytes)
                if self._over is not None:
                    self._writers[name].other_is_over(self._over[0])
            return self._writers[name]

    def reader(self, name: str) -> FeedReader:
        with self.changed:
            if name not in self._readers:
                self._readers[name] = FeedReader(self, name)
                if self._over is not None:
                    self._readers[name].other_is_over(self._over[0])
            return self._readers[name]

    def connect(self, send: Callable[..., None]) -> None:
        with self.changed:
            if self._send is None:
                for kind, batch, fields in self._unsent:
                    send(kind, *batch, **fields)
                self._unsent.clear()
                self._send = send

    def received(self, frame: Frame) -> None:
        name, kind, fields = str(frame.fields["name"]), frame.kind.removeprefix(_PREFIX), frame.fields
        with self.changed:
            if kind == "open":
                self.reader(name).window_bytes = int(fields["window"])
            elif kind == "data":
                self.reader(name).add(frame.buffers)
            elif kind == "end":
                self.reader(name).ended(fields["problem"])
            elif kind == "taken" and name in self._writers:
                self._writers[name].taken(int(fields["size"]))
            elif kind == "closed" and name in self._writers:
                self._writers[name].closed(
                    f"{self.other} closed it{fields['reason'] and ': '}{fields['reason']}"
                )
            self.changed.notify_all()

    def close(self, problem: str | None) -> None:
        """The peer has ended; `problem` is None if it ended well."""
        with self.changed:
            if self._over is None:
                self._over = (problem,)
                for writer in self._writers.values():
                    writer.other_is_over(problem)
                for reader in self._readers.values():
                    reader.other_is_over(problem)
                self._unsent.clear()
                self.changed.notify_all()

    def emit(self, kind: str, *batch: Piece, **fields: Any) -> None:
        with self.changed:
            send = self._send
            if send is None:
                self._unsent.append((_PREFIX + kind, batch, fields))
        if send is not None:
            send(_PREFIX + kind, *batch, **fields)


class FeedWriter:
    """The writing end of a feed. As a context manager it ends the feed, and passes on an exception."""

    def __init__(self, feeds: Feeds, name: str, window_bytes: int) -> None:
        self.name = name
        self._feeds = feeds
        self._window_bytes = window_bytes
        self._ahead = 0
        self._taken = 0
        self._ended = False
        self._problem: str | None = None

    def put(self, *batch: Piece, timeout_s: float | None = None) -> None:
        """Send buffers, which are not copied: do not modify them. None waits forever for a slow reader."""
        size = _size(batch)
        with self._feeds.changed:
            while not self._has_room(size):
                if not self._feeds.changed.wait_for(partial(self._has_moved, self._taken, size), timeout_s):
                    raise FeedError(
                        f"feed {self.name!r}: {self._feeds.other} has taken nothing for {timeout_s:g} s."
                    )
            self._check()
            self._ahead += size
        self._feeds.emit("data", *batch, name=self.name)

    def has_room(self, *batch: Piece) -> bool:
        with self._feeds.changed:
            return self._has_room(_size(batch))

    @property
    def ahead(self) -> int:
        return self._ahead

    @property
    def has_ended(self) -> bool:
        return self._ended

    def end(self) -> None:
        self._end(None)

    def fail(self, problem: str) -> None:
        self._end(problem)

    def __enter__(self) -> FeedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(None if exc is None else f"{type(exc).__name__}: {exc}")

    def taken(self, size: int) -> None:
        self._ahead -= size
        self._taken += size

    def closed(self, problem: str) -> None:
        self._problem = self._problem or problem

    def other_is_over(self, problem: str | None) -> None:
        self.closed(problem or f"{self._feeds.other} has returned and reads no more")

    def _has_room(self, size: int) -> bool:
        ready = self._ahead == 0 or self._ahead + size <= self._window_bytes
        return ready or self._ended or self._problem is not None

    def _has_moved(self, taken: int, size: int) -> bool:
        return self._taken != taken or self._has_room(size)

    def _check(self) -> None:
        if self._problem is not None:
            raise FeedError(f"feed {self.name!r}: {self._problem}.")
        if self._ended:
            raise FeedError(f"feed {self.name!r}: it has ended and accepts no more.")

    def _end(self, problem: str | None) -> None:
        with self._feeds.changed:
            if self._ended:
                return
            self._ended = True
            gone = self._problem is not None
            self._feeds.changed.notify_all()
        if not gone:
            self._feeds.emit("end", name=self.name, problem=problem)


class FeedReader:
    def __init__(self, feeds: Feeds, name: str) -> None:
        self.name = name
        self.window_bytes = WINDOW_BYTES
        self._feeds = feeds
        self._batches: deque[Batch] = deque()
        self._unacknowledged = 0
        self._ended = False
        self._closed = False
        self._problem: str | None = None

    def get(self, timeout_s: float | None = None) -> Batch | None:
        """Return the next batch, or None at the end; raise FeedError if the writer failed or ended early."""
        left_s = timeout_s
        with self._feeds.changed:
            while not self._feeds.changed.wait_for(
                lambda: self._batches or self._ended,
                limits.WAKE_S if left_s is None else min(left_s, limits.WAKE_S),
            ):
                self._feeds.waiting()
                if left_s is not None and (left_s := left_s - limits.WAKE_S) <= 0:
                    raise TimeoutError(f"feed {self.name!r}: nothing was received in {timeout_s:g} s.")
            if not self._batches:
                if self._problem is not None:
                    raise FeedError(f"feed {self.name!r}: {self._problem}.")
                return None
            batch = self._batches.popleft()
            self._unacknowledged += _size(batch)
            taken = self._unacknowledged
            if self._batches and taken * _UNACKNOWLEDGED < self.window_bytes:
                return batch
            self._unacknowledged = 0
        self._feeds.emit("taken", name=self.name, size=taken)
        return batch

    @property
    def has_batch(self) -> bool:
        return bool(self._batches)

    @property
    def is_over(self) -> bool:
        return self._ended and not self._batches

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self.get()) is not None:
            yield batch

    def close(self, reason: str = "") -> None:
        """Stop reading: batches on their way are dropped, and the writer gets the reason."""
        with self._feeds.changed:
            if self._closed:
                return
            self._closed, over = True, self._ended
            self._ended = True
            self._batches.clear()
        if not over:
            self._feeds.emit("closed", name=self.name, reason=reason)

    def add(self, batch: Batch) -> None:
        if not self._closed:
            self._batches.append(batch)

    def ended(self, problem: str | None) -> None:
        if not self._ended:
            self._ended, self._problem = True, problem

    def other_is_over(self, problem: str | None) -> None:
        """If the writing process returned, that is the end of what it wrote."""
        self.ended(problem)
