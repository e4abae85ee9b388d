"""A worker's share of every step, as numpy arrays that the receiver owns. `Rows` is the interface that the
training loops use. `Batches` reads a spool, and `PreparedBatches` runs a `Preparer` in threads.
`row_order` decides which rows make up a step."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kindler.data import row_order as rules
from kindler.data.columns import Array, Column, ColumnPlan
from kindler.data.preparation import PreparedRows, Preparer
from kindler.data.ragged import Ragged
from kindler.data.row_order import Bucketed, Rounds
from kindler.data.spool import Layout, Spool
from kindler.data.statistics import Summary
from kindler.errors import ConfigError

T = TypeVar("T")
J = TypeVar("J")
Taker: TypeAlias = Callable[["slice | Array"], Any]

_PREFETCH = 2
_STEPS_AT_ONCE = 8
_CUTS_AT_ONCE = 64  # a few are as quick to find as one


@dataclass(slots=True)
class Batch:
    """One worker's rows of one step. `features` has an array per column, or what takers (`Rows.held_by`)
    returned; `ends` marks the end of a pass of unknown length; `where` names a row in error messages."""

    features: tuple[Any, ...]
    labels: tuple[Array, ...]
    rows: int
    global_rows: int
    ends: bool = False
    where: Callable[[int], int | str] | None = None


class Rows:
    """An opened data set of one worker: what the training loops work with.

    Passes repeat without end, and all workers take every step together. Loops use either `stretch`, or
    `batch` and the methods after it, which may be called from any thread.

    Attributes:
        features: Names of the inputs.
        labels: Names of the targets, without the weight.
        by_name: Whether the model is called with keyword inputs.
        steps: Steps of one pass; None if unknown until its end.
        expected: The approximate number of steps, for progress bars.
        counts: Rows per lane; empty if they were not counted. Together with `marks` this identifies the data:
            only then can a run resume in the middle of an epoch.
        marks: A fingerprint of each lane's rows; see `Spool.fingerprint`.
        statistics: Summaries of each worker's rows, on the first worker; empty if they were not made.
        label_shapes: The row shape of each label in the first batch, if it may differ between batches.
        varies: Whether row shapes differ between batches.
        prepares: Whether waiting for a batch means waiting for a transform.
        may_idle: Whether this worker may have steps without rows.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    by_name: bool = False
    steps: int | None
    expected: int | None
    counts: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()
    statistics: Sequence[Mapping[str, Summary]] = ()
    label_shapes: Sequence[Sequence[int]] | None = None
    varies: bool = False
    prepares: bool = False

    @property
    def may_idle(self) -> bool:
        return True

    @property
    def layout(self) -> Layout:
        raise NotImplementedError

    def no_rows(self) -> list[Array] | None:
        """Inputs as empty arrays; None if their shapes are not known in advance."""
        return [
            np.empty((0, *shape), dtype) for dtype, shape in (self.layout[name] for name in self.features)
        ]

    def held_by(self, hold: Callable[[Sequence[Array]], Sequence[Taker] | None]) -> None:
        """Let the model's device keep rows that are read in every epoch."""

    def stretch(self, epoch: int, *, done: int = 0, steps: int | None = None) -> Generator[Batch, None, None]:
        """Yield the steps of an epoch after the first `done`: one pass, or `steps` steps across passes.

        Epochs count from 1; 0 is for evaluation. Close the generator when done.
        """
        raise NotImplementedError

    def batch(self, step: int) -> Batch:
        """Return one step, counted across all passes."""
        raise NotImplementedError

    def sample(self) -> Batch:
        """Return a batch with the shapes that all others have."""
        return self.batch(0)

    def own_steps(self) -> Sequence[int]:
        """Steps of a pass in which this worker has rows."""
        raise NotImplementedError

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        """Rows in the steps [first, last): of this worker, and approximately of all workers."""
        raise NotImplementedError

    def rows_of_all(self, first: int, last: int) -> int:
        """Rows of all workers in steps that are done; all workers call it together."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop background work; files stay."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """`counts` is rows per lane; `size` None means one lane per worker. Without `shuffle`, rows come by
    number or round-robin. Reading ahead pays only if the spool takes much of `memory_bytes`."""

    counts: Sequence[int]
    rank: int
    size: int | None = None
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    marks: Sequence[str] = ()
    weighted: bool = False
    memory_bytes: int | None = None


@dataclass(slots=True)
class _Step:
    """The rows [start, stop) of `rows`: this worker's places of a pass in their order; None: as they lie."""

    epoch: int
    number: int
    rows: Array | None
    start: int
    stop: int
    global_rows: int


@dataclass(frozen=True, slots=True)
class _AtOnce:
    start: int
    stop: int
    taken: tuple[Any, ...]


class Batches(Rows):
    """Rows of a spool, each exactly once per pass. Step `s` belongs to pass `s // steps + 1`; pass 0, the
    steps before step 0, is for evaluation. An empty spool needs the others' layout."""

    steps: int

    def __init__(self, spool: Spool, columns: ColumnPlan, options: BatchOptions) -> None:
        counts, rank = options.counts, options.rank
        self._size = len(counts) if options.size is None else options.size
        self._seed = options.seed if options.shuffle else None
        self._rounds = Rounds(counts, rank=rank, size=self._size, seed=self._seed)
        if self._rounds.rows != spool.rows:
            raise ValueError(f"rank {rank} has {spool.rows} rows, but counts say {list(counts)}.")
        self._rows = self._rounds.total
        self.steps = self.expected = rules.steps(self._rows, options.batch_size)
        self.features = tuple(column.name for column in columns.features)
        labels = tuple(column.name for column in columns.labels)
        self.labels = labels[:-1] if options.weighted else labels
        self._spool, self._columns, self._shuffle = spool, columns, options.shuffle
        self.counts, self.marks = tuple(int(count) for count in counts), tuple(options.marks)
        self._numbers = None if options.shuffle else spool.numbers
        self._by_lane = None if spool.lanes is None else np.argsort(spool.lanes, kind="stable")
        nbytes = sum(array.nbytes for array in spool.arrays.values())
        memory = options.memory_bytes
        self._prefetch = _PREFETCH if memory is not None and nbytes > memory // 4 else 0
        self._features = [spool.arrays[column.name] for column in columns.features]
        self._labels = [(column, spool.arrays[column.name]) for column in columns.labels]
        self._takers: tuple[Any, ...] | None = None
        self._together = 0
        self._following: tuple[int, Generator[Batch, None, None]] | None = None
        self._lock = threading.Lock()
        if columns.stack_features:
            _check_stackable(dict(zip(self.features, self._features, strict=True)))

    def held_by(self, hold: Callable[[Sequence[Array]], Sequence[Taker] | None]) -> None:
        """A taker with a true `holds` has all rows in place: nothing is read ahead. One with `together`
        gets up to that many rows at once, and cuts them with `split`, which may return None."""
        if not self._columns.stack_features and (takers := hold(self._features)) is not None:
            self._takers = tuple(takers)
            self._together = min((int(getattr(taker, "together", 0)) for taker in takers), default=0)
            if all(getattr(taker, "holds", False) for taker in takers):
                self._prefetch = 0

    def stretch(self, epoch: int, *, done: int = 0, steps: int | None = None) -> Generator[Batch, None, None]:
        length = steps or self.steps
        first = (epoch - 1) * length
        batches = self._made(first + done, first + length)
        return ahead(batches, depth=self._prefetch, name="kindler-batches") if self._prefetch else batches

    def batch(self, step: int) -> Batch:
        """Cheap when steps are requested in order."""
        with self._lock:
            stream = self._stream_at(step)
            self._following = (step + 1, stream)
            return next(stream)

    def close(self) -> None:
        with self._lock:
            if self._following is not None:
                self._following[1].close()
                self._following = None

    def own_steps(self) -> Sequence[int]:
        """Steps of the first pass; without shuffling, of any pass."""
        return [int(step) for step in np.flatnonzero(self._own_sizes())]

    @property
    def may_idle(self) -> bool:
        if self._shuffle:
            return self._rounds.may_miss(self._bounds(0, self.steps))
        return bool((self._own_sizes() == 0).any())

    @property
    def layout(self) -> Layout:
        return self._spool.layout

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        return self._own_until(last) - self._own_until(first), self.rows_of_all(first, last)

    def rows_of_all(self, first: int, last: int) -> int:
        return self._until(last) - self._until(first)

    def _stream_at(self, step: int) -> Generator[Batch, None, None]:
        if self._following is not None and self._following[0] == step:
            return self._following[1]
        return self._made(step, None)

    def _steps(self, start: int, stop: int | None) -> Iterator[_Step]:
        """The steps [start, stop), of one pass after the other; without `stop`, endlessly."""
        while stop is None or start < stop:
            number, first = divmod(start, self.steps)
            last = self.steps if stop is None else min(self.steps, first + stop - start)
            epoch, start = number + 1, start + last - first
            rows = self._order(epoch)
            for begin in range(first, last, _CUTS_AT_ONCE):
                bounds = self._bounds(begin, min(last, begin + _CUTS_AT_ONCE))
                own, sizes = self._own_before(bounds, epoch).tolist(), np.diff(bounds).tolist()
                for i, size in enumerate(sizes):
                    yield _Step(epoch, begin + i, rows, own[i], own[i + 1], size)

    def _order(self, epoch: int) -> Array | None:
        """Places of this worker's rows, in the order of a pass; None if they have it already."""
        if self._numbers is not None or (self._by_lane is None and not self._shuffle):
            return None
        turns = self._rounds.order(epoch)
        return turns if self._by_lane is None else self._by_lane[turns]

    def _made(self, start: int, stop: int | None) -> Generator[Batch, None, None]:
        epoch: int | None = None
        picked: Array | None = None
        together: _AtOnce | None = None
        for step in self._steps(start, stop):
            if step.epoch != epoch:
                epoch, together = step.epoch, None
                picked = self._spool.order if step.rows is None else self._spool.positions(step.rows)
            rows = slice(step.start, step.stop) if picked is None else picked[step.start : step.stop]
            if not self._together:
                together = None
            elif together is None or step.stop > together.stop:
                several = step.start + min(self._together, (step.stop - step.start) * _STEPS_AT_ONCE)
                end = max(step.stop, min(several, self._rounds.rows))
                wanted = slice(step.start, end) if picked is None else picked[step.start : end]
                together = _AtOnce(step.start, end, self._inputs(wanted))
            yield Batch(
                features=self._inputs(rows) if together is None else self._cut(together, rows, step),
                labels=tuple(_label(_taken(array, rows), column) for column, array in self._labels),
                rows=step.stop - step.start,
                global_rows=step.global_rows,
                where=self._where(step),
            )

    def _cut(self, together: _AtOnce, rows: slice | Array, step: _Step) -> tuple[Any, ...]:
        assert self._takers is not None, "only takers are asked for several steps"
        start, stop = step.start - together.start, step.stop - together.start
        parts = [t.split(taken, start, stop) for t, taken in zip(self._takers, together.taken, strict=True)]
        if any(part is None for part in parts):
            self._together = 0
            return self._inputs(rows)
        return tuple(parts)

    def _inputs(self, rows: slice | Array) -> tuple[Any, ...]:
        if self._takers is not None:
            return tuple(take(rows) for take in self._takers)
        return inputs(self._columns, [_taken(array, rows) for array in self._features])

    def _where(self, step: _Step) -> Callable[[int], int | str] | None:
        locate = self._spool.locate
        if locate is None:
            return None
        rows, start = step.rows, step.start
        return lambda row: locate(start + row if rows is None else int(rows[start + row]))

    def _own_before(self, row: Array | int, epoch: int) -> Array:
        """How many of the first `row` rows of a pass are this worker's."""
        if self._numbers is not None:
            return np.searchsorted(self._numbers, row)
        return self._rounds.own_before(row, epoch)

    def _own_sizes(self) -> Array:
        return np.diff(self._own_before(self._bounds(0, self.steps), 1))

    def _bounds(self, first: int, last: int) -> Array:
        return np.array([self._bound(step) for step in range(first, last + 1)], np.int64)

    def _own_until(self, step: int) -> int:
        number, inside = divmod(step, self.steps)
        return number * self._spool.rows + int(self._own_before(self._bound(inside), number + 1))

    def _until(self, step: int) -> int:
        number, inside = divmod(step, self.steps)
        return number * self._rows + self._bound(inside)

    def _bound(self, step: int) -> int:
        return rules.bound(step, self._rows, self.steps)


def inputs(columns: ColumnPlan, arrays: Sequence[Array]) -> tuple[Array, ...]:
    names = [column.name for column in columns.features]
    return stacked(dict(zip(names, arrays, strict=True)), stack=columns.stack_features)


def stacked(features: Mapping[str, Array], *, stack: bool) -> tuple[Array, ...]:
    arrays = tuple(features.values())
    if not stack:
        return arrays
    _check_stackable(features)
    # Not reshape(rows, -1): a step without rows has no width to be inferred.
    matrices = [a.reshape(len(a), math.prod(a.shape[1:])).astype(np.float32, copy=False) for a in arrays]
    return (np.concatenate(matrices, axis=1),)


def _taken(array: Array, rows: slice | Array) -> Array:
    """Copy: models write into their inputs, and mapped files are read-only."""
    if isinstance(rows, slice):
        part: Array = array[rows].copy()
        return part
    taken = np.empty((len(rows), *array.shape[1:]), array.dtype)
    if len(rows):
        # mode="clip" writes into `out` at once; the default would fill a buffer and copy it.
        np.take(array, rows, axis=0, out=taken, mode="clip")
    return taken


def _label(values: Array, column: Column) -> Array:
    """Widen integer labels to int64, even if the column is a feature too."""
    wide = column.dtype is None and values.dtype.kind in "iu"
    return values.astype(np.int64, copy=False) if wide else values


def _check_stackable(features: Mapping[str, Array]) -> None:
    for name, array in features.items():
        if array.ndim > 2:
            raise ConfigError(
                f"stack_features=True joins numbers and vectors, but rows of {name!r} have shape"
                f" {array.shape[1:]}.\nHint: leave stack_features out, so that the model gets one input "
                f"per column, or flatten it with shapes={{{name!r}: ({math.prod(array.shape[1:])},)}}."
            )


@dataclass(frozen=True, kw_only=True)
class AllRows:
    lengths: Mapping[str, Array]
    numbers: Array | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedLayout:
    """dtype and row shape by name; None marks a length that varies."""

    features: Layout
    labels: Layout


class PreparedBatches(Batches):
    """`Batches` through a `Preparer`, bucketed by `length_col`; with `trains`, passes follow each other."""

    prepares = True

    def __init__(
        self,
        spool: Spool,
        columns: ColumnPlan,
        options: BatchOptions,
        *,
        preparer: Preparer,
        prepared: PreparedLayout,
        everybody: AllRows,
        length_col: str | None = None,
        stack: bool = False,
        threads: int = 1,
        trains: bool = True,
    ) -> None:
        super().__init__(spool, columns, options)
        self._preparer, self._prepared, self._everybody = preparer, prepared, everybody
        self._threads, self._trains, self._stack = threads, trains, stack
        self._sequences = Rounds(self.counts, rank=0, size=1, seed=self._seed)
        if length_col is not None:
            self._rounds = Bucketed(
                self.counts,
                rank=options.rank,
                size=self._size,
                seed=options.seed,
                lengths=everybody.lengths[length_col],
                bounds=self._bounds(0, self.steps),
            )
        self.features = tuple(prepared.features)
        labels = [shape for _, shape in prepared.labels.values()]
        self.varies = any(None in shape for shape in (*labels, *(s for _, s in prepared.features.values())))
        if any(None in shape for shape in labels):
            self.label_shapes = [_filled(shape) for shape in labels]
        self._padded = [name for name in everybody.lengths if preparer.pads(name)]
        self._widths_of: tuple[int, dict[str, Array]] | None = None
        self._prefetch = 0

    def held_by(self, hold: Callable[[Sequence[Array]], Sequence[Taker] | None]) -> None:
        """No-op: rows made anew in every epoch are not worth keeping."""

    def no_rows(self) -> None:
        return None

    def _stream_at(self, step: int) -> Generator[Batch, None, None]:
        if self._following is not None:
            at, stream = self._following
            between = range(at, step)
            if len(between) < self.steps and not any(self.rows_of(s, s + 1)[0] for s in between):
                for _ in between:
                    next(stream)
                if at <= step:
                    return stream
            stream.close()
        # What is judged ends with its pass; what is trained on goes on.
        end = None if self._trains else (step // self.steps + 1) * self.steps
        return self._made(step, end)

    def _made(self, start: int, stop: int | None) -> Generator[Batch, None, None]:
        steps = self._steps(start, stop)
        return in_pool(steps, self._batch_of, threads=self._threads, name="kindler-transform")

    def sample(self) -> Batch:
        return self._batch_of(next(self._steps(0, 1)))

    def _batch_of(self, step: _Step) -> Batch:
        spool, where = self._spool, self._where(step)
        rows = np.arange(step.start, step.stop) if step.rows is None else step.rows[step.start : step.stop]
        if len(rows):
            columns = (*self._columns.features, *self._columns.labels)
            made = self._preparer(
                spool.taken(columns, rows),
                rows=len(rows),
                where=where or (lambda row: int(rows[row])),
                epoch=step.epoch if self._trains else 0,
                numbers=rows if spool.numbers is None else spool.numbers[rows],
                widths=self._widths(step),
            )
            _check_names(made, self._prepared)
        else:
            made = self._nothing()
        return Batch(
            features=stacked(made.features, stack=self._stack),
            labels=tuple(made.labels.values()),
            rows=len(rows),
            global_rows=step.global_rows,
            where=where,
        )

    def _nothing(self) -> PreparedRows:
        layouts = (self._prepared.features, self._prepared.labels)
        made = [
            {n: np.empty((0, *_filled(shape)), dtype) for n, (dtype, shape) in lay.items()} for lay in layouts
        ]
        return PreparedRows(made[0], made[1])

    def _widths(self, step: _Step) -> dict[str, int]:
        if not self._padded:
            return {}
        kept = self._widths_of
        if kept is None or kept[0] != step.epoch:
            rows, starts = self._sequence(step.epoch), self._bounds(0, self.steps - 1)
            found = {
                name: np.maximum.reduceat(self._everybody.lengths[name][rows], starts)
                for name in self._padded
            }
            kept = self._widths_of = (step.epoch, found)
        return {name: int(widths[step.number]) for name, widths in kept[1].items()}

    def _sequence(self, epoch: int) -> Array:
        if isinstance(self._rounds, Bucketed):
            return self._rounds.sequence(epoch)
        if self._numbers is not None and self._everybody.numbers is not None:
            return np.argsort(self._everybody.numbers, kind="stable")
        return self._sequences.order(epoch)


def lengths_of(array: Any, places: Array) -> Array:
    if isinstance(array, Ragged):
        lengths: Array = array.offsets[places + 1] - array.offsets[places]
        return lengths.astype(np.int64)
    return np.asarray(array[places]).astype(np.int64)


def layout_of(made: PreparedRows, *, free: bool) -> PreparedLayout:
    """With `free`, user code makes the arrays, so any length may vary."""

    def entries(arrays: Mapping[str, Array]) -> Layout:
        return {
            name: [
                a.dtype.name,
                [None if free or (i == 0 and name in made.padded) else n for i, n in enumerate(a.shape[1:])],
            ]
            for name, a in arrays.items()
        }

    return PreparedLayout(features=entries(made.features), labels=entries(made.labels))


def _check_names(made: PreparedRows, known: PreparedLayout) -> None:
    if list(made.features) != list(known.features):
        raise ConfigError(
            f"the transform returned the features {list(made.features)} for some rows and"
            f" {list(known.features)} for others; all must have the same, in the same order."
        )


def _filled(shape: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(1 if size is None else int(size) for size in shape)


def ahead(items: Iterator[T], *, depth: int, name: str) -> Generator[T, None, None]:
    """A thread runs at most `depth` items ahead; it starts with the first `next`, and has ended when the
    generator has. Errors of `items` are raised here."""
    end: Any = object()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
            waiting = deque(pool.submit(next, items, end) for _ in range(depth))
            try:
                while (item := waiting.popleft().result()) is not end:
                    waiting.append(pool.submit(next, items, end))
                    yield item
            finally:
                for future in waiting:
                    future.cancel()
    finally:
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
