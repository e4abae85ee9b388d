"""Rows of several requests in one call of a model.

Work-conserving: a free slot takes at once what waits, and requests gather only while all slots are busy.
First come, first served; the limit is in rows; what cannot be joined (other names, dtypes, shapes or methods)
never meets. All but the call itself happens on the event loop, so there are no locks, and nothing polls.

Requests share a call only if the model is known to compute each row by itself (see `row_independence.py`).
Until that is known they go alone, and the first rows that wait together and differ are a trial.

A model in the server's own process is called in a thread, or on the event loop too if its calls were short:
going to a thread and back would take longer than the call. A model in processes of its own (`model_pool.py`)
is sent a batch as one message, and its end is heard on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kindler.errors import DataError
from kindler.models.row_independence import tried
from kindler.models.signature import Array, Arrays
from kindler.sandbox.child import RemoteError
from kindler.sandbox.memory import Parts
from kindler.sandbox.process import Done, ProcessLost, Reply
from kindler.serve.http_errors import Problem, own_status
from kindler.serve.model_pool import problem_of
from kindler.serve.settings import ServeSettings

Call: TypeAlias = Callable[[Arrays, str], Arrays]
_FORGETS = 0.2  # how fast the estimate of a row's time follows the newest call
_SHORT_S = 0.002  # a call that may hold up everybody else
_REMEMBERED = (1 << 16) - 1  # of the last 16 calls, which were not short: a bit each
MOST_LOST = 2  # calls of a model that did not come back, and are replaced by others
_MOST_TRIALS = 8  # that may leave it open whether requests can share a call
_PATIENCE_S = 0.01  # that rows wait before another process is asked for


class Remote(Protocol):
    """A model in processes of its own; `ModelPool` is one."""

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

    def call(self, parts: Parts, method: str, first: int | None, done: Done) -> None:
        """Begin a call; `done` is told of its end on the event loop."""

    def grow(self) -> None:
        """Rows have waited for a while."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One call of a model.

    Attributes:
        rows: Its rows.
        requests: How many requests they were of.
        seconds: What the call took.
        waited_s: How long the first of them had waited.
        failed: Whether it raised.
    """

    rows: int
    requests: int
    seconds: float
    waited_s: float
    failed: bool


Observer: TypeAlias = Callable[[Measured], None]


class Ticket:
    """A request that waits for its outputs.

    Attributes:
        future: The outputs; fails with a Problem.
    """

    __slots__ = (
        "_batcher",
        "arrived",
        "batch",
        "bytes",
        "future",
        "inputs",
        "key",
        "method",
        "parts",
        "rows",
        "taken",
    )

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
        self.key = _key(inputs, method)

    def leave(self, problem: Problem | None = None) -> None:
        """Nobody waits for it any more: it leaves the queue, if it is still there.

        Args:
            problem: What whoever awaits `future` is told.
        """
        if self.future.done():
            return
        if problem is None:
            self.future.cancel()
        else:
            self.future.set_exception(problem)
        self._batcher.left(self)


@dataclass(slots=True)
class _Piece:
    """Rows of a request that go into one call."""

    ticket: Ticket
    start: int
    stop: int


@dataclass(slots=True)
class _Ran:
    """How a call ended."""

    seconds: float
    outputs: Arrays
    error: BaseException | None
    per_row: bool | None = True  # of a trial, what it found


class Batcher:
    """The queue in front of one version of a model.

    Args:
        call: The model, if it is in this process.
        executor: Where it is called; should have `MOST_LOST` threads beside those of `settings.batches`.
        remote: The model, if it is in processes of its own; `call` and `executor` are not used then.
        settings: How much may wait and go together.
        joins: For each method, whether requests may share a call; None, or no entry, if that is to be tried.
        observe: Is told of every call.
        steady: Whether calls with as many rows take as long, so that a short one can be foreseen.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        call: Call | None = None,
        *,
        executor: Executor | None = None,
        remote: Remote | None = None,
        settings: ServeSettings,
        joins: Mapping[str, bool | None] | None = None,
        observe: Observer | None = None,
        steady: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._call = call
        self._executor = executor
        self._remote = remote
        self._asked_for_more = False
        self._settings = settings
        self._observe = observe
        self._steady = steady
        self.clock = clock
        self._long = _REMEMBERED  # until it has shown that it is not
        self._most_rows = 0
        self._free = settings.batches
        self._running: dict[int, float] = {}  # calls in threads, by number, and when each began
        self._number = 0
        self._lost: set[int] = set()
        self._queues: dict[Hashable, deque[Ticket]] = {}
        self._again: deque[list[_Piece]] = deque()
        self._scheduled = False
        self._row_s = 0.0
        self.rows_waiting = 0
        self.bytes_waiting = 0
        self._joins = dict(joins or {})
        self._trial: list[_Piece] | None = None  # that runs now; nothing else begins meanwhile
        self._trials: dict[str, int] = {}

    def submit(
        self, inputs: Arrays, method: str, *, rows: int, timeout_s: float, batch: bool = True
    ) -> Ticket:
        """Queue a request.

        Args:
            inputs: Arrays that all have `rows` rows.
            method: What to call.
            rows: How many.
            timeout_s: How long the client will wait.
            batch: Whether its rows may share a call with others.

        Raises:
            Problem: 413, 429 or 503: it is too large, too much waits already, or it would not be in time.
        """
        settings = self._settings
        if self._remote is None and (not self._free or self._trial is not None):
            self._replace_lost()
        if self.is_stuck and self._remote is not None:
            raise Problem(503, "the model's process does not start.", {"retry-after": "5"})
        if self.is_stuck:
            raise Problem(
                503,
                f"the model has not returned from {len(self._lost)} calls and is no longer called.",
                {"retry-after": str(round(settings.timeout_s))},
            )
        if rows > settings.rows:
            raise Problem(413, f"the request has {rows} rows; at most {settings.rows} are allowed.")
        size = sum(array.nbytes for array in inputs.values())
        if self.rows_waiting and (
            self.rows_waiting + rows > settings.queue_rows or self.bytes_waiting + size > settings.queue_bytes
        ):
            raise Problem(
                429,
                f"too many rows are queued for this model: {self.rows_waiting}.",
                {"retry-after": self._retry()},
            )
        if self.rows_waiting * self._row_s / self._slots > timeout_s:
            raise Problem(
                503,
                f"{self.rows_waiting} rows are queued for this model, too many to answer within"
                f" {timeout_s:g} s.",
                {"retry-after": self._retry()},
            )
        ticket = Ticket(self, inputs, method, rows, size, batch)
        self.rows_waiting += rows
        self.bytes_waiting += size
        self._queues.setdefault(ticket.key, deque()).append(ticket)
        if self._room:
            self._pump_soon()  # at the next turn of the loop: requests that arrived together go together
        elif self._remote is not None and not self._asked_for_more:
            self._asked_for_more = True
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._ask_for_more)
        return ticket

    @property
    def _room(self) -> int:
        """How many calls could begin now."""
        return self._free if self._remote is None else self._remote.free

    @property
    def _slots(self) -> int:
        return self._settings.batches if self._remote is None else self._remote.slots

    def pump(self) -> None:
        """Begin what waits, as far as there is room; a process has become free, or is not going to."""
        if self.is_stuck:
            problem = Problem(503, "the model's process does not start.", {"retry-after": "5"})
            for ticket in [ticket for queue in self._queues.values() for ticket in queue]:
                ticket.leave(problem)
        self._pump()

    def _ask_for_more(self) -> None:
        self._asked_for_more = False
        if self._remote is None or self._remote.free or not self._queues:
            return
        if self.clock() - min(queue[0].arrived for queue in self._queues.values()) > _PATIENCE_S:
            self._remote.grow()

    @property
    def is_stuck(self) -> bool:
        """Whether so many calls did not come back that no others are begun."""
        if self._remote is not None:
            return self._remote.is_down
        return not self._free and len(self._lost) >= MOST_LOST + self._settings.batches

    def _replace_lost(self) -> None:
        """A call that nobody waits for any more gives up its place; its thread is lost till it comes back."""
        until = self.clock() - self._settings.timeout_s
        for number, started in self._running.items():
            if started < until and number not in self._lost:
                self._lost.add(number)
                if len(self._lost) <= MOST_LOST:
                    self._free += 1
                if self._trial is not None and all(piece.ticket.future.done() for piece in self._trial):
                    self._joins[self._trial[0].ticket.method] = False
                    self._trial = None

    def joins(self, method: str) -> bool | None:
        """Whether requests share calls of a method; None while that is not known."""
        return self._joins.get(method)

    def left(self, ticket: Ticket) -> None:
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

    def _retry(self) -> str:
        return str(max(1, round(self.rows_waiting * self._row_s)))

    def _pump(self) -> None:
        self._scheduled = False
        while self._room and self._trial is None and (self._again or self._queues):
            pieces = self._again.popleft() if self._again else self._take()
            pieces = [piece for piece in pieces if not piece.ticket.future.done()]
            if not pieces:
                continue
            if len(pieces) == 2 and self._joins.get(pieces[0].ticket.method) is None:
                self._trial = pieces
            if not self._is_short(pieces):
                self._start(pieces)
                continue
            self._call_here(pieces)
            if self._again or self._queues:
                self._pump_soon()  # others have their turn in between
            return

    def _pump_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _is_short(self, pieces: Sequence[_Piece]) -> bool:
        # One long call of many is the machine's doing and not the model's.
        if self._remote is not None or not self._steady or self._long.bit_count() > 1:
            return False
        return sum(piece.stop - piece.start for piece in pieces) <= 2 * self._most_rows

    def _take(self) -> list[_Piece]:
        """The next batch, of the queue whose head has waited longest."""
        key = min(self._queues, key=lambda key: self._queues[key][0].arrived)
        queue, room = self._queues[key], self._settings.batch_rows
        joins = self._joins.get(queue[0].method)
        if joins is None:
            pieces = self._take_for_trial(queue, room) or [self._cut(queue, queue[0].rows)]
        else:
            pieces = self._take_together(queue, room, joins=joins)
        if not queue:
            del self._queues[key]
        return pieces

    def _take_together(self, queue: deque[Ticket], room: int, *, joins: bool) -> list[_Piece]:
        pieces: list[_Piece] = []
        while queue and room:
            ticket = queue[0]
            left = ticket.rows - ticket.taken
            together = joins and ticket.batch
            # Only what is larger than a whole batch is cut; what does not fit goes first in the next.
            if pieces and (not together or left > room):
                break
            rows = min(left, room) if together else left
            pieces.append(self._cut(queue, rows))
            room -= rows
            if not together:
                break
        return pieces

    def _take_for_trial(self, queue: deque[Ticket], room: int) -> list[_Piece]:
        """Two pieces that can show whether rows may share a call: of one request, or two whole requests."""
        first = queue[0]
        if not first.batch:
            return []
        if room >= 2 and first.rows >= 2:
            if _same_row(first, 0, first, min(first.rows, room) - 1):
                return []
            return [self._cut(queue, 1), self._cut(queue, min(first.rows, room) - 1)]
        second = queue[1] if len(queue) > 1 else first
        if second is first or not second.batch or first.rows + second.rows > room:
            return []
        if _same_row(first, 0, second, second.rows - 1):
            return []
        return [self._cut(queue, first.rows), self._cut(queue, second.rows)]

    def _cut(self, queue: deque[Ticket], rows: int) -> _Piece:
        """The next rows of the queue's first request, which leaves it with its last."""
        ticket = queue[0]
        piece = _Piece(ticket, ticket.taken, ticket.taken + rows)
        ticket.taken += rows
        self._count_out(ticket, rows)
        if ticket.taken == ticket.rows:
            queue.popleft()
        return piece

    def _start(self, pieces: list[_Piece]) -> None:
        """Call the model, in a process or in a thread."""
        if self._remote is not None:
            self._start_remote(self._remote, pieces)
            return
        self._free -= 1
        self._number += 1
        number, loop = self._number, asyncio.get_running_loop()
        self._running[number] = self.clock()
        running = loop.run_in_executor(self._executor, self._run, pieces)
        running.add_done_callback(lambda done: self._finished(pieces, done, number))

    def _start_remote(self, remote: Remote, pieces: list[_Piece]) -> None:
        started = self.clock()
        method = pieces[0].ticket.method
        first = pieces[0].stop - pieces[0].start if pieces is self._trial else None

        def done(reply: Reply) -> None:
            ran = _Ran(self.clock() - started, reply.outputs, reply.error, reply.fields.get("per_row"))
            self._ended(pieces, ran, started)
            self._pump()

        remote.call(_parts(pieces), method, first, done)

    def _finished(self, pieces: list[_Piece], done: asyncio.Future[_Ran], number: int) -> None:
        started = self._running.pop(number)
        if number in self._lost:
            self._lost.discard(number)
            self._free += len(self._lost) >= MOST_LOST
        else:
            self._free += 1
        if done.cancelled() or done.exception() is not None:
            error = RuntimeError("the server is stopping") if done.cancelled() else done.exception()
            ran = _Ran(self.clock() - started, {}, error)
        else:
            ran = done.result()
        self._ended(pieces, ran, started)
        self._pump()

    def _call_here(self, pieces: list[_Piece]) -> None:
        """Call the model on the event loop."""
        started = self.clock()
        self._ended(pieces, self._run(pieces), started)

    def _ended(self, pieces: list[_Piece], ran: _Ran, started: float) -> None:
        rows = sum(piece.stop - piece.start for piece in pieces)
        self._measure(pieces, rows, ran, started)
        if pieces is self._trial:
            self._trial = None
            self._tried(pieces, ran, rows)
        elif ran.error is not None:
            self._failed(pieces, ran.error)
        else:
            self._deliver(pieces, ran.outputs, rows)

    def _measure(self, pieces: Sequence[_Piece], rows: int, ran: _Ran, started: float) -> None:
        each = ran.seconds / rows
        if not isinstance(ran.error, ProcessLost):  # which says nothing of the calls to come
            self._row_s = each if not self._row_s else self._row_s + _FORGETS * (each - self._row_s)
        self._long = (self._long << 1 | (ran.seconds > _SHORT_S)) & _REMEMBERED
        self._most_rows = max(self._most_rows, rows)
        if self._observe is not None:
            waited = started - pieces[0].ticket.arrived
            self._observe(Measured(rows, len(pieces), ran.seconds, waited, ran.error is not None))

    def _failed(self, pieces: list[_Piece], error: BaseException) -> None:
        if isinstance(error, ProcessLost):
            if error.hung or len(pieces) == 1:
                for piece in pieces:
                    self._fail(piece.ticket, error)
            else:
                # Each alone: a process costs more than a call, and only one of these rows costs it another.
                self._again.extend([piece] for piece in pieces)
            return
        if len(pieces) > 1:
            # Someone's rows did it: the halves are tried apart, until it is alone.
            middle = len(pieces) // 2
            self._again.extend((pieces[:middle], pieces[middle:]))
            return
        self._fail(pieces[0].ticket, error)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        if ticket.future.done():
            return
        ticket.future.set_exception(_as_problem(error))
        self.left(ticket)

    def _tried(self, pieces: list[_Piece], ran: _Ran, rows: int) -> None:
        method = pieces[0].ticket.method
        if self._joins.get(method) is None:
            self._trials[method] = self._trials.get(method, 0) + 1
            per_row = None if ran.error is not None else ran.per_row
            if isinstance(ran.error, ProcessLost):
                self._trials[method] = _MOST_TRIALS
            self._joins[method] = (
                False if per_row is None and self._trials[method] >= _MOST_TRIALS else per_row
            )
        if self._joins[method]:
            self._deliver(pieces, ran.outputs, rows)
        else:
            self._whole_again(pieces)

    def _deliver(self, pieces: list[_Piece], outputs: Arrays, rows: int) -> None:
        wrong = any(not array.ndim or len(array) != rows for array in outputs.values())
        if wrong:
            self._joins[pieces[0].ticket.method] = False
        apart = len(pieces) == 1 and pieces[0].stop - pieces[0].start == pieces[0].ticket.rows
        if apart:
            if not pieces[0].ticket.future.done():
                pieces[0].ticket.future.set_result(outputs)
            return
        if wrong:
            self._whole_again(pieces)
            return
        start = 0
        for piece in pieces:
            stop = start + piece.stop - piece.start
            self._hand_over(piece, {name: array[start:stop] for name, array in outputs.items()})
            start = stop

    def _whole_again(self, pieces: list[_Piece]) -> None:
        """Outputs that are not one row for each row of the inputs belong to whole requests only."""
        for ticket in dict.fromkeys(piece.ticket for piece in pieces):
            if not ticket.future.done():
                self._count_out(ticket, ticket.rows - ticket.taken)
                queue = self._queues.get(ticket.key)
                if queue and queue[0] is ticket:
                    queue.popleft()
                    if not queue:
                        del self._queues[ticket.key]
                ticket.taken = ticket.rows
                ticket.parts.clear()
                self._again.append([_Piece(ticket, 0, ticket.rows)])

    def _run(self, pieces: Sequence[_Piece]) -> _Ran:
        """Call the model: in a thread, or where it is known to be short."""
        assert self._call is not None
        call, started = self._call, self.clock()
        method = pieces[0].ticket.method
        try:
            if pieces is self._trial:
                rows = _joined(pieces)
                trial = tried(lambda part: call(part, method), rows, pieces[0].stop - pieces[0].start)
                outputs = _appended(trial.first, trial.second) if trial.per_row else {}
                return _Ran(self.clock() - started, outputs, None, trial.per_row)
            outputs = call(_joined(pieces), method)
        except Exception as exc:  # noqa: BLE001 - whatever a model raises is told to whoever sent its rows
            return _Ran(self.clock() - started, {}, exc)
        return _Ran(self.clock() - started, outputs, None)

    @staticmethod
    def _hand_over(piece: _Piece, outputs: Arrays) -> None:
        ticket = piece.ticket
        if ticket.future.done():
            return
        if piece.stop - piece.start == ticket.rows:
            ticket.future.set_result(outputs)
            return
        ticket.parts[piece.start] = outputs
        if sum(len(next(iter(part.values()))) for part in ticket.parts.values()) == ticket.rows:
            ticket.future.set_result(_appended(*(ticket.parts[start] for start in sorted(ticket.parts))))


def _joined(pieces: Sequence[_Piece]) -> Arrays:
    first = pieces[0]
    inputs = first.ticket.inputs
    if len(pieces) == 1:
        if first.stop - first.start == first.ticket.rows:
            return inputs
        return {name: array[first.start : first.stop] for name, array in inputs.items()}
    return {
        name: np.concatenate([piece.ticket.inputs[name][piece.start : piece.stop] for piece in pieces])
        for name in inputs
    }


def _parts(pieces: Sequence[_Piece]) -> Parts:
    return {
        name: [piece.ticket.inputs[name][piece.start : piece.stop] for piece in pieces]
        for name in pieces[0].ticket.inputs
    }


def _appended(*parts: Arrays) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _same_row(first: Ticket, at: int, second: Ticket, other: int) -> bool:
    return all(np.array_equal(array[at], second.inputs[name][other]) for name, array in first.inputs.items())


def _key(inputs: Arrays, method: str) -> Hashable:
    return method, tuple((name, _kinds(array), array.shape[1:]) for name, array in inputs.items())


def _kinds(array: Array) -> Hashable:
    """What values an array has. Of objects the types: text beside bytes, or dates, would become one."""
    return array.dtype.str if array.dtype.kind != "O" else frozenset(map(type, array.ravel().tolist()))


def _as_problem(error: BaseException) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, ProcessLost):
        return problem_of(error)
    if isinstance(error, DataError):
        return Problem(400, str(error))
    if isinstance(error, MemoryError):
        return Problem(503, "there is not enough memory for this request.", {"retry-after": "5"})
    if isinstance(error, RuntimeError) and "cannot schedule new futures" in str(error):
        return Problem(503, "the server is stopping.", {"retry-after": "1"})
    status, told = own_status(error, str(error))
    first = next(iter(told.splitlines()), "")
    name = error.name if isinstance(error, RemoteError) else type(error).__name__
    return Problem(status or 400, f"the model failed on these inputs: {name}: {first[:500]}")
