"""The start of a run whose rows are prepared: what workers tell each other of theirs before the first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kindler.data.batches import (
    AllRows,
    BatchOptions,
    PreparedBatches,
    PreparedLayout,
    layout_of,
    lengths_of,
)
from kindler.data.columns import Array, Columns
from kindler.data.preparation import Preparation, Preparer
from kindler.data.ragged import Ragged
from kindler.data.spool import Spool
from kindler.errors import ConfigError, DataError
from kindler.group import Group
from kindler.train.task import Task

_MOST_THREADS = 4
_SAMPLE_ROWS = 2


def preparation_for(task: Task, source: Any) -> Preparation | None:
    """What is done to the rows of a source; None where batches are taken as they lie in the spool."""
    preparation = task.options.preparation
    if preparation is None:
        return None
    ragged = any(column.ragged for column in source.columns.all)
    return preparation if preparation.active or ragged else None


def prepared_batches(
    worker: Group,
    spool: Spool,
    columns: Columns,
    preparation: Preparation,
    options: BatchOptions,
    *,
    trains: bool,
    stack: bool,
) -> PreparedBatches:
    """Batches of prepared rows; all workers call it together."""
    threads = max(1, min(_MOST_THREADS, worker.threads))
    preparer = Preparer(
        preparation,
        columns,
        trains=trains,
        seed=options.seed,
        rank=worker.rank,
        copies=threads > 1,
    )
    length_col = preparation.length_col if trains else None
    padded = [
        column.name
        for column in columns.all
        if isinstance(spool.arrays[column.name], Ragged)
        and not spool.arrays[column.name].is_text
        and preparer.pads(column.name)
    ]
    wanted = padded if preparer.plain else []
    if length_col is not None:
        _check_lengths(spool.arrays[length_col], length_col)
        wanted = [*dict.fromkeys([*wanted, length_col])]
        # Rows that are bucketed come in another order, so that no other run may resume in mid-epoch.
        options = replace(options, marks=[f"{mark}~{length_col}" for mark in options.marks])
    own = _own_places(spool)
    return PreparedBatches(
        spool,
        columns,
        options,
        preparer=preparer,
        prepared=_agreed_layout(worker, preparer, spool, columns, free=preparation.collate is not None),
        everybody=_everybody(worker, spool, own, options.counts, wanted),
        length_col=length_col,
        stack=stack,
        threads=threads,
        trains=trains,
    )


def _check_lengths(array: Any, name: str) -> None:
    if isinstance(array, Ragged) or (array.ndim == 1 and array.dtype.kind in "iu"):
        return
    raise ConfigError(
        f"length_col={name!r}: must be a column of lists, text or bytes, or of whole numbers; its rows are"
        f" {array.dtype.name} of shape {array.shape[1:]}."
    )


def _own_places(spool: Spool) -> Array:
    """This worker's rows, those of a lane together, as places in their natural order."""
    if spool.lanes is None:
        return np.arange(spool.rows)
    return np.argsort(spool.lanes, kind="stable")


def _everybody(
    worker: Group, spool: Spool, own: Array, counts: Sequence[int], names: Sequence[str]
) -> AllRows:
    """The lengths, and the numbers, of the rows of all workers."""
    if not names:
        return AllRows(lengths={})
    places = own if spool.order is None else spool.order[own]
    lengths = {name: _shared(worker, lengths_of(spool.arrays[name], places), counts) for name in names}
    numbers = np.full(len(own), -1) if spool.numbers is None else spool.numbers[own]
    known = _shared(worker, numbers, counts)
    return AllRows(lengths=lengths, numbers=None if (known < 0).any() else known)


def _shared(worker: Group, own: Array, counts: Sequence[int]) -> Array:
    """A number of each row of all workers, those of a lane together, one lane after another."""
    if worker.size == 1:
        return own.astype(np.int64)
    gathered = [np.frombuffer(part, np.int64) for part in worker.all_gather(own.astype(np.int64).tobytes())]
    ends = np.cumsum(counts)
    everybody = np.empty(int(ends[-1]), np.int64)
    for rank, part in enumerate(gathered):
        taken = 0
        for lane in range(rank, len(counts), worker.size):
            count = int(counts[lane])
            everybody[ends[lane] - count : ends[lane]] = part[taken : taken + count]
            taken += count
    return everybody


def _agreed_layout(
    worker: Group,
    preparer: Preparer,
    spool: Spool,
    columns: Columns,
    *,
    free: bool,
) -> PreparedLayout:
    """What prepared rows look like, tried on a row or two; workers without rows learn it from the others."""
    mine: Any = None
    if spool.rows:
        rows = np.arange(min(_SAMPLE_ROWS, spool.rows))
        places = rows if spool.order is None else spool.order[rows]
        raw = {c.name: spool.arrays[c.name][places] for c in (*columns.features, *columns.labels)}
        locate = spool.locate
        made = preparer(
            raw,
            rows=len(rows),
            where=(lambda row: int(rows[row])) if locate is None else (lambda row: locate(int(rows[row]))),
            numbers=rows if spool.numbers is None else spool.numbers[rows],
        )
        layout = layout_of(made, free=free)
        mine = [layout.features, layout.labels]
    told = [json.loads(part) for part in worker.all_gather(json.dumps(mine).encode())]
    known = [part for part in told if part is not None]
    for part in known[1:]:
        if [list(names) for names in part] != [list(names) for names in known[0]]:
            raise DataError(
                f"the transform makes the columns {list(part[0])} of some rows and {list(known[0][0])} of"
                " others; all must have the same, in the same order."
            )
    return PreparedLayout(features=known[0][0], labels=known[0][1])
