"""A worker's share of every step, as numpy arrays that belong to whoever receives them.

Which rows make a step is decided by `steps`; what happens with them is the replica's business.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from kindler.data import steps as rules
from kindler.data.ahead import ahead
from kindler.data.columns import Array, Column, Columns
from kindler.data.spool import Layout, Spool
from kindler.errors import ConfigError

__all__ = ["Batch", "Batches", "inputs"]

_PREFETCH = 2


@dataclass(slots=True)
class Batch:
    """One worker's rows of one step.

    Attributes:
        features: One array a feature column (or one for all, when they are stacked).
        labels: One array a label column.
        rows: How many rows this worker has in this step; may be 0.
        global_rows: How many rows all workers together have in this step.
    """

    features: tuple[Array, ...]
    labels: tuple[Array, ...]
    rows: int
    global_rows: int


class Batches:
    """The batches of one worker: every row of its spool exactly once an epoch.

    Args:
        spool: The worker's rows; an empty one needs the others' layout (`Spool.with_layout`).
        columns: Which columns are features and labels.
        counts: The rows of every worker, by rank.
        rank: This worker.
        batch_size: Rows of one step over all workers.
        seed: With the epoch and the rank, fixes the order.
        shuffle: Take the rows in a new order in each epoch; otherwise in their own.
        prefetch: How many batches are made ahead, by a thread; 0 makes them when asked; None does that
            for data that fits in memory, where taking a batch is quicker than handing it over.
    """

    def __init__(
        self,
        spool: Spool,
        columns: Columns,
        *,
        counts: Sequence[int],
        rank: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int | None = None,
    ) -> None:
        if counts[rank] != spool.rows:
            raise ValueError(f"rank {rank} has {spool.rows} rows, but counts say {list(counts)}.")
        self.steps = rules.steps(sum(counts), batch_size)
        self._spool = spool
        self._columns = columns
        self._counts = tuple(counts)
        self._rank = rank
        self._seed = seed
        self._shuffle = shuffle
        self._prefetch = _ahead_for(spool) if prefetch is None else prefetch
        self._features = [spool.arrays[column.name] for column in columns.features]
        self._labels = [(column, spool.arrays[column.name]) for column in columns.labels]
        if columns.stack_features:
            _check_stackable(columns.features, self._features)

    def epoch(self, epoch: int) -> Generator[Batch, None, None]:
        """The steps of one epoch. Close it (or use it up) to end its thread."""
        batches = self._made(epoch)
        if not self._prefetch:
            return batches
        return ahead(batches, depth=self._prefetch, name="kindler-batches")

    def _made(self, epoch: int) -> Generator[Batch, None, None]:
        picked = self._order(epoch)
        stop = 0
        for shares in rules.shares(self._counts, self.steps):
            count = int(shares[self._rank])
            start, stop = stop, stop + count
            rows = slice(start, stop) if picked is None else picked[start:stop]
            yield Batch(
                features=inputs(self._columns, [_taken(array, rows) for array in self._features]),
                labels=tuple(_label(_taken(array, rows), column) for column, array in self._labels),
                rows=count,
                global_rows=int(shares.sum()),
            )

    def _order(self, epoch: int) -> Array | None:
        natural = self._spool.order
        if not self._shuffle:
            return natural
        shuffled = rules.order(self._spool.rows, seed=self._seed, epoch=epoch, rank=self._rank)
        return shuffled if natural is None else natural[shuffled]

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
