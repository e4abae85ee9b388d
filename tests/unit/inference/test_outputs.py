"""Outputs as Arrow columns, and batches of one size."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kindler.inference.outputs import to_arrow
from kindler.inference.predictor import fixed_batches


@given(
    hnp.arrays(
        st.sampled_from(["float32", "float64", "int64", "int8", "bool", "uint8", "float16"]),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
        elements={"allow_nan": False, "allow_infinity": False},
    )
)
def test_a_column_has_the_outputs_values_shape_and_type(array: np.ndarray) -> None:
    column = to_arrow(array)

    assert column.to_pylist() == array.tolist()
    kind = column.type
    for _ in range(array.ndim - 1):
        kind = kind.value_type
    assert not pa.types.is_nested(kind)


@pytest.mark.parametrize(("dtype", "stored"), [("float16", pa.float32()), ("uint8", pa.int16())])
def test_types_that_spark_lacks_are_stored_in_the_next_wider(dtype: str, stored: pa.DataType) -> None:
    assert to_arrow(np.zeros(1, dtype)).type == stored


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 9))
def test_batches_have_one_size_and_every_row_in_order(sizes: list[int], size: int) -> None:
    rows = np.arange(sum(sizes))
    chunks = [(part, part * 2) for part in np.split(rows, np.cumsum(sizes)[:-1])] if sizes else []

    batches = list(fixed_batches(chunks, size))

    assert [len(x) for x, _ in batches[:-1]] == [size] * max(0, len(batches) - 1)
    assert np.concatenate([x for x, _ in batches] or [rows]).tolist() == rows.tolist()
    assert all((y == 2 * x).all() for x, y in batches)
