"""The rules of dtype, shape, null, NaN and ragged rows."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.data.columns import Column, ColumnPlan, complaint, conform, to_numpy
from kindler.errors import DataError

VECTOR = pa.struct(
    [
        pa.field("type", pa.int8()),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)


def feature(**options: Any) -> Column:
    return Column(name="c", role="feature", **options)


def label(**options: Any) -> Column:
    return Column(name="c", role="label", **options)


def read(array: pa.Array | pa.ChunkedArray, column: Column | None = None) -> np.ndarray[Any, Any]:
    return to_numpy(array, column or feature(), where=lambda i: i + 100)


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, entries: dict[int, float]) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": list(entries), "values": list(entries.values())}


def test_columns_lists_a_column_that_is_both_feature_and_label_once() -> None:
    columns = ColumnPlan(features=(feature(),), labels=(label(), Column(name="d", role="label")))

    assert columns.names == ("c", "d")
    assert [column.role for column in columns.all] == ["feature", "label"]


@pytest.mark.parametrize(
    ("arrow_type", "as_feature", "as_label"),
    [
        (pa.int8(), "int8", "int64"),
        (pa.uint8(), "uint8", "int64"),
        (pa.int32(), "int32", "int64"),
        (pa.int64(), "int64", "int64"),
        (pa.uint64(), "uint64", "int64"),
        (pa.float16(), "float32", "float32"),
        (pa.float32(), "float32", "float32"),
        (pa.float64(), "float32", "float32"),
        (pa.bool_(), "bool", "bool"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda t: t, pa.list_, pa.large_list, lambda t: pa.list_(t, 3)])
def test_default_dtypes_are_the_same_for_scalars_and_lists(
    arrow_type: pa.DataType, as_feature: str, as_label: str, wrap: Any
) -> None:
    array = pa.array(np.array([1, 0, 1]).astype(arrow_type.to_pandas_dtype()), arrow_type)
    wrapped = wrap(arrow_type)
    if wrapped != arrow_type:
        array = pa.array([array.to_pylist()], wrapped)

    assert read(array).dtype == as_feature
    assert read(array, label()).dtype == as_label
    np.testing.assert_array_equal(read(array).reshape(-1), [1, 0, 1])


def test_float_lists_are_a_view_of_arrows_memory() -> None:
    values = pa.array(np.arange(12, dtype=np.float32))
    array = pa.ListArray.from_arrays(pa.array([0, 4, 8, 12], pa.int32()), values)

    found = read(array)

    np.testing.assert_array_equal(found, np.arange(12).reshape(3, 4))
    assert np.shares_memory(found, values.to_numpy())


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2)]
)
def test_sliced_lists_give_their_own_rows(kind: pa.DataType) -> None:
    array = pa.array([[1, 2], [3, 4], [5, 6]], kind).slice(1, 2)

    np.testing.assert_array_equal(read(array), [[3, 4], [5, 6]])


def test_nested_lists_become_one_axis_each() -> None:
    array = pa.array([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]], pa.list_(pa.list_(pa.int16(), 3)))

    np.testing.assert_array_equal(read(array), np.arange(1, 13, dtype=np.int16).reshape(2, 2, 3))


@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3), st.booleans())
def test_nested_lists_round_trip(rows: int, height: int, width: int, large: bool) -> None:
    values = np.arange(rows * height * width, dtype=np.int32).reshape(rows, height, width)
    make = pa.large_list if large else pa.list_
    found = read(pa.array(values.tolist(), make(make(pa.int32()))))

    assert found.dtype == np.int32
    assert found.size == values.size
    if rows and height:
        np.testing.assert_array_equal(found, values)


def test_fixed_shape_tensors_keep_their_logical_shape() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])
    storage = pa.array(np.arange(12, dtype=np.float32).reshape(2, 6).tolist(), pa.list_(pa.float32(), 6))
    array = pa.ExtensionArray.from_storage(kind, storage)

    np.testing.assert_array_equal(read(array), array.to_numpy_ndarray())
    assert read(array).flags.c_contiguous


def test_dates_are_days_and_timestamps_microseconds() -> None:
    day = datetime.date(1970, 1, 11)
    instant = datetime.datetime(1970, 1, 1, 0, 0, 2)

    assert read(pa.array([day])).tolist() == [10]
    assert read(pa.array([day], pa.date64())).tolist() == [10]
    for unit in ("s", "ms", "us", "ns"):
        found = read(pa.array([instant], pa.timestamp(unit, "UTC")))
        assert (found.dtype, found.tolist()) == (np.int64, [2_000_000])


def test_decimals_are_float32_or_exact_integers_when_asked() -> None:
    array = pa.array([decimal.Decimal("9007199254740993")], pa.decimal128(20, 0))

    assert read(array, label(dtype="int64")).tolist() == [9007199254740993]
    assert read(pa.array([decimal.Decimal("1.25")])).dtype == np.float32


def test_dictionary_values_are_decoded() -> None:
    assert read(pa.array([3, 4, 3]).dictionary_encode()).tolist() == [3, 4, 3]


def test_a_shape_is_applied_to_lists_scalars_and_bytes() -> None:
    lists = pa.array([[1, 2, 3, 4]], pa.list_(pa.float32()))

    assert read(lists, feature(shape=(2, 2))).shape == (1, 2, 2)
    assert read(pa.array([[7], [8]]), feature(shape=())).tolist() == [7, 8]
    assert read(pa.array([7, 8]), feature(shape=(1,))).tolist() == [[7], [8]]


def test_a_shape_with_another_number_of_values_names_both() -> None:
    with pytest.raises(DataError, match=r"column 'c'.* has 3 values .* shape \(2, 2\) needs 4"):
        read(pa.array([[1, 2, 3]]), feature(shape=(2, 2)))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(8)])
def test_bytes_are_read_as_the_dtype_asked_for(kind: pa.DataType) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    array = pa.array([row.tobytes() for row in rows], kind).slice(1, 2)

    np.testing.assert_array_equal(read(array, feature(dtype="float32")), rows[1:3])
    assert read(array, feature(dtype="uint8", shape=(2, 4))).shape == (2, 2, 4)


def test_bytes_that_do_not_lie_on_a_boundary_are_copied() -> None:
    rows = np.arange(4, dtype=np.float32)
    array = pa.array([b"x", *(row.tobytes() for row in rows)]).slice(1)

    found = read(array, feature(dtype="float32"))

    assert found.flags.aligned
    assert found.tolist() == [[0], [1], [2], [3]]


def test_bytes_without_a_dtype_are_refused_with_a_hint() -> None:
    with pytest.raises(DataError, match=r"dtypes=\{'c': 'uint8'\}"):
        read(pa.array([b"ab"]))


def test_bytes_of_a_wrong_or_changing_length_are_refused() -> None:
    with pytest.raises(DataError, match="3 bytes, which is not a multiple of the 4"):
        read(pa.array([b"abc"]), feature(dtype="float32"))
    with pytest.raises(DataError, match=r"row 101: has 1 values where the rows before it have 2"):
        read(pa.array([b"ab", b"c"]), feature(dtype="uint8"))


@pytest.mark.parametrize("start", [0, 1])
def test_spark_vectors_may_be_dense_sparse_or_mixed(start: int) -> None:
    rows = [dense(1, 2, 3), sparse(3, {0: 4, 2: 5}), sparse(3, {}), dense(6, 7, 8)]
    expected = np.array([[1, 2, 3], [4, 0, 5], [0, 0, 0], [6, 7, 8]], np.float32)

    found = read(pa.array(rows, VECTOR).slice(start))

    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected[start:])
    np.testing.assert_array_equal(read(pa.array(rows[:1] * 2, VECTOR).slice(1)), expected[:1])


def test_spark_vectors_of_different_size_name_the_row() -> None:
    with pytest.raises(DataError, match=r"row 101: has 4 values where the rows before it have 3"):
        read(pa.array([dense(1, 2, 3), sparse(4, {0: 1})], VECTOR))


def test_a_sparse_vector_with_an_index_outside_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 101: is a sparse vector whose indices do not fit its size 3"):
        read(pa.array([dense(1, 2, 3), sparse(3, {3: 1})], VECTOR))


def test_a_null_inside_a_vector_names_its_row() -> None:
    hole = {**sparse(3, {0: 1}), "values": [None]}
    with pytest.raises(DataError, match="row 101: is a vector with a null in it"):
        read(pa.array([sparse(3, {0: 1}), hole], VECTOR))
    with pytest.raises(DataError, match="row 101: is a vector with a null in it"):
        read(pa.array([dense(1, 2), {**dense(), "values": [3, None]}], VECTOR))


def test_vectors_without_any_value_have_no_width() -> None:
    assert read(pa.array([dense(), sparse(0, {})], VECTOR)).shape == (2, 0)


def test_a_null_vector_is_refused() -> None:
    with pytest.raises(DataError, match="row 101: is null"):
        read(pa.array([dense(1), None], VECTOR))


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None]),
        pa.array([1.0, None]),
        pa.array([[1], None]),
        pa.array([[1], None], pa.list_(pa.int8(), 1)),
        pa.array([b"a", None]),
        pa.array([True, None]),
    ],
)
def test_a_null_row_is_named(array: pa.Array) -> None:
    with pytest.raises(DataError, match=r"column 'c', row 101: is null") as caught:
        read(array, feature(dtype="uint8"))

    assert (caught.value.column, caught.value.row) == ("c", 101)


def test_a_null_inside_a_list_names_its_row() -> None:
    with pytest.raises(DataError, match="row 102: holds a null"):
        read(pa.array([[1, 2], [3, 4], [5, None]]))
    with pytest.raises(DataError, match="row 101: holds a null"):
        read(pa.array([[[1, 2], [3, 4]], [[5, 6], None]]))


def test_a_column_of_nothing_but_nulls_is_refused() -> None:
    with pytest.raises(DataError, match="row 100: is null"):
        read(pa.nulls(2))


def test_ragged_rows_name_the_first_odd_one_and_both_lengths() -> None:
    with pytest.raises(DataError, match=r"row 102: has 1 values where the rows before it have 2"):
        read(pa.array([[1, 2], [3, 4], [5], [6]]))
    with pytest.raises(DataError, match=r"row 101: has 3 values where the rows before it have 2"):
        read(pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8, 9]]]))


def test_nan_names_its_row_unless_it_is_allowed() -> None:
    array = pa.array([[0.0, 1.0], [float("nan"), 2.0]])

    with pytest.raises(DataError, match=r"row 101: is NaN\.\nHint: .*columns=Columns\(allow_nan=True\)"):
        read(array)
    with pytest.raises(DataError, match="row 101: is NaN"):
        read(array, feature(dtype="int64"))
    assert np.isnan(read(array, feature(allow_nan=True))[1, 0])


def test_infinities_are_values() -> None:
    assert read(pa.array([float("inf"), float("-inf")])).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize(
    ("array", "dtype", "value"),
    [
        (pa.array([1, 300]), "uint8", "300"),
        (pa.array([1, -1]), "uint64", "-1"),
        (pa.array([0.0, 0.5]), "int64", "0.5"),
        (pa.array([0.0, 2.0**63]), "int64", "9.22"),
        (pa.array([0.0, float("inf")]), "int32", "inf"),
        (pa.array([1.0, 1e300]), "float32", "1e"),
        (pa.array([1, 100000]), "float16", "100000"),
    ],
)
def test_a_dtype_that_cannot_hold_a_value_is_refused(array: pa.Array, dtype: str, value: str) -> None:
    with pytest.raises(DataError, match=rf"row 101: {value}.* does not fit {dtype}"):
        read(array, feature(dtype=dtype))


def test_an_unsigned_label_beyond_int64_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 100: 18446744073709551615 .* does not fit int64"):
        read(pa.array([2**64 - 1], pa.uint64()), label())


def test_whole_floats_become_integers_when_asked() -> None:
    found = read(pa.array([0.0, 3.0]), label(dtype="int64"))

    assert (found.dtype, found.tolist()) == (np.int64, [0, 3])


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a"]),
        pa.array([["a"]]),
        pa.array(["a"]).dictionary_encode(),
        pa.array([{"a": 1}]),
        pa.array([[[(1, 2)]]], pa.list_(pa.map_(pa.int8(), pa.int8()))),
        pa.array([[b"a"]]),
        pa.array([datetime.time(1)]),
    ],
)
def test_other_types_are_answered_with_those_that_work(array: pa.Array) -> None:
    with pytest.raises(DataError, match=r"column 'c': .* cannot feed a model. Columns of integers, floats"):
        read(array)
    assert complaint(array.type)


def test_strings_are_told_to_be_indexed() -> None:
    with pytest.raises(DataError, match="StringIndexer"):
        read(pa.array(["a"]))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (pa.float32(), (0,)),
        (pa.null(), (0,)),
        (pa.list_(pa.float32()), (0, 0)),
        (pa.list_(pa.float32(), 4), (0, 4)),
        (pa.list_(pa.list_(pa.float32())), (0, 0, 0)),
        (VECTOR, (0, 0)),
    ],
)
def test_no_rows_give_an_empty_array(kind: pa.DataType, shape: tuple[int, ...]) -> None:
    assert read(pa.array([], kind)).shape == shape
    assert read(pa.chunked_array([], kind)).shape == shape
    assert read(pa.array([], kind), feature(shape=(2, 2))).shape == (0, 2, 2)


def test_chunks_are_joined_and_rows_counted_through() -> None:
    chunks = pa.chunked_array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.int8()))

    assert read(chunks).tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(DataError, match=r"row 102: is null"):
        read(pa.chunked_array([[1, 2], [None]]))
    with pytest.raises(DataError, match=r"row 101: has shape \(2,\) where earlier rows have \(1,\)"):
        read(pa.chunked_array([[[1]], [[2, 3]]]))


def test_numpy_values_follow_the_same_rules() -> None:
    def kept(values: Any, column: Column | None = None) -> np.ndarray[Any, Any]:
        return conform(np.asarray(values), column or feature(), where=lambda i: i)

    assert kept(np.zeros((2, 3))).dtype == np.float32
    assert kept(np.zeros(2, np.int8), label()).dtype == np.int64
    assert kept(np.zeros(2, ">f4")).dtype.isnative
    assert kept(np.array(["1970-01-03"], "datetime64[D]")).tolist() == [2]
    assert kept(np.array(["1970-01-01T00:00:01"], "datetime64[ns]")).tolist() == [1_000_000]
    assert kept(np.zeros((4, 6)).T, feature(shape=(2, 2))).flags.c_contiguous
    with pytest.raises(DataError, match="row 1: is NaN"):
        kept([[0.0], [np.nan]])
    with pytest.raises(DataError, match="cannot feed a model"):
        kept(["a"])
    with pytest.raises(DataError, match="NaT"):
        kept(np.array(["NaT"], "datetime64[s]"))


def test_numbers_are_read_where_pandas_is_not_installed() -> None:
    program = """
import sys

class NoPandas:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

sys.meta_path.insert(0, NoPandas())
import pyarrow as pa
from kindler.data.columns import numbers
for kind in (pa.int8(), pa.uint16(), pa.int64(), pa.float32(), pa.float64()):
    array = numbers(pa.array([1, 2, 3], kind)[1:])
    print(array.dtype, array.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == [
        "int8 [2, 3]",
        "uint16 [2, 3]",
        "int64 [2, 3]",
        "float32 [2.0, 3.0]",
        "float64 [2.0, 3.0]",
    ], done.stderr
