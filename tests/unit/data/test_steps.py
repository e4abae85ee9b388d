"""Every row once, and the same number of steps everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.data.steps import order, shares, steps
from kindler.errors import ConfigError


def test_steps_are_rounded_up_and_none_for_no_rows() -> None:
    assert [steps(rows, 4) for rows in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        steps(10, 0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 40))
def test_each_rank_brings_each_of_its_rows_once_to_steps_of_one_size(
    counts: list[int], batch_size: int
) -> None:
    total = steps(sum(counts), batch_size)
    made = list(shares(counts, total))
    sizes = {int(rows.sum()) for rows in made}

    assert len(made) == total
    assert all((rows >= 0).all() for rows in made)
    assert not made or sum(made).tolist() == counts
    assert not sizes or (min(sizes) >= 1 and max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 40))
def test_no_rank_is_a_whole_row_ahead_of_its_share_nor_far_behind(counts: list[int], batch_size: int) -> None:
    total = steps(sum(counts), batch_size)
    used = np.zeros(len(counts))
    for step, rows in enumerate(shares(counts, total), start=1):
        used += rows
        due = np.array(counts) * step / total
        assert (used < due + 1).all()
        assert (used > due - len(counts)).all()


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
