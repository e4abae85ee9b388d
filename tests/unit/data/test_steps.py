"""Every row once, and the same number of steps everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.data.steps import cut, order, steps
from kindler.errors import ConfigError


def test_steps_are_rounded_up_and_none_for_no_rows() -> None:
    assert [steps(rows, 4) for rows in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        steps(10, 0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 40))
def test_each_rank_uses_each_of_its_rows_once_in_the_same_number_of_steps(
    counts: list[int], batch_size: int
) -> None:
    total = steps(sum(counts), batch_size)
    for rows in counts:
        ranges = [cut(rows, total, step) for step in range(total)]
        used = [row for start, stop in ranges for row in range(start, stop)]
        sizes = {stop - start for start, stop in ranges}

        assert used == list(range(rows if total else 0))
        assert not sizes or max(sizes) - min(sizes) <= 1


@given(st.integers(0, 200), st.integers(0, 2**32), st.integers(0, 5), st.integers(0, 5))
def test_an_order_has_every_row_and_can_be_had_again(rows: int, seed: int, epoch: int, rank: int) -> None:
    found = order(rows, seed=seed, epoch=epoch, rank=rank)

    assert sorted(found.tolist()) == list(range(rows))
    np.testing.assert_array_equal(found, order(rows, seed=seed, epoch=epoch, rank=rank))


def test_orders_differ_by_seed_epoch_and_rank() -> None:
    made = {
        tuple(order(50, seed=seed, epoch=epoch, rank=rank).tolist())
        for seed in range(2)
        for epoch in range(2)
        for rank in range(2)
    }

    assert len(made) == 8
