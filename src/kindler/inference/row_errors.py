"""Rows that fail while others are scored: whose error it is, finding the rows, and nulls in their place."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from kindler.data.columns import Array
from kindler.errors import DataError, KindlerError, RowsFailedError

Arrays = tuple[Array, ...]
Outputs = list[Array]
T = TypeVar("T")

_log = logging.getLogger(__name__)
_SHOWN = 5
_UNSTABLE = re.compile(r" at 0x[0-9a-f]+|\x1b\[\d*m")
_MOST = 300  # characters of an error
# These are errors of the process, its device or its packages, whatever rows it computes.
_PROCESS = (MemoryError, ImportError, RecursionError)
_DEVICE = ("out of memory", "allocate memory", "resourceexhausted", "cuda error", "cudaerror", "device-side")


def is_of_a_row(error: Exception) -> bool:
    if isinstance(error, _PROCESS) or (isinstance(error, KindlerError) and not isinstance(error, DataError)):
        return False
    text = f"{type(error).__name__} {error}".lower()
    return not any(words in text for words in _DEVICE)


def said(error: Exception) -> str:
    """The same for a row wherever it is, in any batch."""
    if isinstance(error, DataError):
        text = error.common.partition("\n")[0]
        text = text if error.column is None else f"column {error.column!r}: {text}"
    else:  # Keras names the layer first, in bold letters
        lines = [line.strip() for line in _UNSTABLE.sub("", str(error)).splitlines()]
        text = " ".join([line for line in lines if line and not line.startswith("Hint:")][:2])
    return _UNSTABLE.sub("", f"{type(error).__name__}: {text}")[:_MOST]


@dataclass
class Failures:
    """The rows of a pass that failed, so far."""

    rows: int = 0
    count: int = 0
    kinds: dict[str, int] = field(default_factory=dict)  # the first few different errors, and how often

    def __iadd__(self, errors: Array) -> Failures:
        self.rows += len(errors)
        failed = errors[errors != None]  # noqa: E711 - by element
        self.count += len(failed)
        for text in failed.tolist():
            if text in self.kinds or len(self.kinds) < _SHOWN:
                self.kinds[text] = self.kinds.get(text, 0) + 1
        return self

    def joined(self, other: Failures) -> Failures:
        kinds = dict(self.kinds)
        for text, times in other.kinds.items():
            if text in kinds or len(kinds) < _SHOWN:
                kinds[text] = kinds.get(text, 0) + times
        return Failures(self.rows + other.rows, self.count + other.count, kinds)

    def check(self, most: int | None) -> None:
        if most is not None and self.count > most:
            raise RowsFailedError(count=self.count, rows=self.rows, most=most, kinds=self.kinds)

    def __str__(self) -> str:
        shown = "".join(f"\n  {text} ({times:,} times)" for text, times in self.kinds.items())
        return f"{self.count:,} of {self.rows:,} rows could not be scored:{shown}"


class Finder:
    """Finds the rows of a batch that an error is of, by trying parts of it."""

    def __init__(self) -> None:
        self._tried = self._failed = 0

    def parts(
        self, rows: int, attempt: Callable[[Array], T], error: Exception, failed: dict[int, Exception]
    ) -> Iterator[tuple[Array, T]]:
        """What `attempt` returns for all rows but those that go to `failed`, in parts; it raised `error` for
        all of them together."""
        before = len(failed)
        waiting = self._cut(np.arange(rows), error, failed)
        while waiting:
            part = waiting.popleft()
            try:
                result = attempt(part)
            except Exception as exc:
                if not is_of_a_row(exc):
                    raise
                waiting.extendleft(reversed(self._cut(part, exc, failed)))
            else:
                yield part, result
        self._tried, self._failed = self._tried + rows, self._failed + len(failed) - before

    def _cut(self, rows: Array, error: Exception, failed: dict[int, Exception]) -> deque[Array]:
        positions = [place for place in positions_of(error) if 0 <= place < len(rows)]
        if positions or len(rows) == 1:
            failed |= dict.fromkeys(rows[positions or [0]].tolist(), error)
            rest = np.delete(rows, positions or [0])
            return deque([rest] if len(rest) else [])
        # As many rows as had one failing among them with a chance of one half in the batches before; a power
        # of two, since some frameworks compile for each size.
        size = (len(rows) + 1) // 2
        if self._failed:
            size = min(size, 1 << max(0, int(0.7 * self._tried / self._failed).bit_length() - 1))
        return deque(rows[start : start + size] for start in range(0, len(rows), size))


def positions_of(error: Exception) -> Sequence[int]:
    """The rows of the batch that an error names."""
    try:
        return [int(place) for place in getattr(error, "positions", None) or ()]
    except (TypeError, ValueError):  # an attribute of the user's own that means something else
        return []


@dataclass(eq=False)
class Batch(Generic[T]):
    """Rows on their way to the model: the inputs of those in `kept` (None: of all `rows`), and the errors of
    the others."""

    rows: int
    inputs: T | None
    kept: Array | None = None
    failed: dict[int, Exception] = field(default_factory=dict)


class RowErrors:
    """One pass over rows of which some may fail. `like` are arrays as the outputs are, if they are known;
    `worked` whether this process has scored any row."""

    def __init__(
        self,
        failures: Failures,
        *,
        batch_size: int,
        most: int | None,
        column: bool,
        like: Sequence[Array] | None,
        worked: bool,
    ) -> None:
        self._failures, self._most, self._column = failures, most, column
        self._like, self.worked = like, worked
        self._patience = batch_size
        self._finder, self._preparing = Finder(), Finder()
        self._read = 0
        self._unread: deque[tuple[int, Exception]] = deque()
        self._first: Exception | None = None

    def readable(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """Chunks as they are; remembers which rows they lack."""
        for chunk in chunks:
            failed = getattr(chunk, "failed", {})
            self._unread.extend((self._read + place, failed[place]) for place in sorted(failed))
            self._read += getattr(chunk, "rows", len(chunk[0]))
            yield chunk

    def prepared(
        self, rows: int, prepare: Callable[[Array | None, dict[int, Exception]], T | None]
    ) -> Batch[T]:
        """`prepare` gets some rows of a batch, or None for all. It notes rows that fail one by one, raises
        what it cannot say the row of, and returns None if no row is left."""
        failed: dict[int, Exception] = {}
        try:
            inputs = prepare(None, failed)
            kept = np.delete(np.arange(rows), sorted(failed)) if failed else None
            return Batch(rows, inputs, kept, failed)
        except Exception as exc:
            if not is_of_a_row(exc):
                raise
            error = exc
        failed = {}

        def attempt(part: Array) -> None:
            own: dict[int, Exception] = {}
            prepare(part, own)
            failed.update({int(part[i]): exc for i, exc in own.items()})

        for _ in self._preparing.parts(rows, attempt, error, failed):
            pass
        kept = np.delete(np.arange(rows), sorted(failed))
        # Prepared together, as if the others had not been there.
        inputs = prepare(kept, {}) if len(kept) else None
        return Batch(rows, inputs, kept, dict(sorted(failed.items())))

    def scored(
        self,
        batches: Iterator[Batch[Arrays]],
        compute: Callable[[Iterator[Arrays]], Iterator[Outputs]],
        lend: Callable[[Arrays], Arrays],
    ) -> Iterator[Outputs]:
        """Outputs for all rows of each batch, with any values in those that failed, and their errors last."""
        waiting: list[tuple[Batch[Arrays], Outputs | None]] = []
        failed = 0
        for batch, outputs in self._computed(batches, compute, lend):
            waiting.append((batch, outputs))
            if outputs is not None:
                self._like, self.worked = [output[:0] for output in outputs], True
            else:
                self._first = self._first or next(iter(batch.failed.values()))
                failed += batch.rows
                if not self.worked and failed >= self._patience:
                    self._give_up(failed)
            if self._like is not None:  # until then, what to put in place of outputs is unknown
                yield from (self._whole(*each) for each in waiting)
                waiting = []
        if waiting:
            self._give_up(failed)

    def completed(self, batches: Iterable[Outputs]) -> Iterator[Outputs]:
        """Outputs with nulls, and errors if they are asked for, of the rows that could not be read, too."""
        row = 0
        for *outputs, errors in batches:
            places: list[int] = []
            texts: list[str] = []
            while self._unread and self._unread[0][0] < row + len(errors) + len(places):
                number, error = self._unread.popleft()
                places.append(number - row)
                texts.append(said(error))
            kept = None
            if places:
                kept = np.delete(np.arange(len(errors) + len(places)), places)
                errors = _scattered(errors, kept, len(errors) + len(places))
                errors[places] = texts
            row += len(errors)
            yield self._nulls([_scattered(output, kept, len(errors)) for output in outputs], errors)
        if self._unread:
            if self._like is None:
                self._first = self._unread[0][1]
                self._give_up(len(self._unread))
            errors = np.array([said(error) for _, error in self._unread], object)
            assert self._like is not None
            yield self._nulls([_scattered(output, (), len(errors)) for output in self._like], errors)

    def _computed(
        self,
        batches: Iterator[Batch[Arrays]],
        compute: Callable[[Iterator[Arrays]], Iterator[Outputs]],
        lend: Callable[[Arrays], Arrays],
    ) -> Iterator[tuple[Batch[Arrays], Outputs | None]]:
        under_way: deque[Batch[Arrays]] = deque()
        reading = False

        def inputs() -> Iterator[Arrays]:
            nonlocal reading
            while True:
                reading = True
                batch = next(batches, None)
                reading = False
                if batch is None:
                    return
                under_way.append(batch)
                if batch.inputs is not None:
                    yield lend(batch.inputs)

        def empty() -> Iterator[tuple[Batch[Arrays], None]]:
            while under_way and under_way[0].inputs is None:
                yield under_way.popleft(), None

        while True:
            try:
                for outputs in compute(inputs()):
                    yield from empty()
                    yield under_way.popleft(), outputs
                yield from empty()
                return
            except Exception as exc:
                if reading or not is_of_a_row(exc):
                    raise
                error: Exception | None = exc
            # Others are under way where batches are computed ahead: each of them is computed alone.
            alone = sum(batch.inputs is not None for batch in under_way) == 1
            while under_way:
                batch = under_way.popleft()
                yield batch, self._alone(batch, compute, lend, error if alone else None)

    def _alone(
        self,
        batch: Batch[Arrays],
        compute: Callable[[Iterator[Arrays]], Iterator[Outputs]],
        lend: Callable[[Arrays], Arrays],
        error: Exception | None,
    ) -> Outputs | None:
        inputs = batch.inputs
        if inputs is None:
            return None

        def attempt(rows: Array | None) -> Outputs:
            some = inputs if rows is None else tuple(array[rows] for array in inputs)
            [outputs] = compute(iter([lend(some)]))
            return outputs

        if error is None:
            try:
                return attempt(None)
            except Exception as exc:
                if not is_of_a_row(exc):
                    raise
                error = exc
        failed: dict[int, Exception] = {}
        rows = len(inputs[0])
        parts = list(self._finder.parts(rows, attempt, error, failed))
        numbers = range(rows) if batch.kept is None else batch.kept
        batch.failed = dict(sorted((batch.failed | {int(numbers[i]): e for i, e in failed.items()}).items()))
        if not parts:
            return None
        order = np.concatenate([part for part, _ in parts])
        columns = [np.concatenate(column) for column in zip(*(outputs for _, outputs in parts), strict=True)]
        return [_scattered(column, order, rows) for column in columns]

    def _whole(self, batch: Batch[Arrays], outputs: Outputs | None) -> Outputs:
        errors = np.full(batch.rows, None, object)
        for place, error in batch.failed.items():
            errors[place] = said(error)
        if outputs is None:
            return [*(_scattered(output, (), batch.rows) for output in self._like or ()), errors]
        return [*(_scattered(output, batch.kept, batch.rows) for output in outputs), errors]

    def _nulls(self, outputs: Outputs, errors: Array) -> Outputs:
        self._failures += errors
        self._failures.check(self._most)
        missing = errors != None  # noqa: E711 - by element
        if missing.any():
            outputs = [_with_nulls(output, missing) for output in outputs]
        return [*outputs, errors] if self._column else outputs

    def _give_up(self, rows: int) -> None:
        """No row has an error if all have one: what fails is the model, or how it is used."""
        assert self._first is not None
        note: Any = getattr(self._first, "add_note", _log.warning)  # which Python 3.10 lacks
        note(f"None of the first {rows:,} rows could be scored, so this is not taken for an error of rows.")
        raise self._first


def _scattered(values: Array, places: Any, rows: int) -> Array:
    """An array of so many rows that has `values` in some places; None: in all."""
    if places is None:
        return values
    whole = np.zeros((rows, *values.shape[1:]), values.dtype)
    if len(places):
        whole[places] = values
    return whole


def _with_nulls(output: Array, missing: Array) -> Array:
    if output.dtype == object:
        output = output.copy()
        output[missing] = None
        return output
    return np.ma.array(
        output, mask=np.broadcast_to(missing.reshape(-1, *[1] * (output.ndim - 1)), output.shape)
    )
