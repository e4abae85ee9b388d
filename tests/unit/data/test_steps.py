"""Every row once, in steps of one size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.data.row_order import bound, steps
from kindler.errors import ConfigError


def test_steps_are_rounded_up_and_none_for_no_rows() -> None:
    assert [steps(rows, 4) for rows in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        steps(10, 0)


@given(st.integers(1, 500), st.integers(1, 40))
def test_steps_differ_by_one_row_at_most_and_none_is_larger_than_the_batch(
    rows: int, batch_size: int
) -> None:
    total = steps(rows, batch_size)
    bounds = [bound(step, rows, total) for step in range(total + 1)]
    sizes = {stop - start for start, stop in pairwise(bounds)}

    assert (bounds[0], bounds[-1]) == (0, rows)
    assert 1 <= min(sizes) <= max(sizes) <= min(batch_size, min(sizes) + 1)
