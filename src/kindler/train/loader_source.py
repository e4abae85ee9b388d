"""Data that the user's own code makes on the workers: functions, loaders, datasets, iterables.

What travels there is a `StreamSource`; opened, it gives this worker's batches pass after pass, and all
workers know what those consist of. How they become steps that all take together is in `loader_steps.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kindler.data.batch_format import WEIGHT, Form, Part, form_of, read
from kindler.data.batches import Batch
from kindler.data.spool import Layout
from kindler.errors import ConfigError, DataError
from kindler.frameworks.creators import call, positional, title
from kindler.frameworks.loaders import Dealing, is_loader, open_stream, packed
from kindler.frameworks.rng import Drawing, seed_all, seed_own
from kindler.group import Group

_MOST_BATCHES = 10_000_000  # of one pass, where nobody knows how many there are


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """How a worker comes by its batches.

    Attributes:
        make: Makes what gives batches, on the worker.
        creator: Whether it is a function of the user's, to be called with `config` and the worker's share of
            the batch size; otherwise it is called with nothing.
        config: What creators are given.
        whole: Whether its batches are those of all workers, and each takes its part of their rows.
        weights: Whether the third part of a batch is a weight per row; otherwise the last is the target.
        allow_nan: Whether NaN is a value, for all arrays or those named.
    """

    make: Callable[..., Any]
    creator: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    weights: bool = False
    allow_nan: bool | Sequence[str] = False

    def maker(self, batch_size: int, rank: int, size: int) -> Callable[[], Any]:
        """A function without arguments, for this worker."""
        if not self.creator:
            return self.make
        here: tuple[Any, ...] = (dict(self.config), share(batch_size, rank, size))
        if positional(self.make) == 4:
            here += (rank, size)
        return lambda: call(self.make, *here)


def is_stream(data: Any) -> bool:
    """Whether this gives batches, or makes what does; no framework is imported to find out."""
    return is_loader(data) or callable(data)


def stream_source(
    data: Any, *, config: Mapping[str, Any], weights: bool, allow_nan: bool | Sequence[str] = False
) -> StreamSource:
    """A creator or a loader as what travels to the workers.

    Args:
        data: What the user handed in.
        config: What creators are given.
        weights: Whether the third part of a batch is a weight per row.
        allow_nan: Whether NaN is a value.

    Raises:
        ConfigError: A loader that cannot travel, or a function that asks for too much.
    """
    if is_loader(data):
        return StreamSource(
            make=packed(data), creator=False, whole=True, weights=weights, allow_nan=allow_nan
        )
    needed = positional(data)
    if needed not in (None, 0, 1, 2, 4):
        raise ConfigError(
            f"{title(data)} needs {needed} arguments; a function that makes data is called with"
            " (config, batch_size), or with (config, batch_size, rank, workers).\n"
            "Hint: bind the others with functools.partial, or read them from the config."
        )
    return StreamSource(make=data, creator=True, config=dict(config), weights=weights, allow_nan=allow_nan)


def share(batch_size: int, rank: int, size: int) -> int:
    """A worker's part of the batch size; the remainder goes to the first ones, and nobody's is nothing.

    >>> [share(128, rank, 3) for rank in range(3)]
    [43, 43, 42]
    """
    return max(1, batch_size // size + (rank < batch_size % size))


class Reader:
    """This worker's batches of a stream, as arrays.

    Attributes:
        form: What they consist of, once one was read.
        whole: Whether they are cut out of batches of all workers.

    Args:
        worker: This worker.
        source: The stream.
        batch_size: Rows of a step over all workers.
        seed: Fixes every order that is drawn.
        what: How to call the data in complaints.
        trains: Whether batches of all workers must stay what they are; judges may deal them as they like.
    """

    def __init__(
        self, worker: Group, source: StreamSource, *, batch_size: int, seed: int, what: str, trains: bool
    ) -> None:
        self._worker, self._source, self._what = worker, source, what
        self.form: Form | None = None
        self.whole = source.whole and trains
        make = source.maker(batch_size, worker.rank, worker.size)
        unit: Any = "samples" if not source.whole else "rows" if trains else "batches"
        dealing = Dealing(worker.rank, worker.size, seed, unit)
        # Data that is drawn must be the same on all workers, or dealing it out would lose and double rows.
        with Drawing(seed):
            seed_all(seed)
            name = title(source.make) if source.creator else what
            self._stream = open_stream(make, dealing, title=name)
        seed_own(seed, worker.rank)  # what is done to rows on their way may differ

    def length(self) -> float | None:
        """Batches of a pass; `math.inf`, or None where that is not known."""
        return self._stream.length()

    def refuse_endless(self) -> None:
        """Complain about a pass that would never end."""
        if self.length() == math.inf:
            raise ConfigError(
                f"{self._what} has no end, so an epoch over it would have none.\n"
                "Hint: fit(steps_per_epoch=...) says how many steps an epoch has; validation data must end."
            )

    def parts(self, number: int) -> Generator[Part | None, None, None]:
        """The pass of this number; None is a step without rows. Close it when done."""
        stream, worker = self._stream, self._worker
        with closing(stream.batches(number)) as batches:
            for place, batch in enumerate(batches):
                if place >= _MOST_BATCHES:
                    raise DataError(
                        f"{self._what} has given {_MOST_BATCHES:,} batches and no end is in sight.\n"
                        "Hint: fit(steps_per_epoch=...) makes epochs of a stream without end."
                    )
                worker.tick()
                part = None if batch is None else self._read(batch, place)
                yield part if part is not None and part.rows else None

    def close(self) -> None:
        """Leave no process behind."""
        self._stream.close()

    def _read(self, batch: Any, place: int) -> Part:
        source, worker = self._source, self._worker
        if self.form is None:
            self.form = form_of(batch, weights=source.weights)
        part = read(batch, self.form, weights=source.weights, allow_nan=source.allow_nan, number=place)
        if self._stream.cut:
            return part.taken(worker.rank, worker.size)
        return part if self._stream.fresh else part.copied()


class Peeking:
    """The parts of a pass, of which the next can be looked at before it is taken."""

    def __init__(self, parts: Generator[Part | None, None, None]) -> None:
        self._parts = parts
        self._next: list[Part | None] = []
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether there is nothing more; reads a part if need be."""
        if not self._next and not self._ended:
            try:
                self._next.append(next(self._parts))
            except StopIteration:
                self._ended = True
        return self._ended and not self._next

    def peek(self) -> Part | None:
        """The next part; None too when there is none."""
        return None if self.ended else self._next[0]

    def __iter__(self) -> Iterator[Part | None]:
        return self

    def __next__(self) -> Part | None:
        if self.ended:
            raise StopIteration
        return self._next.pop()

    def close(self) -> None:
        """End the pass."""
        self._parts.close()
        self._next, self._ended = [], True


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all workers know of a stream.

    Attributes:
        form: What its batches consist of.
        layout: dtype and row shape of each array, by name.
        lengths: Batches of a pass of each worker; None where not all know theirs.
    """

    form: Form
    layout: Layout
    lengths: tuple[int, ...] | None

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays of a batch, in their order."""
        weight = (WEIGHT,) if self.form.weighted else ()
        return (*self.form.features, *self.form.labels, *weight)

    def empty(self, global_rows: int = 0) -> Batch:
        """A step in which this worker has no rows."""
        arrays = [np.empty((0, *shape), dtype) for dtype, shape in (self.layout[n] for n in self.names)]
        cut = len(self.form.features)
        return Batch(tuple(arrays[:cut]), tuple(arrays[cut:]), 0, global_rows)


def agree(worker: Group, reader: Reader, first: Part | None, *, what: str) -> Agreed:
    """What every worker found in its first batch, made known to all; all call it together.

    Args:
        worker: This worker.
        reader: Its stream.
        first: Its first batch with rows, or None.
        what: How to call the data in complaints.

    Raises:
        DataError: There is no row at all, or workers have batches of different kinds.
    """
    mine: dict[str, Any] = {"length": reader.length(), "form": None}
    if first is not None and reader.form is not None:
        form = reader.form
        arrays = (*first.features, *first.labels)
        mine["form"] = [list(form.features), list(form.labels), form.weighted, form.by_name]
        mine["layout"] = [[array.dtype.name, list(array.shape[1:])] for array in arrays]
    told = [json.loads(part) for part in worker.all_gather(json.dumps(mine).encode())]
    lengths = [part["length"] for part in told]
    known = [part for part in told if part["form"] is not None]
    if not known:
        raise DataError(f"{what} has no rows: no worker was given a batch.")
    _refuse_different(known, what)
    features, labels, weighted, by_name = known[0]["form"]
    form = Form(tuple(features), tuple(labels), weighted, by_name)
    finite = all(length is not None and length != math.inf for length in lengths)
    agreed = Agreed(form, {}, tuple(int(length) for length in lengths) if finite else None)
    return replace(agreed, layout=dict(zip(agreed.names, known[0]["layout"], strict=True)))


def _refuse_different(known: Sequence[Mapping[str, Any]], what: str) -> None:
    for part in known[1:]:
        kinds = [[(dtype, len(shape)) for dtype, shape in p["layout"]] for p in (known[0], part)]
        if part["form"] != known[0]["form"] or kinds[0] != kinds[1]:
            raise DataError(
                f"{what} gives workers batches of different kinds:"
                f" {known[0]['form']} {known[0]['layout']} and {part['form']} {part['layout']}."
            )
