"""Rows of several requests in one call of a model.

Work-conserving: a free slot takes at once what waits, and requests gather only while all slots are busy.
First come, first served; the limit is in rows; what cannot be joined (other names, dtypes, shapes or methods)
never meets. All but the call itself happens on the event loop, so there are no locks, and nothing polls.

Requests share a call only if the model is known to compute each row by itself: it says so, or loading it has
shown it (`model_process.py`). A model's calls run in processes of its own (`model_pool.py`) or in threads
(`local_pool.py`), which look the same from here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kindler.errors import DataError
from kindler.models.signature import Array, Arrays
from kindler.sandbox.child import RemoteError
from kindler.sandbox.memory import Parts
from kindler.sandbox.process import Done, ProcessLost, Reply
from kindler.serve.http_errors import Problem, own_status
from kindler.serve.model_pool import problem_of
from kindler.serve.settings import ServeSettings

_EWMA_ALPHA = 0.2  # how fast the estimate of a row's time follows the newest call
_SCALE_UP_DELAY_S = 0.01  # that rows wait before another process is asked for


class Pool(Protocol):
    """What runs the calls of one version of a model."""

    when_free: Callable[[], None]

    @property
    def free(self) -> int:
        """How many calls could begin now."""

    @property
    def slots(self) -> int:
        """How many calls run at a time."""

    @property
    def is_down(self) -> bool:
        """Whether no call can be begun, and none will soon."""

    def call(self, parts: Parts, method: str, done: Done) -> None:
        """Begin a call; `done` is told of its end on the event loop."""

    def grow(self) -> None:
        """Rows have waited for a while."""


@dataclass(frozen=True, slots=True)
class CallStats:
    """One call of a model: its rows, of how many requests, and what it and the wait before it took."""

    rows: int
    requests: int
    seconds: float
    waited_s: float
    failed: bool


Observer: TypeAlias = Callable[[CallStats], None]


class Ticket:
    """A request that waits for its outputs: `future`, which fails with a Problem."""

    __slots__ = (
        "_batcher", "arrived", "batch", "bytes", "future", "inputs", "key", "method", "parts", "rows", "taken"
    )  # fmt: skip

    def __init__(
        self, batcher: Batcher, inputs: Arrays, method: str, rows: int, size: int, batch: bool
    ) -> None:
        self._batcher = batcher
        self.inputs = inputs
        self.method = method
        self.rows = rows
        self.bytes = size
        self.batch = batch
        self.arrived = batcher.clock()
        self.future: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self.taken = 0
        self.parts: dict[int, Arrays] = {}
        self.key: Hashable = (
            method,
            tuple((name, _kinds(array), array.shape[1:]) for name, array in inputs.items()),
        )

    def leave(self, problem: Problem | None = None) -> None:
        """Leave the queue, if it is still there; whoever awaits `future` gets the problem."""
        if self.future.done():
            return
        if problem is None:
            self.future.cancel()
        else:
            self.future.set_exception(problem)
        self._batcher.remove(self)


@dataclass(slots=True)
class _Piece:
    """Rows of a request that go into one call."""

    ticket: Ticket
    start: int
    stop: int

    def rows(self, name: str) -> Array:
        array = self.ticket.inputs[name]
        return array if self.stop - self.start == self.ticket.rows else array[self.start : self.stop]


class Batcher:
    """The queue in front of one version of a model."""

    def __init__(
        self,
        pool: Pool,
        settings: ServeSettings,
        batchable: Mapping[str, bool | None],
        observe: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._batchable = {method for method, joins in batchable.items() if joins}
        self._observe = observe
        self.clock = clock
        self._queues: dict[Hashable, deque[Ticket]] = {}
        self._again: deque[list[_Piece]] = deque()
        self._scheduled = self._growing = False
        self._row_s = 0.0
        self.rows_waiting = 0
        self.bytes_waiting = 0

    def submit(
        self, inputs: Arrays, method: str, *, rows: int, timeout_s: float, batch: bool = True
    ) -> Ticket:
        """Queue a request of so many rows, which may share a call with others if `batch`.

        Raises:
            Problem: 413, 429 or 503: it is too large, too much waits already, or it would not be in time.
        """
        settings = self._settings
        if self._pool.is_down:
            raise _unresponsive()
        if rows > settings.rows:
            raise Problem(413, f"the request has {rows} rows; at most {settings.rows} are allowed.")
        size = sum(array.nbytes for array in inputs.values())
        if self.rows_waiting and (
            self.rows_waiting + rows > settings.queue_rows or self.bytes_waiting + size > settings.queue_bytes
        ):
            raise Problem(
                429,
                f"too many rows are queued for this model: {self.rows_waiting}.",
                {"retry-after": self._retry_after()},
            )
        if self.rows_waiting * self._row_s / self._pool.slots > timeout_s:
            raise Problem(
                503,
                f"{self.rows_waiting} rows are queued for this model, too many to answer within"
                f" {timeout_s:g} s.",
                {"retry-after": self._retry_after()},
            )
        ticket = Ticket(self, inputs, method, rows, size, batch)
        self.rows_waiting += rows
        self.bytes_waiting += size
        self._queues.setdefault(ticket.key, deque()).append(ticket)
        if self._pool.free:
            if not self._scheduled:  # at the next turn of the loop: what arrived together goes together
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self._pump)
        elif not self._growing:
            self._growing = True
            asyncio.get_running_loop().call_later(_SCALE_UP_DELAY_S, self._grow)
        return ticket

    def pump(self) -> None:
        """Begin what waits, as far as there is room; a process has become free, or is not going to."""
        if self._pool.is_down:
            for ticket in [ticket for queue in self._queues.values() for ticket in queue]:
                ticket.leave(_unresponsive())
        self._pump()

    @property
    def is_stuck(self) -> bool:
        """Whether its calls do not return, or its processes do not start."""
        return self._pool.is_down

    def is_batchable(self, method: str) -> bool:
        """Whether requests share calls of a method."""
        return method in self._batchable

    def remove(self, ticket: Ticket) -> None:
        """A ticket was given up while some of its rows were waiting."""
        self._count_out(ticket, ticket.rows - ticket.taken)
        queue = self._queues.get(ticket.key)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._queues[ticket.key]

    def _count_out(self, ticket: Ticket, rows: int) -> None:
        self.rows_waiting -= rows
        self.bytes_waiting -= ticket.bytes * rows // ticket.rows

    def _retry_after(self) -> str:
        return str(max(1, round(self.rows_waiting * self._row_s)))

    def _grow(self) -> None:
        self._growing = False
        if self._pool.free or not self._queues:
            return
        if self.clock() - min(queue[0].arrived for queue in self._queues.values()) > _SCALE_UP_DELAY_S:
            self._pool.grow()

    def _pump(self) -> None:
        self._scheduled = False
        while self._pool.free and (self._again or self._queues):
            pieces = self._again.popleft() if self._again else self._take()
            pieces = [piece for piece in pieces if not piece.ticket.future.done()]
            if pieces:
                self._start(pieces)

    def _take(self) -> list[_Piece]:
        """The next batch, of the queue whose head has waited longest."""
        key = min(self._queues, key=lambda key: self._queues[key][0].arrived)
        queue, room = self._queues[key], self._settings.batch_rows
        batchable = queue[0].method in self._batchable
        pieces: list[_Piece] = []
        while queue and room:
            ticket = queue[0]
            left = ticket.rows - ticket.taken
            shared = batchable and ticket.batch
            # Only what is larger than a whole batch is cut; what does not fit goes first in the next.
            if pieces and (not shared or left > room):
                break
            rows = min(left, room) if shared else left
            pieces.append(_Piece(ticket, ticket.taken, ticket.taken + rows))
            ticket.taken += rows
            self._count_out(ticket, rows)
            if ticket.taken == ticket.rows:
                queue.popleft()
            room -= rows
            if not shared:
                break
        if not queue:
            del self._queues[key]
        return pieces

    def _start(self, pieces: list[_Piece]) -> None:
        started = self.clock()

        def done(reply: Reply) -> None:
            self._ended(pieces, reply, started)
            self._pump()

        first = pieces[0].ticket
        parts = {name: [piece.rows(name) for piece in pieces] for name in first.inputs}
        self._pool.call(parts, first.method, done)

    def _ended(self, pieces: list[_Piece], reply: Reply, started: float) -> None:
        rows = sum(piece.stop - piece.start for piece in pieces)
        seconds, error = self.clock() - started, reply.error
        if not isinstance(error, ProcessLost):  # which says nothing of the calls to come
            each = seconds / rows
            self._row_s = each if not self._row_s else self._row_s + _EWMA_ALPHA * (each - self._row_s)
        if self._observe is not None:
            waited_s = started - pieces[0].ticket.arrived
            self._observe(CallStats(rows, len(pieces), seconds, waited_s, error is not None))
        if error is None:
            self._deliver(pieces, reply.outputs, rows)
        elif len(pieces) == 1 or (isinstance(error, ProcessLost) and error.hung):
            for piece in pieces:
                if not piece.ticket.future.done():
                    piece.ticket.future.set_exception(_as_problem(error))
                    self.remove(piece.ticket)
        elif isinstance(error, ProcessLost):
            # Each alone: a process costs more than a call, and only one of these rows costs it another.
            self._again.extend([piece] for piece in pieces)
        else:
            # Someone's rows did it: the halves are tried apart, until it is alone.
            middle = len(pieces) // 2
            self._again.extend((pieces[:middle], pieces[middle:]))

    def _deliver(self, pieces: list[_Piece], outputs: Arrays, rows: int) -> None:
        wrong = any(not array.ndim or len(array) != rows for array in outputs.values())
        if wrong:
            self._batchable.discard(pieces[0].ticket.method)
        if len(pieces) == 1 and pieces[0].stop - pieces[0].start == pieces[0].ticket.rows:
            if not pieces[0].ticket.future.done():
                pieces[0].ticket.future.set_result(outputs)
        elif wrong:
            self._repeat_whole(pieces)
        else:
            start = 0
            for piece in pieces:
                stop = start + piece.stop - piece.start
                _hand_over(piece, {name: array[start:stop] for name, array in outputs.items()})
                start = stop

    def _repeat_whole(self, pieces: list[_Piece]) -> None:
        """Outputs that are not one row for each row of the inputs belong to whole requests only."""
        for ticket in dict.fromkeys(piece.ticket for piece in pieces):
            if not ticket.future.done():
                self.remove(ticket)
                ticket.taken = ticket.rows
                ticket.parts.clear()
                self._again.append([_Piece(ticket, 0, ticket.rows)])


def _hand_over(piece: _Piece, outputs: Arrays) -> None:
    ticket = piece.ticket
    if ticket.future.done():
        return
    if piece.stop - piece.start == ticket.rows:
        ticket.future.set_result(outputs)
        return
    ticket.parts[piece.start] = outputs
    if sum(len(next(iter(part.values()))) for part in ticket.parts.values()) == ticket.rows:
        ordered: Sequence[Arrays] = [ticket.parts[start] for start in sorted(ticket.parts)]
        ticket.future.set_result({name: np.concatenate([part[name] for part in ordered]) for name in outputs})


def _kinds(array: Array) -> Hashable:
    """What values an array has. Of objects the types: text beside bytes, or dates, would become one."""
    return array.dtype.str if array.dtype.kind != "O" else frozenset(map(type, array.ravel().tolist()))


def _unresponsive() -> Problem:
    return Problem(
        503,
        "the model is unresponsive: its calls timed out, or its process failed to start.",
        {"retry-after": "5"},
    )


def _as_problem(error: BaseException) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, ProcessLost):
        return problem_of(error)
    if isinstance(error, DataError):
        return Problem(400, str(error))
    if isinstance(error, MemoryError):
        return Problem(503, "there is not enough memory for this request.", {"retry-after": "5"})
    status, text = own_status(error, str(error))
    first = next(iter(text.splitlines()), "")
    name = error.name if isinstance(error, RemoteError) else type(error).__name__
    return Problem(status or 400, f"the model failed on these inputs: {name}: {first[:500]}")
