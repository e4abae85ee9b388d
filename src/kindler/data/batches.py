"""A worker's share of every step, as numpy arrays that belong to whoever receives them.

Which rows make a step is decided by `steps` and `dealing`; what happens with them is the replica's business.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.data import steps as rules
from kindler.data.columns import Array, Column, Columns
from kindler.data.prefetch import ahead
from kindler.data.row_order import Rounds
from kindler.data.spool import Layout, Spool
from kindler.errors import ConfigError

_PREFETCH = 2
_STEPS_AT_ONCE = 8
_CUTS_AT_ONCE = 64  # a few are as quick to find as one


@dataclass(slots=True)
class Batch:
    """One worker's rows of one step.

    Attributes:
        features: One array a feature column (or one for all, when they are stacked); what `held_by` gave, if
            that was called.
        labels: One array a label column.
        rows: How many rows this worker has in this step; may be 0.
        global_rows: How many rows all workers together have in this step.
        ends: Whether a pass whose length nobody knew ends with it.
        where: Names a row of this worker's by where it stood in the data; None where that is not known.
    """

    features: tuple[Any, ...]
    labels: tuple[Array, ...]
    rows: int
    global_rows: int
    ends: bool = False
    where: Callable[[int], int | str] | None = None


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """What takers gave for the rows [start, stop) of a pass."""

    start: int
    stop: int
    taken: tuple[Any, ...]


class Batches:
    """The batches of one worker: every row of its spool exactly once a pass.

    Passes follow one another without end: step `s` of this stream belongs to pass `s // steps + 1`. Training
    counts passes from 1; pass 0, the steps before step 0, is there for whoever judges.

    Attributes:
        steps: Steps of one pass.
        expected: The same.
        features: Names of the inputs.
        labels: Names of the targets, without the weight.
        by_name: False: whether the model is called with names is its own affair.
        counts: The rows of every lane.
        marks: What tells the rows of every lane from others; see `Spool.mark`.

    Args:
        spool: The worker's rows; an empty one needs the others' layout (`Spool.with_layout`). Without lanes
            they are the worker's only one.
        columns: Which columns are features and labels.
        counts: The rows of every lane.
        rank: This worker.
        size: How many workers share the lanes; None where each has one.
        marks: The marks of every lane's rows, if anybody will ask.
        batch_size: Rows of one step over all workers.
        seed: With the epoch, fixes the order.
        shuffle: Take the rows in a new order in each pass; otherwise in that of their numbers, or where they
            have none, a row of each lane in turn.
        prefetch: How many batches are made ahead, by a thread; 0 makes them when asked; None does that
            for data that fits in memory, where taking a batch is quicker than handing it over.
        weighted: Whether the last label column is a weight per row.
    """

    by_name = False

    def __init__(
        self,
        spool: Spool,
        columns: Columns,
        *,
        counts: Sequence[int],
        rank: int,
        size: int | None = None,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int | None = None,
        marks: Sequence[str] = (),
        weighted: bool = False,
    ) -> None:
        self._size = len(counts) if size is None else size
        self._rounds = Rounds(counts, rank=rank, size=self._size, seed=seed if shuffle else None)
        if self._rounds.rows != spool.rows:
            raise ValueError(f"rank {rank} has {spool.rows} rows, but counts say {list(counts)}.")
        self._rows = self._rounds.total
        self.steps = self.expected = rules.steps(self._rows, batch_size)
        self.features = tuple(column.name for column in columns.features)
        labels = tuple(column.name for column in columns.labels)
        self.labels = labels[:-1] if weighted else labels
        self._spool = spool
        self._columns = columns
        self.counts = tuple(int(count) for count in counts)
        self.marks = tuple(marks)
        self._shuffle = shuffle
        self._numbers = None if shuffle else spool.numbers
        self._by_lane = None if self._numbers is not None else _by_lane(spool)
        self._prefetch = _ahead_for(spool) if prefetch is None else prefetch
        self._features = [spool.arrays[column.name] for column in columns.features]
        self._labels = [(column, spool.arrays[column.name]) for column in columns.labels]
        self._takers: tuple[Any, ...] | None = None
        self._together = 0
        self._following: tuple[int, Generator[Batch, None, None]] | None = None
        if columns.stack_features:
            _check_stackable(columns.features, self._features)

    def held_by(
        self, hold: Callable[[Sequence[Array]], Sequence[Callable[[slice | Array], Any]] | None]
    ) -> None:
        """Let whoever computes take rows of the features, in their own way.

        A taker with a true attribute `holds` has all rows where they are needed: nothing is made ahead then.
        One with `together`, a number of rows, is asked for the rows of several steps at once if they are not
        more. It cuts them with `split`, which gives None where steps must be asked for by themselves.
        """
        if not self._columns.stack_features and (takers := hold(self._features)) is not None:
            self._takers = tuple(takers)
            self._together = min((int(getattr(taker, "together", 0)) for taker in takers), default=0)
            if all(getattr(taker, "holds", False) for taker in takers):
                self._prefetch = 0

    def epoch(self, epoch: int) -> Generator[Batch, None, None]:
        """The steps of one pass. Close it (or use it up) to end its thread."""
        return self.span((epoch - 1) * self.steps, epoch * self.steps)

    def stretch(self, epoch: int, *, done: int = 0, steps: int | None = None) -> Generator[Batch, None, None]:
        """The steps of an epoch after the first `done`: one pass, or `steps` that go on through passes."""
        length = steps or self.steps
        first = (epoch - 1) * length
        return self.span(first + done, first + length)

    def span(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """The steps [start, stop) of the stream; what comes before them is not read. Close it as `epoch`."""
        batches = self._made(start, stop)
        if not self._prefetch:
            return batches
        return ahead(batches, depth=self._prefetch, name="kindler-batches")

    def batch(self, step: int) -> Batch:
        """One step of the stream; cheap when steps are asked for in their order."""
        if self._following is None or self._following[0] != step:
            self._following = (step, self._made(step, None))
        stream = self._following[1]
        self._following = (step + 1, stream)
        return next(stream)

    def sample(self) -> Batch:
        """A batch that has the shapes of all."""
        return self.batch(0)

    def own_steps(self) -> Sequence[int]:
        """The steps of the first pass in which this worker has rows; without shuffling, of any."""
        return [int(step) for step in np.flatnonzero(self._own_sizes())]

    @property
    def may_idle(self) -> bool:
        """Whether this worker may have steps without a row in some pass."""
        if self._shuffle:
            return self._rounds.may_miss(self._bounds())
        return bool((self._own_sizes() == 0).any())

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        """Rows of this worker and of all in the steps [first, last) of the stream."""
        return self._own_until(last) - self._own_until(first), self._until(last) - self._until(first)

    def rows_of_all(self, first: int, last: int) -> int:
        """Rows of all workers in these steps."""
        return self._until(last) - self._until(first)

    def close(self) -> None:
        """Nothing is open but files."""

    def _made(self, start: int, stop: int | None) -> Generator[Batch, None, None]:
        while stop is None or start < stop:
            number, first = divmod(start, self.steps)
            last = self.steps if stop is None else min(self.steps, first + stop - start)
            yield from self._pass(number + 1, first, last)
            start += last - first

    def _pass(self, epoch: int, first: int, last: int) -> Generator[Batch, None, None]:
        """The steps [first, last) of one pass."""
        picked = self._order(epoch)
        together: _AtOnce | None = None
        for low, high, start, stop in self._cuts(epoch, first, last):
            rows = slice(start, stop) if picked is None else picked[start:stop]
            if not self._together:
                together = None
            elif together is None or stop > together.stop:
                several = start + min(self._together, (stop - start) * _STEPS_AT_ONCE)
                end = max(stop, min(several, self._rounds.rows))
                wanted = slice(start, end) if picked is None else picked[start:end]
                together = _AtOnce(start, end, self._inputs(wanted))
            yield Batch(
                features=self._inputs(rows) if together is None else self._cut(together, rows, start, stop),
                labels=tuple(_label(_taken(array, rows), column) for column, array in self._labels),
                rows=stop - start,
                global_rows=high - low,
                where=self._where(epoch, start),
            )

    def _cut(self, together: _AtOnce, rows: slice | Array, start: int, stop: int) -> tuple[Any, ...]:
        """The features of one step, out of those of several."""
        assert self._takers is not None, "only takers are asked for several steps"
        pairs = zip(self._takers, together.taken, strict=True)
        parts = [taker.split(taken, start - together.start, stop - together.start) for taker, taken in pairs]
        if any(part is None for part in parts):
            self._together = 0
            return self._inputs(rows)
        return tuple(parts)

    def _cuts(self, epoch: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """For each step: from where to where it goes in the rows of all workers, and in this worker's."""
        for begin in range(first, last, _CUTS_AT_ONCE):
            end = min(last, begin + _CUTS_AT_ONCE)
            bounds = np.array([self._bound(step) for step in range(begin, end + 1)], np.int64)
            own = self._own_before(bounds, epoch).tolist()
            yield from zip(bounds[:-1].tolist(), bounds[1:].tolist(), own[:-1], own[1:], strict=True)

    def _inputs(self, rows: slice | Array) -> tuple[Any, ...]:
        if self._takers is not None:
            return tuple(take(rows) for take in self._takers)
        return inputs(self._columns, [_taken(array, rows) for array in self._features])

    def _where(self, epoch: int, start: int) -> Callable[[int], int | str] | None:
        """Names the rows of a pass from `start` on, for complaints: looked up only when there is one."""
        locate = self._spool.locate
        if locate is None:
            return None

        def name(row: int) -> int | str:
            place = start + row
            if self._numbers is None:
                place = int(self._rounds.order(epoch)[place])
                if self._spool.lanes is not None:
                    place = int(np.argsort(self._spool.lanes, kind="stable")[place])
            return locate(place)

        return name

    def _order(self, epoch: int) -> Array | None:
        """The places of this worker's rows in the order of a pass; None where they lie in it."""
        if self._numbers is not None:
            return self._spool.order
        if not self._shuffle and self._by_lane is None and len(self._rounds.own) <= 1:
            return None
        turns = self._rounds.order(epoch)
        return turns if self._by_lane is None else self._by_lane[turns]

    def _own_before(self, row: Array | int, epoch: int) -> Array:
        """How many of the first `row` rows of a pass are this worker's."""
        if self._numbers is not None:
            return np.searchsorted(self._numbers, row)
        return self._rounds.own_before(row, epoch)

    def _own_sizes(self) -> Array:
        return np.diff(self._own_before(self._bounds(), 1))

    def _bounds(self) -> Array:
        return np.array([self._bound(step) for step in range(self.steps + 1)])

    def _own_until(self, step: int) -> int:
        number, inside = divmod(step, self.steps)
        return number * self._spool.rows + int(self._own_before(self._bound(inside), number + 1))

    def _until(self, step: int) -> int:
        number, inside = divmod(step, self.steps)
        return number * self._rows + self._bound(inside)

    def _bound(self, step: int) -> int:
        """The first row of a step, counted from the first of its pass."""
        return rules.bound(step, self._rows, self.steps)

    @property
    def layout(self) -> Layout:
        """dtype and row shape of each column."""
        return self._spool.layout()


def inputs(columns: Columns, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """What the model is called with: the feature arrays, or one float32 matrix of them all."""
    if not columns.stack_features:
        return tuple(arrays)
    _check_stackable(columns.features, arrays)
    # Not reshape(rows, -1): a step without rows has no width to be inferred.
    matrices = [a.reshape(len(a), math.prod(a.shape[1:])).astype(np.float32, copy=False) for a in arrays]
    return (np.concatenate(matrices, axis=1),)


def _by_lane(spool: Spool) -> Array | None:
    """The places of the rows, those of a lane together; None where they lie like that."""
    if spool.lanes is None:
        return spool.order
    sorted_rows = np.argsort(spool.lanes, kind="stable")
    return sorted_rows if spool.order is None else spool.order[sorted_rows]


def _ahead_for(spool: Spool) -> int:
    """A thread pays where rows come from the disk: when the spool takes most of the memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    nbytes = sum(array.nbytes for array in spool.arrays.values())
    return _PREFETCH if nbytes > memory // 4 else 0


def _taken(array: Array, rows: slice | Array) -> Array:
    """A copy: models write into their inputs, and a mapped file must not notice (or kill them)."""
    if isinstance(rows, slice):
        part: Array = array[rows].copy()
        return part
    taken = np.empty((len(rows), *array.shape[1:]), array.dtype)
    if len(rows):
        # mode="clip" writes into `out` at once; the default would fill a buffer and copy it.
        np.take(array, rows, axis=0, out=taken, mode="clip")
    return taken


def _label(values: Array, column: Column) -> Array:
    """Integer labels are int64, also when the column is a feature too and is kept as one."""
    wide = column.dtype is None and values.dtype.kind in "iu"
    return values.astype(np.int64, copy=False) if wide else values


def _check_stackable(columns: Sequence[Column], arrays: Sequence[Array]) -> None:
    for column, array in zip(columns, arrays, strict=True):
        if array.ndim > 2:
            raise ConfigError(
                f"stack_features=True joins numbers and vectors, but rows of {column.name!r} have shape"
                f" {array.shape[1:]}.\nHint: leave stack_features out, so that the model gets one input"
                f" a column, or flatten it with shapes={{{column.name!r}: ({math.prod(array.shape[1:])},)}}."
            )
