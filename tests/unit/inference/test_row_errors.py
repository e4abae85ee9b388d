"""Finding the rows that fail, without a framework: `compute` is a function of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kindler.errors import ConfigError, DataError, RowsFailedError
from kindler.inference.row_errors import Batch, Failures, Finder, RowErrors, is_of_a_row, said

BAD = [3, 40, 41, 99]


def squares(inputs: Iterator[Any], *, ahead: int = 0, calls: list[int] | None = None) -> Iterator[Any]:
    """Reads some batches ahead, as models on a GPU do; rows of 1,000 and more make it raise."""
    waiting = []
    for (x,) in inputs:
        if calls is not None:
            calls.append(len(x))
        waiting.append(x)
        while len(waiting) > ahead:
            yield squared(waiting.pop(0))
    for x in waiting:
        yield squared(x)


def squared(x: Any) -> list[Any]:
    if (x >= 1000).any():
        raise ValueError("too large")
    return [x**2]


def rows_with(bad: list[int], count: int = 100) -> Any:
    x = np.arange(count) % 30
    x[bad] = 1000
    return x


def scored(x: Any, size: int, compute: Callable[..., Any] = squares, **options: Any) -> tuple[Any, Any]:
    given = {"batch_size": size, "most": None, "column": True, "like": None, "worked": False}
    errors = RowErrors(Failures(), **{**given, **options})
    batches = (Batch(len(part), (part,)) for part in np.split(x, range(size, len(x), size)))
    parts = list(errors.completed(errors.scored(iter(batches), compute, lambda batch: batch)))
    return np.ma.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


@pytest.mark.parametrize("ahead", [0, 1, 6])
@pytest.mark.parametrize("size", [1, 7, 32, 100])
def test_each_bad_row_is_found_and_the_others_keep_their_outputs_and_order(size: int, ahead: int) -> None:
    x = rows_with(BAD)

    outputs, errors = scored(x, size, lambda inputs: squares(inputs, ahead=ahead))

    assert np.flatnonzero(np.ma.getmaskarray(outputs)).tolist() == BAD
    good = np.delete(np.arange(100), BAD)
    assert outputs[good].tolist() == (x[good] ** 2).tolist()
    assert [i for i, text in enumerate(errors) if text is not None] == BAD
    assert errors[3] == "ValueError: too large"


class Chunk(tuple[Any, ...]):
    rows: int
    failed: dict[int, Exception]


@pytest.mark.parametrize("size", [1, 10, 64, 1000])
@pytest.mark.parametrize("every", [2, 3, 10, 100])
def test_rows_that_could_not_be_read_are_put_back_in_their_places(size: int, every: int) -> None:
    x = np.arange(1000)
    unread = x[x % every == every // 2]
    errors = RowErrors(Failures(), batch_size=10, most=None, column=True, like=None, worked=False)

    def chunks() -> Iterator[Any]:
        for start in range(0, 1000, 170):
            part = x[start : start + 170]
            chunk = Chunk((np.setdiff1d(part, unread),))
            chunk.rows = len(part)
            chunk.failed = {int(i) - start: ValueError(f"row {i}") for i in np.intersect1d(part, unread)}
            yield chunk

    good = np.concatenate([values for (values,) in errors.readable(chunks())])
    batches = (Batch(len(part), (part,)) for part in np.split(good, range(size, len(good), size)))
    parts = list(errors.completed(errors.scored(batches, lambda inputs: ([2 * x] for (x,) in inputs), tuple)))

    outputs = np.ma.concatenate([part[0] for part in parts])
    said_of = np.concatenate([part[1] for part in parts])
    assert np.flatnonzero(np.ma.getmaskarray(outputs)).tolist() == unread.tolist()
    assert outputs.compressed().tolist() == (2 * good).tolist()
    assert [text for text in said_of if text is not None] == [f"ValueError: row {i}" for i in unread]


@pytest.mark.parametrize("place", ["first", "last", "apart"])
def test_a_batch_of_bad_rows_alone_is_made_of_nulls_wherever_it_is(place: str) -> None:
    bad = {"first": range(10), "last": range(90, 100), "apart": [*range(10, 20), *range(30, 40)]}[place]

    outputs, _ = scored(rows_with(list(bad)), 10, batch_size=11)

    assert np.flatnonzero(np.ma.getmaskarray(outputs)).tolist() == list(bad)


def test_clean_rows_are_computed_once_in_whole_batches() -> None:
    calls: list[int] = []

    scored(rows_with([]), 25, lambda inputs: squares(inputs, calls=calls))

    assert calls == [25, 25, 25, 25]


def test_later_batches_profit_from_how_many_failed_before() -> None:
    calls: list[int] = []
    x = rows_with(list(range(0, 20_000, 100)), 20_000)

    scored(x, 1000, lambda inputs: squares(inputs, calls=calls))

    # To halve all the way down takes more: about 150 calls for ten of a thousand.
    assert len(calls) < 20 * 150
    assert sum(calls) < 3.5 * len(x)


def test_rows_that_an_error_names_are_not_searched() -> None:
    calls: list[int] = []

    def compute(inputs: Iterator[Any]) -> Iterator[Any]:
        for (x,) in inputs:
            calls.append(len(x))
            if (x >= 1000).any():
                error = ValueError("too large")
                error.positions = np.flatnonzero(x >= 1000).tolist()  # type: ignore[attr-defined]
                raise error
            yield [x]

    outputs, _ = scored(rows_with(BAD), 100, compute)

    assert calls == [100, 96]
    assert np.flatnonzero(np.ma.getmaskarray(outputs)).tolist() == BAD


@pytest.mark.parametrize("positions", [[-1], [100], "text", 7, [None]])
def test_positions_that_are_none_are_not_believed(positions: Any) -> None:
    error = ValueError("x")
    error.positions = positions  # type: ignore[attr-defined]
    failed: dict[int, Exception] = {}

    def attempt(part: Any) -> None:
        if 5 in part:
            raise error

    list(Finder().parts(10, attempt, error, failed))

    assert list(failed) == [5]


def test_an_error_of_every_row_is_the_models() -> None:
    with pytest.raises(ValueError, match="too large") as found:
        scored(rows_with(list(range(100))), 10)

    assert "None of the first 10 rows" in found.value.__notes__[0]


def test_a_short_partition_of_bad_rows_is_made_of_nulls_if_outputs_are_known() -> None:
    outputs, errors = scored(rows_with([0, 1], 2), 10, like=[np.zeros((0,), np.int64)])

    assert np.ma.getmaskarray(outputs).all()
    assert list(errors) == ["ValueError: too large"] * 2


def test_more_errors_than_allowed_end_the_pass_with_their_number_and_kinds() -> None:
    scored(rows_with(BAD), 50, most=4)
    with pytest.raises(RowsFailedError, match=r"4 of 100 rows .* max_errors=3:\n  ValueError: too large \(4"):
        scored(rows_with(BAD), 100, most=3)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("no such module"),
        ConfigError("wrong"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
)
def test_an_error_of_the_process_is_of_no_row(error: Exception) -> None:
    def compute(inputs: Iterator[Any]) -> Iterator[Any]:
        next(inputs)
        raise error
        yield

    assert not is_of_a_row(error)
    with pytest.raises(type(error)) as caught:
        scored(rows_with([]), 10, compute)
    assert caught.value is error


def test_an_error_of_reading_further_rows_is_of_no_row() -> None:
    def batches() -> Iterator[Any]:
        yield Batch(2, (np.arange(2),))
        raise ValueError("the source is gone")

    errors = RowErrors(Failures(), batch_size=2, most=None, column=False, like=None, worked=False)

    with pytest.raises(ValueError, match="the source is gone"):
        list(errors.scored(batches(), squares, lambda batch: batch))


def test_an_interrupt_is_of_no_row() -> None:
    def compute(inputs: Iterator[Any]) -> Iterator[Any]:
        next(inputs)
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        scored(rows_with([]), 10, compute)


def test_what_is_said_of_a_row_is_short_and_the_same_in_any_batch() -> None:
    one = DataError("is 5\nHint: x", column="a", row=17, positions=[2], common="does not fit")

    assert said(one) == "DataError: column 'a': does not fit"
    assert said(ValueError("read <_io.BytesIO object at 0x7fd72dd31530>")) == (
        "ValueError: read <_io.BytesIO object>"
    )
    assert len(said(ValueError("x" * 10_000))) == 300
    keras = ValueError(
        "Exception encountered when calling Picky.call().\n\n\x1b[1mtoo large\x1b[0m\n\nArguments"
    )
    assert said(keras) == "ValueError: Exception encountered when calling Picky.call(). too large"
