"""Rows of similar length come together, each once an epoch, and alike for any number of workers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kindler.data.row_order import Bucketed, RowAssignment

ROWS, BATCH = 5_003, 32


def made(size: int, rows: int = ROWS) -> tuple[list[Bucketed], np.ndarray, np.ndarray]:
    dealing = RowAssignment.between(2, seed=3)
    lanes = dealing.lanes_for(rows)
    _, of_rows = dealing.of_rank(rows, 0, 1)
    counts = np.bincount(of_rows, minlength=lanes).tolist()
    lengths = np.random.default_rng(0).integers(8, 513, rows)
    steps = -(-rows // BATCH)
    bounds = np.array([step * rows // steps for step in range(steps + 1)])
    ranks = [
        Bucketed(counts, rank=rank, size=size, seed=3, lengths=lengths, bounds=bounds) for rank in range(size)
    ]
    return ranks, lengths, bounds


@pytest.mark.parametrize("rows", [1, 50, ROWS])
def test_every_row_comes_once_an_epoch_in_another_order_each_time(rows: int) -> None:
    (alone,), _, _ = made(1, rows)

    first, second = alone.sequence(1), alone.sequence(2)

    assert sorted(first) == sorted(second) == list(range(rows))
    assert rows == 1 or not np.array_equal(first, second)
    np.testing.assert_array_equal(alone.sequence(1), first)


def test_batches_hold_rows_of_similar_length_and_batches_are_not_sorted() -> None:
    (alone,), lengths, bounds = made(1)
    batches = [lengths[alone.sequence(1)][low:high] for low, high in pairwise(bounds)]

    spread = np.mean([batch.max() - batch.min() for batch in batches])
    padded = sum(len(batch) * batch.max() for batch in batches)

    assert spread < 25
    assert padded < 1.05 * lengths.sum()
    means = np.array([batch.mean() for batch in batches])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


@pytest.mark.parametrize("size", [2, 3])
def test_workers_share_the_steps_of_one(size: int) -> None:
    (alone,), _, bounds = made(1)
    ranks, _, _ = made(size)
    assert [one.may_miss(bounds) for one in (alone, *ranks)] == [False] + [True] * size
    for low, high in zip(bounds[:-1:40], bounds[1::40], strict=True):
        together: list[int] = []
        for rank in ranks:
            own = rank.order(2)[int(rank.own_before(int(low), 2)) : int(rank.own_before(int(high), 2))]
            together += np.flatnonzero(rank._is_own)[own].tolist()
        assert sorted(together) == sorted(alone.sequence(2)[low:high])
