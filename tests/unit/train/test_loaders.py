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


def test_the_batch_size_is_shared_out_and_nobody_gets_nothing() -> None:
    assert [share(8, rank, 3) for rank in range(3)] == [3, 3, 2]
    assert [share(2, rank, 3) for rank in range(3)] == [1, 1, 1]
