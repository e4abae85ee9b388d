"""Data that the user's own code makes on the workers, batch by batch: functions, loaders, datasets.

A `StreamSource` travels to the worker, where `kindler.frameworks.loaders` deals its batches to ranks. Nobody
knows ahead how many rows the others bring: `AgreedSteps` agrees on a few steps at a time; `NumberedSteps`
serves a framework that weighs by rows itself and asks for steps by number from its own threads, where no
worker may wait for another.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kindler.data.batch_format import WEIGHT, Form, Part, form_of, read
from kindler.data.batches import Batch, Rows
from kindler.data.columns import Array
from kindler.data.spool import Layout
from kindler.errors import ConfigError, DataError
from kindler.frameworks.creators import call, positional, title
from kindler.frameworks.loaders import LoaderSharding, is_loader, open_stream, packed
from kindler.frameworks.rng import Drawing, seed_all, seed_own
from kindler.group import Group

_MOST_BATCHES = 10_000_000  # of one pass, where nobody knows how many there are
_WINDOW = 8


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """How a worker gets its batches."""

    make: Callable[..., Any]
    creator: bool  # whether `make` takes `config` and a batch size, rather than nothing
    config: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False  # whether batches are those of all workers, and each takes its part of the rows
    weights: bool = False  # whether the third part of a batch is a weight per row, not a target
    allow_nan: bool | Sequence[str] = False

    def maker(self, batch_size: int, rank: int, size: int) -> Callable[[], Any]:
        if not self.creator:
            return self.make
        here: tuple[Any, ...] = (dict(self.config), share(batch_size, rank, size))
        if positional(self.make) == 4:
            here += (rank, size)
        return lambda: call(self.make, *here)


def is_stream(data: Any) -> bool:
    """Whether this yields batches, or makes what does; imports no framework to find out."""
    return is_loader(data) or callable(data)


def stream_source(
    data: Any, *, config: Mapping[str, Any], weights: bool, allow_nan: bool | Sequence[str] = False
) -> StreamSource:
    if is_loader(data):
        return StreamSource(
            make=packed(data), creator=False, whole=True, weights=weights, allow_nan=allow_nan
        )
    needed = positional(data)
    if needed not in (None, 0, 1, 2, 4):
        raise ConfigError(
            f"{title(data)} needs {needed} arguments; a function that creates data is called with"
            " (config, batch_size), or with (config, batch_size, rank, workers).\n"
            "Hint: bind the others with functools.partial, or read them from the config."
        )
    return StreamSource(make=data, creator=True, config=dict(config), weights=weights, allow_nan=allow_nan)


def share(batch_size: int, rank: int, size: int) -> int:
    """A worker's share of the batch size, at least 1; the remainder goes to the first ones.

    >>> [share(128, rank, 3) for rank in range(3)]
    [43, 43, 42]
    """
    return max(1, batch_size // size + (rank < batch_size % size))


class _StreamRows(Rows):
    """This worker's batches of a stream, as arrays. Rows are not counted, so no run can resume in mid-epoch.

    When it `trains`, batches of all workers must stay as they are; an evaluation may deal them freely.
    `number` is the likely first pass.
    """

    def __init__(
        self,
        worker: Group,
        source: StreamSource,
        *,
        what: str,
        trains: bool,
        batch_size: int,
        seed: int,
        steps_per_epoch: int | None = None,
        number: int = 1,
    ) -> None:
        self._worker, self._source, self._what = worker, source, what
        self._bounded = steps_per_epoch if trains else None
        unit: Any = "samples" if not source.whole else "rows" if trains else "batches"
        # Data that is drawn must be the same on all workers, or dealing it out would lose and double rows.
        with Drawing(seed):
            seed_all(seed)
            self._stream = open_stream(
                source.maker(batch_size, worker.rank, worker.size),
                LoaderSharding(worker.rank, worker.size, seed, unit),
                title=title(source.make) if source.creator else what,
            )
        seed_own(seed, worker.rank)  # what is done to rows on their way may differ
        if self._bounded is None and self._stream.length() == math.inf:
            raise ConfigError(
                f"{what} has no end, so an epoch over it would never end.\n"
                "Hint: Epochs(steps_per_epoch=...) sets its number of steps; validation data must end."
            )
        self._form: Form | None = None
        self._begun: tuple[int, Peeking] | None = None
        parts = self._begin(number)
        self._begun = (number, parts)
        form, self._layout, self._lengths = self._agree(parts.peek())
        self.features, self.labels, self.by_name = form.features, form.labels, form.by_name
        self.label_shapes = [self._layout[name][1] for name in self.labels]

    @property
    def layout(self) -> Layout:
        return self._layout

    def close(self) -> None:
        if self._begun is not None:
            self._begun[1].close()
            self._begun = None
        self._stream.close()

    def _begin(self, number: int) -> Peeking:
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == number:
            return begun[1]
        if begun is not None:
            begun[1].close()
        return Peeking(self._parts(number))

    def _parts(self, number: int) -> Generator[Part | None, None, None]:
        """The pass of this number; None is a step without rows. Close it when done."""
        with closing(self._stream.batches(number)) as batches:
            for place, batch in enumerate(batches):
                if place >= _MOST_BATCHES:
                    raise DataError(
                        f"{self._what} has yielded {_MOST_BATCHES:,} batches without coming to an end.\n"
                        "Hint: Epochs(steps_per_epoch=...) divides an endless stream into epochs."
                    )
                self._worker.tick()
                part = None if batch is None else self._read(batch, place)
                yield part if part is not None and part.rows else None

    def _read(self, batch: Any, place: int) -> Part:
        source, worker = self._source, self._worker
        if self._form is None:
            self._form = form_of(batch, weights=source.weights)
        part = read(batch, self._form, weights=source.weights, allow_nan=source.allow_nan, number=place)
        if self._stream.cut:
            return part.taken(worker.rank, worker.size)
        return part if self._stream.fresh else part.taken(0, 1)

    def _agree(self, first: Part | None) -> tuple[Form, Layout, tuple[int, ...] | None]:
        """Compare every worker's `first` batch with rows; all call it together.

        Lengths of passes are None unless all of them are known.
        """
        mine: dict[str, Any] = {"length": self._stream.length(), "form": None}
        if first is not None and self._form is not None:
            form, arrays = self._form, (*first.features, *first.labels)
            mine["form"] = [list(form.features), list(form.labels), form.weighted, form.by_name]
            mine["layout"] = [[array.dtype.name, list(array.shape[1:])] for array in arrays]
        parts = [json.loads(part) for part in self._worker.all_gather(json.dumps(mine).encode())]
        known = [part for part in parts if part["form"] is not None]
        if not known:
            raise DataError(f"{self._what} has no rows: no worker received a batch.")
        for part in known[1:]:
            kinds = [[(dtype, len(shape)) for dtype, shape in p["layout"]] for p in (known[0], part)]
            if part["form"] != known[0]["form"] or kinds[0] != kinds[1]:
                raise DataError(
                    f"{self._what} yields batches of different kinds to workers:"
                    f" {known[0]['form']} {known[0]['layout']} and {part['form']} {part['layout']}."
                )
        features, labels, weighted, by_name = known[0]["form"]
        form = Form(tuple(features), tuple(labels), weighted, by_name)
        names = (*features, *labels, *((WEIGHT,) if weighted else ()))
        lengths = [part["length"] for part in parts]
        finite = all(length is not None and length != math.inf for length in lengths)
        layout = dict(zip(names, known[0]["layout"], strict=True))
        return form, layout, tuple(int(length) for length in lengths) if finite else None


class Peeking:
    """A pass whose end is known before it is reached."""

    def __init__(self, parts: Generator[Part | None, None, None]) -> None:
        self._parts = parts
        self._next: list[Part | None] = []

    @property
    def ended(self) -> bool:
        """Whether there is nothing more; may read a part."""
        if not self._next:
            self._next += itertools.islice(self._parts, 1)
        return not self._next

    def peek(self) -> Part | None:
        return None if self.ended else self._next[0]

    def __iter__(self) -> Iterator[Part | None]:
        return self

    def __next__(self) -> Part | None:
        if self.ended:
            raise StopIteration
        return self._next.pop()

    def close(self) -> None:
        self._parts.close()
        self._next.clear()


class AgreedSteps(_StreamRows):
    """Steps whose rows are known on all workers before they are made."""

    steps: int | None = None

    def __init__(self, worker: Group, source: StreamSource, *, trains: bool, **options: Any) -> None:
        super().__init__(worker, source, trains=trains, number=1 if trains else 0, **options)
        self.expected = None if self._lengths is None else max(self._lengths)
        self._through: Generator[Batch, None, None] | None = None

    def stretch(self, epoch: int, *, done: int = 0, steps: int | None = None) -> Generator[Batch, None, None]:
        if steps is None:
            yield from self._pass(epoch)
            return
        if self._through is None:
            passes = (self._pass(number, is_epoch=False) for number in itertools.count(epoch))
            self._through = (batch for each in passes for batch in each)
        yield from itertools.islice(self._through, steps - done)

    def close(self) -> None:
        if self._through is not None:
            self._through.close()
            self._through = None
        super().close()

    def _pass(self, number: int, *, is_epoch: bool = True) -> Generator[Batch, None, None]:
        parts, made, window = self._begin(number), 0, 1
        try:
            while True:
                mine = list(itertools.islice(parts, window))
                window = min(2 * window, _WINDOW)  # the first step does not wait for many
                totals, over = self._global_rows(mine, ended=parts.ended)
                last = int(totals.nonzero()[0][-1]) if over and is_epoch and totals.any() else -1
                for step, total in enumerate(totals.tolist()):
                    if total:  # a step in which nobody has a row is none
                        made += 1
                        yield _batch(mine[step] if step < len(mine) else None, total, ends=step == last)
                if over:
                    break
        finally:
            parts.close()
        if not made:
            raise DataError(
                f"{self._what} yielded no batch in pass {number}.\n"
                "Hint: if the data can be read only once, pass a function that creates it for each epoch."
            )

    def _global_rows(self, mine: Sequence[Part | None], *, ended: bool) -> tuple[Array, bool]:
        """Rows of all workers in each of the next steps, and whether nobody has any after them."""
        own = np.zeros(_WINDOW + 1, np.int64)
        own[: len(mine)] = [0 if part is None else part.rows for part in mine]
        own[_WINDOW] = ended
        totals = np.asarray(self._worker.total(own.tolist()), np.int64)
        return totals[:_WINDOW], bool(totals[_WINDOW] == self._worker.size)


class NumberedSteps(_StreamRows):
    """Steps by number; how many a pass has is known before the first.

    If no loader knows its length, each worker reads through a pass once to count. `steps` is the length of
    the longest pass, or None if it is unknown and `steps_per_epoch` gives the steps of an epoch.
    """

    def __init__(self, worker: Group, source: StreamSource, *, trains: bool, **options: Any) -> None:
        super().__init__(worker, source, trains=trains, **options)
        lengths = self._lengths
        if lengths is None and self._bounded is None:
            with closing(self._begin(1)) as parts:
                own = sum(1 for _ in parts)
            lengths = tuple(int(part) for part in worker.all_gather(str(own).encode()))
        self.steps = self.expected = None if lengths is None else max(lengths)
        self._own = None if lengths is None else lengths[worker.rank]
        uneven = self._own is None or source.whole or self._own < (self.steps or 0)
        self._idles = trains and worker.size > 1 and uneven
        self._lock = threading.Lock()
        self._running: Peeking | None = None
        self._number = self._place = self._given = 0
        self._next = -1
        self._last: tuple[int, Batch] | None = None
        self._rows: dict[int, int] = {}

    @property
    def may_idle(self) -> bool:
        return self._idles

    def sample(self) -> Batch:
        return self._whole(None)

    def own_steps(self) -> Sequence[int]:
        return range(self._own or 0)

    def batch(self, step: int) -> Batch:
        """Asked for out of order, a step is the first of a new pass; asked for again, the same."""
        with self._lock:
            if self._last is not None and self._last[0] == step:
                self._rows[step] = self._last[1].rows  # it may be of another round over a single step
                return self._last[1]
            if step != self._next:
                self._start((step // (self.steps or self._bounded or 1)) + 1)
            part = self._take()
            if part is None and not self.may_idle:
                raise DataError(f"{self._what} yielded a batch without rows.")
            batch = self._whole(part)
            self._next, self._last, self._rows[step] = step + 1, (step, batch), batch.rows
            return batch

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        own = sum(self._rows.get(step, 0) for step in range(first, last))
        return own, own * self._worker.size

    def rows_of_all(self, first: int, last: int) -> int:
        own, _ = self.rows_of(first, last)
        # A copy first: a thread that reads ahead may add to it.
        self._rows = {step: rows for step, rows in dict(self._rows).items() if step >= last}
        return self._worker.total([own])[0]

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
        super().close()

    def _start(self, number: int) -> None:
        if self._running is not None:
            self._running.close()
        self._running, self._number, self._place, self._given = self._begin(number), number, 0, 0

    def _take(self) -> Part | None:
        parts = self._running
        if parts is None:
            return None
        if self._own is None:  # passes of unknown length, without end
            if not parts.ended:
                self._given += 1
                return next(parts)
            if not self._given:  # a worker that got nothing in a pass has none
                return None
            self._start(self._number + 1)
            return self._take()
        if self._place == self.steps:
            self._start(self._number + 1)
            return self._take()
        place, self._place = self._place, self._place + 1
        if place >= self._own:
            return None
        if parts.ended:
            raise DataError(f"{self._what} reported {self._own} batches and yielded {place}.")
        part = next(parts)
        if place + 1 == self._own and not parts.ended:
            raise DataError(f"{self._what} reported {self._own} batches and yielded more.")
        return part

    def _whole(self, part: Part | None) -> Batch:
        if part is None:
            empty = [np.empty((0, *shape), dtype) for dtype, shape in self._layout.values()]
            cut = len(self.features)
            return Batch(tuple(empty[:cut]), tuple(empty[cut:]), 0, 0)
        for (name, (dtype, shape)), array in zip(
            self._layout.items(), (*part.features, *part.labels), strict=True
        ):
            if (array.dtype.name, list(array.shape[1:])) != (dtype, list(shape)):
                raise DataError(
                    f"has {array.dtype} rows of shape {array.shape[1:]} where the first batch has {dtype} of"
                    f" {tuple(shape)}; all must match.\nHint: pad rows to one length for all batches.",
                    column=name,
                )
        return _batch(part, part.rows)


def _batch(part: Part | None, global_rows: int, *, ends: bool = False) -> Batch:
    if part is None:
        return Batch((), (), 0, global_rows, ends)
    return Batch(part.features, part.labels, part.rows, global_rows, ends)
