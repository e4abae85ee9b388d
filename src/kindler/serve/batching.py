"""Rows of several requests in one call of a model.

Work-conserving: a free slot takes at once what waits, and requests gather only while all slots are busy.
First come, first served; the limit is in rows; what cannot be joined (other names, dtypes, shapes or methods)
never meets. All but the call itself happens on the event loop, so there are no locks, and nothing polls.

A model on a GPU takes a second call while it computes the first, so that one is copied meanwhile; that call
may gather for a part of the first one's time, as nothing stands idle. Batches of a model that was prepared
for some sizes are cut to these, unless little would be padded.

Requests share a call only if the model is known to compute each row by itself: it says so, or loading it has
shown it (`model_process.py`). The calls run in processes or threads, which look the same from here
(`model_pool.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from kindler.errors import DataError
from kindler.models.signature import Array, Arrays
from kindler.sandbox.child import RemoteError
from kindler.sandbox.process import ProcessLost, Reply
from kindler.serve.http_errors import Problem, own_status
from kindler.serve.model_pool import Pool
from kindler.serve.settings import ServeSettings

_EWMA_ALPHA = 0.2  # how fast the estimate of a row's time follows the newest call
_GATHERING = 0.25  # of the time of a call, which a second one beside it may gather for
_LONGEST_GATHERING_S = 0.005
_PADDED = 0.25  # of a batch, at most
_SCALE_UP_DELAY_S = 0.01  # that rows wait before another process is asked for


@dataclass(frozen=True, slots=True)
class CallStats:
    """One call of a model: its rows, of how many requests, and what it and the wait before it took."""

    rows: int
    requests: int
    seconds: float
    waited_s: float
    failed: bool


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits for its outputs: `future`, which fails with a Problem."""

    batcher: Batcher
    inputs: Arrays
    method: str
    rows: int
    bytes: int
    batch: bool
    arrived: float
    future: asyncio.Future[Arrays]
    key: Hashable  # of all requests that may share a call
    taken: int = 0
    parts: dict[int, Arrays] = field(default_factory=dict)

    def leave(self, problem: Problem | None = None) -> None:
        """Leave the queue, if it is still there; whoever awaits `future` gets the problem."""
        if self.future.done():
            return
        if problem is None:
            self.future.cancel()
        else:
            self.future.set_exception(problem)
        self.batcher.remove(self)


class _Piece(NamedTuple):
    """Rows of a request that go into one call."""

    ticket: Ticket
    start: int
    stop: int
    is_whole: bool

    def rows(self, name: str) -> Array:
        array = self.ticket.inputs[name]
        return array if self.is_whole else array[self.start : self.stop]


class Batcher:
    """The queue in front of one version of a model."""

    def __init__(
        self,
        pool: Pool,
        settings: ServeSettings,
        batchable: Mapping[str, bool | None],
        observe: Callable[[CallStats], None] = lambda call: None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._batchable = {method for method, joins in batchable.items() if joins}
        self._observe = observe
        self._clock = clock
        self._queues: dict[Hashable, deque[Ticket]] = {}
        self._again: deque[list[_Piece]] = deque()
        self._sizes = sizes
        self._scheduled = self._growing = False
        self._gathering: asyncio.TimerHandle | None = None
        self._row_s = self._call_s = 0.0
        self.rows_waiting = 0
        self.bytes_waiting = 0

    def submit(
        self, inputs: Arrays, method: str, *, rows: int, timeout_s: float, batch: bool = True
    ) -> Ticket:
        """Queue a request, which may share a call with others if `batch`.

        Raises:
            Problem: 413, 429 or 503: it is too large, too much waits already, or it would not be in time.
        """
        settings, waiting = self._settings, self.rows_waiting
        if self._pool.is_down:
            raise unresponsive()
        if rows > settings.rows:
            raise Problem(413, f"the request has {rows} rows; at most {settings.rows} are allowed.")
        size = sum(array.nbytes for array in inputs.values())
        refused: tuple[int, str] | None = None
        if waiting and (
            waiting + rows > settings.queue_rows or self.bytes_waiting + size > settings.queue_bytes
        ):
            refused = 429, f"too many rows are queued for this model: {waiting}."
        elif waiting * self._row_s / self._pool.slots > timeout_s:
            refused = 503, f"{waiting} rows are queued for this model, too many to finish within"
            f" {timeout_s:g} s."
        if refused is not None:
            raise Problem(*refused, {"retry-after": str(max(1, round(waiting * self._row_s)))})
        key = (method, tuple((name, _kinds(array), array.shape[1:]) for name, array in inputs.items()))
        future = asyncio.get_running_loop().create_future()
        ticket = Ticket(self, inputs, method, rows, size, batch, self._clock(), future, key)
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
                ticket.leave(unresponsive())
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

    def _grow(self) -> None:
        self._growing = False
        if self._pool.free or not self._queues:
            return
        if self._clock() - min(queue[0].arrived for queue in self._queues.values()) > _SCALE_UP_DELAY_S:
            self._pool.grow()

    def _pump(self) -> None:
        self._scheduled = False
        while self._pool.free and (self._again or self._queues):
            if not self._again and self._gathers():
                return
            pieces = self._again.popleft() if self._again else self._take()
            pieces = [piece for piece in pieces if not piece.ticket.future.done()]
            if pieces:
                self._start(pieces)

    def _gathers(self) -> bool:
        """Whether what waits would begin beside another call, and may still become more."""
        if not self._pool.is_next_beside_another or self.rows_waiting >= self._settings.batch_rows:
            return False
        first = min(queue[0].arrived for queue in self._queues.values())
        left = first + min(_GATHERING * self._call_s, _LONGEST_GATHERING_S) - self._clock()
        if left <= 0:
            return False
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(left, self._gathered)
        return True

    def _gathered(self) -> None:
        self._gathering = None
        self._pump()

    def _take(self) -> list[_Piece]:
        """The next batch, of the queue whose head has waited longest."""
        key = min(self._queues, key=lambda key: self._queues[key][0].arrived)
        queue, room = self._queues[key], self._settings.batch_rows
        batchable = queue[0].method in self._batchable
        if batchable and self._sizes:
            first = min(room, queue[0].rows - queue[0].taken)
            waiting = sum(ticket.rows - ticket.taken for ticket in islice(queue, room))
            room = max(first, cut(min(room, waiting), self._sizes))
        pieces: list[_Piece] = []
        while queue and room:
            ticket = queue[0]
            left = ticket.rows - ticket.taken
            shared = batchable and ticket.batch
            # Only what is larger than a whole batch is cut; what does not fit goes first in the next.
            if pieces and (not shared or left > room):
                break
            rows = min(left, room) if shared else left
            pieces.append(_Piece(ticket, ticket.taken, ticket.taken + rows, rows == ticket.rows))
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
        started = self._clock()

        def done(reply: Reply) -> None:
            self._ended(pieces, reply, started)
            self._pump()

        first = pieces[0].ticket
        parts = {name: [piece.rows(name) for piece in pieces] for name in first.inputs}
        self._pool.call(parts, first.method, done)

    def _ended(self, pieces: list[_Piece], reply: Reply, started: float) -> None:
        rows = sum(piece.stop - piece.start for piece in pieces)
        seconds, error = self._clock() - started, reply.error
        if not isinstance(error, ProcessLost):  # which says nothing of the calls to come
            each = seconds / rows
            self._row_s = each if not self._row_s else self._row_s + _EWMA_ALPHA * (each - self._row_s)
            self._call_s += _EWMA_ALPHA * (seconds - self._call_s)
        waited_s = started - pieces[0].ticket.arrived
        self._observe(CallStats(rows, len(pieces), seconds, waited_s, error is not None))
        if error is None:
            self._deliver(pieces, reply.outputs, rows)
        elif len(pieces) == 1 or (isinstance(error, ProcessLost) and error.hung):
            for piece in pieces:
                if not piece.ticket.future.done():
                    piece.ticket.future.set_exception(as_call_problem(error))
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
        if len(pieces) == 1 and pieces[0].is_whole:
            _deliver_piece(pieces[0], outputs)
        elif wrong:  # outputs that are not one row for each row of the inputs belong to whole requests only
            for ticket in dict.fromkeys(piece.ticket for piece in pieces):
                if not ticket.future.done():
                    self.remove(ticket)
                    ticket.taken = ticket.rows
                    ticket.parts.clear()
                    self._again.append([_Piece(ticket, 0, ticket.rows, True)])
        else:
            start = 0
            for piece in pieces:
                stop = start + piece.stop - piece.start
                _deliver_piece(piece, {name: array[start:stop] for name, array in outputs.items()})
                start = stop


def cut(rows: int, sizes: tuple[int, ...]) -> int:
    """How many rows of those that wait to take: all, if little is padded to the next of the sizes.

    >>> [cut(rows, (1, 2, 4, 8)) for rows in (1, 3, 5, 6, 7, 9)]
    [1, 3, 4, 6, 7, 9]
    """
    above = min((size for size in sizes if size >= rows), default=rows)
    below = max((size for size in sizes if size <= rows), default=rows)
    return rows if above - rows <= _PADDED * above else below


def _deliver_piece(piece: _Piece, outputs: Arrays) -> None:
    ticket = piece.ticket
    if ticket.future.done():
        return
    if piece.is_whole:
        ticket.future.set_result(outputs)
        return
    ticket.parts[piece.start] = outputs
    if sum(len(next(iter(part.values()))) for part in ticket.parts.values()) == ticket.rows:
        ordered = [ticket.parts[start] for start in sorted(ticket.parts)]
        ticket.future.set_result({name: np.concatenate([part[name] for part in ordered]) for name in outputs})


def _kinds(array: Array) -> Hashable:
    """What values an array has. Of objects the types: text beside bytes, or dates, would become one."""
    return array.dtype.str if array.dtype.kind != "O" else frozenset(map(type, array.ravel().tolist()))


def unresponsive() -> Problem:
    return Problem(
        503,
        "the model is unresponsive: its calls timed out, or its process failed to start.",
        {"retry-after": "5"},
    )


def as_call_problem(error: BaseException) -> Problem:
    """What a client is told of a call that failed."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ProcessLost):
        if error.hung:
            return Problem(504, "the model did not answer in time.")
        if error.by_memory:
            return Problem(503, "the model exceeded its memory limit.", {"retry-after": "5"})
        return Problem(500, f"the model failed on these inputs: its process {error.reason}.")
    if isinstance(error, DataError):
        return Problem(400, str(error))
    if isinstance(error, MemoryError):
        return Problem(503, "there is not enough memory for this request.", {"retry-after": "5"})
    status, text = own_status(error, str(error))
    first = next(iter(text.splitlines()), "")
    name = error.name if isinstance(error, RemoteError) else type(error).__name__
    return Problem(status or 400, f"the model failed on these inputs: {name}: {first[:500]}")
