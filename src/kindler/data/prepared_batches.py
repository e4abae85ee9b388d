"""Batches whose rows go through a `Preparer` before the model sees them, in threads beside the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.data.batches import Batch, Batches, inputs
from kindler.data.bucketing import Bucketed
from kindler.data.columns import Array, Column, Columns
from kindler.data.prefetch import in_pool
from kindler.data.preparation import PreparedRows, Preparer
from kindler.data.ragged import Ragged
from kindler.data.row_order import Rounds
from kindler.data.spool import Layout, Spool
from kindler.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AllRows:
    """What a worker knows of the rows of all workers, those of a lane together, one lane after another.

    Attributes:
        lengths: How long each row is, by column.
        numbers: The number of each row; None where nobody knows it.
    """

    lengths: Mapping[str, Array]
    numbers: Array | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedLayout:
    """What prepared batches consist of: dtype and row shape by name, None for a length that varies."""

    features: Layout
    labels: Layout


@dataclass(frozen=True, slots=True)
class _Job:
    """One step of this worker: its rows, in their natural order's places, and the rows of all."""

    epoch: int
    step: int
    rows: Array
    global_rows: int


class PreparedBatches(Batches):
    """`Batches` of prepared rows; keeps the same promises.

    Attributes:
        label_shapes: The shape of a row of each label in some batch, where other batches may have other ones;
            else None.
        varies: Whether shapes of rows differ between batches.
        prepares: True: waiting for a batch is waiting for the transform.

    Args:
        spool: The worker's rows.
        columns: Which columns are features and labels.
        preparer: What is done to them.
        prepared: What comes out of it.
        everybody: What is known of all workers' rows.
        length_col: The column of `everybody.lengths` that rows are bucketed by.
        stack: Whether all features are joined to one float32 matrix at last.
        threads: How many threads prepare batches.
        trains: Whether the rows are trained on, pass after pass.
        batching: The other arguments of `Batches`.
    """

    prepares = True

    def __init__(
        self,
        spool: Spool,
        columns: Columns,
        *,
        preparer: Preparer,
        prepared: PreparedLayout,
        everybody: AllRows,
        length_col: str | None = None,
        stack: bool = False,
        threads: int = 1,
        trains: bool = True,
        **batching: Any,
    ) -> None:
        super().__init__(spool, columns, **batching, prefetch=0)
        seed = int(batching.get("seed", 0))
        self._preparer, self._prepared, self._everybody = preparer, prepared, everybody
        self._threads, self._trains, self._stack = threads, trains, stack
        self._sequences = Rounds(self.counts, rank=0, size=1, seed=seed if self._shuffle else None)
        if length_col is not None:
            self._rounds = Bucketed(
                self.counts,
                rank=int(batching["rank"]),
                size=self._size,
                seed=seed,
                lengths=everybody.lengths[length_col],
                bounds=self._bounds(),
            )
        self.features = tuple(prepared.features)
        self.varies = any(
            None in shape for _, shape in (*prepared.features.values(), *prepared.labels.values())
        )
        changing = any(None in shape for _, shape in prepared.labels.values())
        self.label_shapes = [_filled(shape) for _, shape in prepared.labels.values()] if changing else None
        self._padded = [name for name in everybody.lengths if preparer.pads(name)]
        self._widths_of: tuple[int, dict[str, Array]] | None = None
        self._lock = threading.Lock()

    def held_by(
        self, hold: Callable[[Sequence[Array]], Sequence[Callable[[slice | Array], Any]] | None]
    ) -> None:
        """What is made anew in every epoch is not worth keeping."""

    def span(self, start: int, stop: int) -> Generator[Batch, None, None]:
        return in_pool(
            self._jobs(start, stop), self._batch_of, threads=self._threads, name="kindler-transform"
        )

    def batch(self, step: int) -> Batch:
        with self._lock:
            stream = self._stream_at(step)
            self._following = (step + 1, stream)
            return next(stream)

    def _stream_at(self, step: int) -> Generator[Batch, None, None]:
        """The stream that goes on with this step; a new one unless it follows, or only idle steps between."""
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
        return in_pool(self._jobs(step, end), self._batch_of, threads=self._threads, name="kindler-transform")

    def sample(self) -> Batch:
        return self._batch_of(next(self._jobs(0, 1)))

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            if self._following is not None:
                self._following[1].close()
                self._following = None

    def _jobs(self, start: int, stop: int | None) -> Generator[_Job, None, None]:
        while stop is None or start < stop:
            number, first = divmod(start, self.steps)
            last = self.steps if stop is None else min(self.steps, first + stop - start)
            yield from self._jobs_of_pass(number + 1, first, last)
            start += last - first

    def _jobs_of_pass(self, epoch: int, first: int, last: int) -> Generator[_Job, None, None]:
        rows = self._natural(epoch)
        for step in range(first, last):
            low, high = self._bound(step), self._bound(step + 1)
            start, stop = int(self._own_before(low, epoch)), int(self._own_before(high, epoch))
            yield _Job(epoch, step, rows[start:stop], high - low)

    def _natural(self, epoch: int) -> Array:
        """This worker's rows in the order of a pass, as places in their natural order."""
        if self._numbers is not None:
            return np.arange(self._spool.rows)
        turns = self._rounds.order(epoch)
        lanes = self._spool.lanes
        return turns if lanes is None else np.argsort(lanes, kind="stable")[turns]

    def _batch_of(self, job: _Job) -> Batch:
        rows, spool = job.rows, self._spool
        locate = spool.locate
        where = None if locate is None else lambda row: locate(int(rows[row]))
        if len(rows):
            places = rows if spool.order is None else spool.order[rows]
            raw = {c.name: _taken(spool.arrays[c.name], places) for c in self._columns.features}
            raw |= {
                c.name: _taken(spool.arrays[c.name], places)
                for c in self._columns.labels
                if c.name not in raw
            }
            made = self._preparer(
                raw,
                rows=len(rows),
                where=where or (lambda row: int(rows[row])),
                epoch=job.epoch if self._trains else 0,
                numbers=rows if spool.numbers is None else spool.numbers[rows],
                widths=self._widths(job),
            )
            _check_names(made, self._prepared)
        else:
            made = self._nothing()
        return Batch(
            features=stacked(made.features, stack=self._stack),
            labels=tuple(made.labels.values()),
            rows=len(rows),
            global_rows=job.global_rows,
            where=where,
        )

    def _nothing(self) -> PreparedRows:
        """The arrays of a step in which this worker has no rows."""
        layouts = (self._prepared.features, self._prepared.labels)
        made = [
            {n: np.empty((0, *_filled(shape)), dtype) for n, (dtype, shape) in lay.items()} for lay in layouts
        ]
        return PreparedRows(made[0], made[1])

    def _widths(self, job: _Job) -> dict[str, int]:
        """The longest row of a step over all workers, of each column that is padded to it."""
        if not self._padded:
            return {}
        kept = self._widths_of
        if kept is None or kept[0] != job.epoch:
            rows, starts = self._sequence(job.epoch), self._bounds()[:-1]
            found = {
                name: np.maximum.reduceat(self._everybody.lengths[name][rows], starts)
                for name in self._padded
            }
            kept = self._widths_of = (job.epoch, found)
        return {name: int(widths[job.step]) for name, widths in kept[1].items()}

    def _sequence(self, epoch: int) -> Array:
        """All workers' rows in the order of a pass, as places in `AllRows`."""
        if isinstance(self._rounds, Bucketed):
            return self._rounds.sequence(epoch)
        if self._numbers is not None and self._everybody.numbers is not None:
            return np.argsort(self._everybody.numbers, kind="stable")
        return self._sequences.order(epoch)


def lengths_of(array: Any, places: Array) -> Array:
    """How long these rows are: of a ragged column its lengths, of a column of numbers what it says."""
    if isinstance(array, Ragged):
        lengths: Array = array.offsets[places + 1] - array.offsets[places]
        return lengths.astype(np.int64)
    return np.asarray(array[places]).astype(np.int64)


def layout_of(made: PreparedRows, *, free: bool) -> PreparedLayout:
    """What a batch consists of.

    Args:
        made: The batch.
        free: Whether user code makes the arrays, so that any length may differ.
    """

    def entries(arrays: Mapping[str, Array]) -> Layout:
        return {
            name: [
                a.dtype.name,
                [None if free or (i == 0 and name in made.padded) else n for i, n in enumerate(a.shape[1:])],
            ]
            for name, a in arrays.items()
        }

    return PreparedLayout(features=entries(made.features), labels=entries(made.labels))


def stacked(features: Mapping[str, Array], *, stack: bool) -> tuple[Array, ...]:
    """What the model is called with: prepared features, or one matrix of them."""
    columns = tuple(Column(name=name, role="feature") for name in features)
    return inputs(Columns(features=columns, labels=(), stack_features=stack), list(features.values()))


def _check_names(made: PreparedRows, known: PreparedLayout) -> None:
    if list(made.features) != list(known.features):
        raise ConfigError(
            f"the transform returned the features {list(made.features)} for some rows and"
            f" {list(known.features)} for others; all must have the same, in the same order."
        )


def _filled(shape: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(1 if size is None else int(size) for size in shape)


def _taken(array: Any, places: Array) -> Any:
    return array.take(places) if isinstance(array, Ragged) else array[places]
