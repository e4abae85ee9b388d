"""Steps out of streams that each worker reads by itself; workers are threads here, that meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kindler.errors import DataError
from kindler.group import Group
from kindler.train.loaders import AgreedSteps, NumberedSteps, StreamSource, share


class Worker(Group):
    """One of a few threads."""

    def __init__(self, rank: int, size: int, told: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._told, self._barrier = told, barrier

    def all_gather(self, data: bytes) -> list[bytes]:
        self._told[self.rank] = data
        self._barrier.wait(20)
        gathered = list(self._told)
        self._barrier.wait(20)
        return gathered


def on_all(size: int, work: Callable[[Worker], Any]) -> list[Any]:
    told, barrier = [b""] * size, threading.Barrier(size)

    def one(rank: int) -> Any:
        try:
            return work(Worker(rank, size, told, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [
            f.exception() for f in futures if not isinstance(f.exception(), threading.BrokenBarrierError)
        ]
        if any(errors):
            raise next(error for error in errors if error is not None)
        return [future.result() for future in futures]


class Mine(list):
    sharded = True


class Unsized:
    """Batches of one worker, of which nobody knows how many there are."""

    sharded = True

    def __init__(self, parts: Mine) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)


def batches(*rows: int) -> Mine:
    return Mine((np.full((count, 1), count), np.zeros(count)) for count in rows)


def opened(worker: Worker, made: Callable[[int], Any], kind: Any = AgreedSteps, **options: Any) -> Any:
    source = StreamSource(make=lambda: made(worker.rank), creator=False)
    return kind(worker, source, **{"batch_size": 8, "seed": 0, "what": "data", "trains": True} | options)


def test_every_step_knows_the_rows_of_all_workers() -> None:
    rows = {0: (4, 4, 0, 3), 1: (2,) * 11}

    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(*rows[rank]))
        return steps.expected, [(b.rows, b.global_rows, b.ends) for b in steps.stretch(1)]

    (expected, first), (_, second) = on_all(2, work)

    totals = [6, 6, 2, 5, *[2] * 7]
    assert expected == 11
    assert first == [
        (own, t, i == 10) for i, (own, t) in enumerate(zip([4, 4, 0, 3, *[0] * 7], totals, strict=True))
    ]
    assert second == [(2, total, i == 10) for i, total in enumerate(totals)]


def test_epochs_of_their_own_length_go_on_through_passes() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(1, 2, 3), steps_per_epoch=4)
        return [[b.rows for b in steps.stretch(epoch, steps=4)] for epoch in (1, 2)]

    assert on_all(2, work) == [[[1, 2, 3, 1], [2, 3, 1, 2]]] * 2


def test_a_stream_that_is_used_up_is_named() -> None:
    def work(worker: Worker) -> Any:
        once = iter(batches(1, 2))
        steps = opened(worker, lambda rank: once)
        assert len(list(steps.stretch(1))) == 2
        list(steps.stretch(2))

    with pytest.raises(DataError, match="no batch in pass 2.\nHint: if the data can be read only once"):
        on_all(1, work)


def test_numbered_steps_are_those_of_the_worker_with_the_most_batches() -> None:
    rows = {0: (4, 4, 3), 1: (2,)}

    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(*rows[rank]), NumberedSteps)
        given = [steps.batch(step) for step in range(6)]
        assert steps.batch(5) is given[5], "asked for again, it is the same"
        own = [batch.rows for batch in given]
        assert [batch.global_rows for batch in given] == [len(batch.features[0]) for batch in given] == own
        assert steps.rows_of(0, 3) == (sum(own[:3]), 2 * sum(own[:3]))
        shapes = {batch.features[0].shape[1:] for batch in given}
        return steps.steps, steps.may_idle, [b.rows for b in given], shapes, steps.rows_of_all(0, 3)

    first, second = on_all(2, work)

    assert first == (3, False, [4, 4, 3, 4, 4, 3], {(1,)}, 13)
    assert second == (3, True, [2, 0, 0, 2, 0, 0], {(1,)}, 13)


@pytest.mark.parametrize("rows", [(3,), (3, 2)])
def test_who_judges_again_counts_all_rows_again(rows: tuple[int, ...]) -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(*rows), NumberedSteps, trains=False)

        def judged() -> int:
            for step in steps.own_steps():
                steps.batch(step)
            return int(steps.rows_of_all(0, steps.steps))

        return judged(), judged()

    assert on_all(2, work) == [(2 * sum(rows), 2 * sum(rows))] * 2


def test_streams_without_a_length_are_counted_once() -> None:
    def unsized(rank: int) -> Iterator[Any]:
        return iter(batches(1, 1, 1, 1, 1))

    assert on_all(2, lambda worker: opened(worker, unsized, NumberedSteps).steps) == [3, 3]


@pytest.mark.parametrize(
    ("said", "words"), [(3, "reported 3 batches and yielded 2"), (1, "reported 1 batches and yielded more")]
)
def test_a_wrong_length_is_found_out(said: int, words: str) -> None:
    class Wrong(Mine):
        def __len__(self) -> int:
            return said

    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: Wrong(batches(1, 1)), NumberedSteps)
        return [steps.batch(step) for step in range(3)]

    with pytest.raises(DataError, match=words):
        on_all(1, work)


def test_a_known_length_is_the_longest_of_all_workers_and_any_unknown_one_makes_it_unknown() -> None:
    def expected(made: Callable[[int], Any]) -> Any:
        return on_all(2, lambda worker: opened(worker, made).expected)

    assert expected(lambda rank: batches(*[1] * (2 + rank))) == [3, 3]
    assert expected(lambda rank: batches(1) if rank else iter(batches(1, 1))) == [None, None]


def test_steps_without_rows_of_anybody_are_left_out_and_the_last_with_rows_ends_the_pass() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(*((2, 0, 1) if rank else (0, 0, 3))))
        return [[(b.rows, b.global_rows, b.ends) for b in steps.stretch(epoch)] for epoch in (1, 2)]

    assert on_all(2, work) == [[[(0, 2, False), (3, 4, True)]] * 2, [[(2, 2, False), (1, 4, True)]] * 2]


def test_a_worker_whose_pass_has_ended_takes_part_in_the_steps_of_the_others() -> None:
    rows = [(1,) * 9, (2,) * 20]

    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(*rows[rank]))
        return [(b.rows, b.global_rows, len(b.features), b.ends) for b in steps.stretch(1)]

    first, second = on_all(2, work)

    assert first == [(1, 3, 1, False)] * 9 + [(0, 2, 0, False)] * 10 + [(0, 2, 0, True)]
    assert second == [(2, 3, 1, False)] * 9 + [(2, 2, 1, False)] * 10 + [(2, 2, 1, True)]


def test_a_pass_that_is_left_begins_anew() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(1, 2, 3))
        left = steps.stretch(1)
        begun = [next(left).rows]
        left.close()
        again = [b.rows for b in steps.stretch(1)]
        steps.close()
        return begun, again

    assert on_all(1, work) == [([1], [1, 2, 3])]


def test_a_validation_is_read_whole_each_time() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(1, 2), trains=False, steps_per_epoch=1)
        return [[(b.rows, b.ends) for b in steps.stretch(0)] for _ in range(2)]

    assert on_all(1, work) == [[[(1, False), (2, True)]] * 2]


def test_a_step_out_of_order_is_the_first_of_a_new_pass() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(1, 2, 3), NumberedSteps)
        rows = [steps.batch(step).rows for step in (0, 1, 4, 5, 0, 0, 1, 2, 3)]
        counted = steps.rows_of(0, 6), steps.rows_of_all(0, 2), steps.rows_of(0, 6)
        steps.close()
        return rows, list(steps.own_steps()), steps.sample().rows, counted

    ((rows, own, sample, counted),) = on_all(1, work)

    assert rows == [1, 2, 1, 2, 1, 1, 2, 3, 1]
    assert (own, sample) == ([0, 1, 2], 0)
    assert counted == ((10, 10), 3, (7, 7)), "what is counted for all is forgotten"


@pytest.mark.parametrize(
    ("size", "rows", "options", "idles"),
    [
        (2, [(1, 1), (1, 1)], {}, False),
        (2, [(1, 1), (1,)], {}, True),
        (2, [(1, 1), (1,)], {"trains": False}, False),
        (1, [(1, 1)], {}, False),
    ],
    ids=["alike", "shorter", "judging", "alone"],
)
def test_a_worker_idles_while_it_trains_beside_one_with_more_batches(
    size: int, rows: list[tuple[int, ...]], options: dict[str, Any], idles: bool
) -> None:
    def work(worker: Worker) -> bool:
        return bool(opened(worker, lambda rank: batches(*rows[rank]), NumberedSteps, **options).may_idle)

    assert on_all(size, work)[-1] is idles


class Drawn:
    """Three batches of a number each, which are drawn while they are read."""

    def __iter__(self) -> Iterator[Any]:
        return ((np.random.random((1, 1)), np.zeros(1)) for _ in range(3))


class SizedDrawn(Drawn):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("made", [Drawn, SizedDrawn])
def test_a_step_is_drawn_as_in_its_own_pass_whatever_was_asked_for_before(made: type[Drawn]) -> None:
    def work(worker: Worker) -> Any:
        def numbers(*asked: int) -> list[float]:
            steps = opened(worker, lambda rank: made(), NumberedSteps, steps_per_epoch=3)
            return [float(steps.batch(step).features[0][0, 0]) for step in asked]

        agreed = opened(worker, lambda rank: made())
        passes = [float(b.features[0][0, 0]) for epoch in (1, 2, 3) for b in agreed.stretch(epoch)]
        assert numbers(1) == passes[:1]
        return passes, numbers(*range(9)), numbers(3, 4), numbers(6, 7, 8, 9), numbers(9)

    ((passes, whole, second, third, fourth),) = on_all(1, work)

    assert len(set(whole)) == 9
    assert whole == passes
    assert (second, third[:3], third[3:]) == (whole[3:5], whole[6:], fourth)


def test_an_evaluation_reads_its_data_once() -> None:
    def work(worker: Worker) -> Any:
        read: list[int] = []

        class Counted(Unsized):
            def __iter__(self) -> Iterator[Any]:
                read.append(1)
                yield from super().__iter__()

        steps = opened(worker, lambda rank: Counted(batches(1, 2)), trains=False)
        return [b.rows for b in steps.stretch(0)], len(read)

    assert on_all(1, work) == [([1, 2], 1)]


def test_a_worker_alone_never_idles_and_does_not_know_its_steps_if_nobody_counts_them() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: Unsized(batches(1, 2)), NumberedSteps, steps_per_epoch=3)
        return steps.may_idle, steps.steps, list(steps.own_steps())

    assert on_all(1, work) == [(False, None, [])]


def test_a_batch_without_rows_is_an_error_where_nobody_idles() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(1, 0), NumberedSteps)
        return [steps.batch(step) for step in range(2)]

    with pytest.raises(DataError, match="data yielded a batch without rows"):
        on_all(1, work)


def test_epochs_of_streams_of_unknown_length_go_on_through_passes_of_each_worker() -> None:
    def work(worker: Worker) -> Any:
        parts = batches(*((1, 2, 3) if worker.rank else (4, 5)))
        steps = opened(worker, lambda rank: Unsized(parts), NumberedSteps, steps_per_epoch=4)
        return steps.steps, steps.may_idle, [steps.batch(step).rows for step in range(8)]

    assert on_all(2, work) == [
        (None, True, [4, 5, 4, 5, 4, 5, 4, 5]),
        (None, True, [1, 2, 3, 1, 2, 3, 1, 2]),
    ]


def test_a_worker_whose_stream_is_empty_has_steps_without_rows() -> None:
    def work(worker: Worker) -> Any:
        parts = batches(*(() if worker.rank else (1, 2)))
        steps = opened(worker, lambda rank: Unsized(parts), NumberedSteps, steps_per_epoch=2)
        return [steps.batch(step).rows for step in range(4)]

    assert on_all(2, work) == [[1, 2, 1, 2], [0, 0, 0, 0]]


def test_an_epoch_that_is_resumed_has_the_steps_that_are_left() -> None:
    def work(worker: Worker) -> Any:
        steps = opened(worker, lambda rank: batches(1, 2, 3), steps_per_epoch=4)
        return len(list(steps.stretch(1, done=1, steps=4))), len(list(steps.stretch(2, steps=4)))

    assert on_all(1, work) == [(3, 4)]


def test_rows_of_another_shape_are_named_with_what_the_first_batch_has() -> None:
    def work(worker: Worker) -> Any:
        wide = (np.zeros((2, 3)), np.zeros(2))
        steps = opened(worker, lambda rank: Mine([*batches(2), wide]), NumberedSteps)
        return [steps.batch(step) for step in range(2)]

    with pytest.raises(DataError, match=r"rows of shape \(3,\) where the first batch has .* of \(1,\)"):
        on_all(1, work)


def test_the_batch_size_is_shared_out_and_nobody_gets_nothing() -> None:
    assert [share(8, rank, 3) for rank in range(3)] == [3, 3, 2]
    assert [share(2, rank, 3) for rank in range(3)] == [1, 1, 1]
