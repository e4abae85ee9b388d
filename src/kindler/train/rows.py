"""Opening the data of a run on a worker: what workers agree on before the first step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kindler.data.batches import (
    AllRows,
    Batches,
    BatchOptions,
    PreparedBatches,
    PreparedLayout,
    Rows,
    layout_of,
    lengths_of,
)
from kindler.data.columns import Array, ColumnPlan
from kindler.data.preparation import Prepare, Preparer
from kindler.data.ragged import Ragged
from kindler.data.row_order import RowAssignment, joined_counts
from kindler.data.sources import Source
from kindler.data.spool import Spool, agreed
from kindler.data.statistics import Summary, measured, sample_size, some_rows, summarised
from kindler.engine.placement import half_of_memory
from kindler.errors import ConfigError, DataError, SyncError
from kindler.group import Group
from kindler.train.loaders import AgreedSteps, NumberedSteps, StreamSource
from kindler.train.options import Task

_MOST_THREADS = 4
_SAMPLE_ROWS = 2


def open_rows(
    worker: Group, task: Task, source: Source | StreamSource, what: str, *, trains: bool, numbered: bool
) -> Rows:
    """This worker's data; all workers call it. `numbered` is for a loop that asks for steps by number."""
    if not isinstance(source, StreamSource):
        spool, batches = _open_batches(worker, task, source, what, trains=trains)
        if trains:
            batches.statistics = statistics_of(worker, spool, task.config.seed)
        return batches
    return (NumberedSteps if numbered else AgreedSteps)(
        worker,
        source,
        what=what,
        trains=trains,
        batch_size=task.options.batch_size,
        seed=task.config.seed,
        steps_per_epoch=task.training.steps_per_epoch if trains else None,
    )


def statistics_of(worker: Group, spool: Spool, seed: int) -> list[dict[str, Summary]]:
    """The summaries of all workers, on the first one; merged later, as no other worker should wait for it."""
    some = some_rows(spool.rows, sample_size(spool.rows), seed=seed + worker.rank)
    own = summarised(measured(spool.arrays, spool.positions(some)), spool.rows)
    shown = json.dumps({name: one.to_json() for name, one in own.items()}).encode()
    parts = [json.loads(part) for part in worker.to_first(shown) if part]
    return [{name: Summary.from_json(one) for name, one in part.items()} for part in parts]


def _open_batches(
    worker: Group, task: Task, source: Source, what: str, *, trains: bool
) -> tuple[Spool, Batches]:
    """This worker's part of a source, cut into as many steps as on every other; all workers call it."""
    dealing = task.dealing or RowAssignment.between(worker.size, seed=task.config.seed)
    shuffle = trains and task.training.shuffle
    preparation = task.options.preparation
    ragged = any(column.ragged for column in source.columns.all)
    if preparation is not None and not preparation.active and not ragged:
        preparation = None  # batches are taken as they lie in the spool
    numbered = (trains and not shuffle) or preparation is not None
    spool = source.open(worker, dealing, in_order=numbered)
    own_lanes = spool.lane_counts(dealing.known_lanes)[worker.rank :: worker.size]
    parts = _whose_rows(worker, spool, own_lanes)
    # In a message of their own: they are the same on most workers, and equal bytes travel once.
    layouts = dict.fromkeys(worker.all_gather(json.dumps(spool.layout).encode()))
    rows = sum(part["rows"] for part in parts)
    if not rows:
        raise DataError(f"{what} has no rows.")
    spool = spool.with_layout(agreed([json.loads(layout) for layout in layouts]))
    if any(part["lanes"] for part in parts):
        by_rank = [part["lanes"] for part in parts]
        counts = joined_counts(by_rank, dealing.known_lanes, dealing.lanes_for(rows))
        spool = spool.with_lanes(len(counts))
    else:
        counts = [part["rows"] for part in parts]
    options = BatchOptions(
        counts=counts,
        rank=worker.rank,
        size=worker.size,
        batch_size=task.options.batch_size,
        seed=task.config.seed,
        shuffle=shuffle,
        marks=_marks(worker, spool, len(counts)) if trains else (),
        weighted=task.options.columns.weight_col is not None,
        memory_bytes=2 * half_of_memory(),
    )
    if preparation is None:
        return spool, Batches(spool, source.columns, options)
    stack = bool(task.options.columns.stack_features)
    batches = _prepared_batches(
        worker, spool, source.columns, preparation, options, trains=trains, stack=stack
    )
    return spool, batches


def _whose_rows(worker: Group, spool: Spool, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """How many rows each worker has, and of which lanes."""
    mark = spool.fingerprint(np.arange(spool.rows)) if worker.regroups else ""
    mine = {"rows": spool.rows, "lanes": list(lanes), "mark": mark}
    parts = _gathered(worker, mine)
    if parts[worker.rank] != mine:  # the answer to the process whose place this one takes
        raise SyncError(
            f"worker {worker.rank} has other rows than the process whose place it takes: the data was"
            " computed again, and is not the same.\n"
            "Hint: cache or write a frame whose rows, or their order, differ each time they are computed."
        )
    return parts


def _gathered(worker: Group, mine: Any) -> list[Any]:
    return [json.loads(part) for part in worker.all_gather(json.dumps(mine).encode())]


def _marks(worker: Group, spool: Spool, lanes: int) -> list[str]:
    own = {lane: spool.fingerprint(rows, parts=lanes) for lane, rows in spool.by_lane(worker.rank).items()}
    marks = {int(lane): mark for part in _gathered(worker, own) for lane, mark in part.items()}
    return [marks.get(lane, "") for lane in range(lanes)]


def _prepared_batches(
    worker: Group,
    spool: Spool,
    columns: ColumnPlan,
    preparation: Prepare,
    options: BatchOptions,
    *,
    trains: bool,
    stack: bool,
) -> PreparedBatches:
    threads = max(1, min(_MOST_THREADS, worker.threads))
    seed, rank = options.seed, worker.rank
    preparer = Preparer(preparation, columns, trains=trains, seed=seed, rank=rank, copies=threads > 1)
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
    return PreparedBatches(
        spool,
        columns,
        options,
        preparer=preparer,
        prepared=_agreed_layout(worker, preparer, spool, columns, free=preparation.collate is not None),
        everybody=_all_rows(worker, spool, options.counts, wanted),
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


def _all_rows(worker: Group, spool: Spool, counts: Sequence[int], names: Sequence[str]) -> AllRows:
    if not names:
        return AllRows(lengths={})
    # This worker's rows, grouped by lane, as places in their natural order.
    own = np.arange(spool.rows) if spool.lanes is None else np.argsort(spool.lanes, kind="stable")
    places = spool.positions(own)
    lengths = {name: _shared(worker, lengths_of(spool.arrays[name], places), counts) for name in names}
    numbers = np.full(len(own), -1) if spool.numbers is None else spool.numbers[own]
    known = _shared(worker, numbers, counts)
    return AllRows(lengths=lengths, numbers=None if (known < 0).any() else known)


def _shared(worker: Group, own: Array, counts: Sequence[int]) -> Array:
    """One number per row of all workers, lane after lane."""
    if worker.size == 1:
        return own.astype(np.int64)
    gathered = [np.frombuffer(part, np.int64) for part in worker.all_gather(own.astype(np.int64).tobytes())]
    ends = np.cumsum(counts)
    shared = np.empty(int(ends[-1]), np.int64)
    for rank, part in enumerate(gathered):
        begin = 0
        for lane in range(rank, len(counts), worker.size):
            count = int(counts[lane])
            shared[ends[lane] - count : ends[lane]] = part[begin : begin + count]
            begin += count
    return shared


def _agreed_layout(
    worker: Group, preparer: Preparer, spool: Spool, columns: ColumnPlan, *, free: bool
) -> PreparedLayout:
    """What prepared rows look like, tried on one or two; workers without rows learn it from the others."""
    mine: Any = None
    if spool.rows:
        rows = np.arange(min(_SAMPLE_ROWS, spool.rows))
        raw = spool.taken((*columns.features, *columns.labels), rows)
        locate = spool.locate
        prepared = preparer(
            raw,
            rows=len(rows),
            where=(lambda row: int(rows[row])) if locate is None else (lambda row: locate(int(rows[row]))),
            numbers=rows if spool.numbers is None else spool.numbers[rows],
        )
        layout = layout_of(prepared, free=free)
        mine = [layout.features, layout.labels]
    known = [part for part in _gathered(worker, mine) if part is not None]
    for part in known[1:]:
        if [list(names) for names in part] != [list(names) for names in known[0]]:
            raise DataError(
                f"the transform returns the columns {list(part[0])} for some rows and {list(known[0][0])} "
                "for others; all must have the same, in the same order."
            )
    return PreparedLayout(features=known[0][0], labels=known[0][1])
