"""Objects as bytes and back, and rows of packed shards."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal, assert_series_equal

from kindler.data.shards import frames
from kindler.data.shards.codec import from_chunks, from_table, joined, pack, read, to_chunks, unpack, write
from kindler.data.shards.pytree import even_bounds, overlaps, shares
from kindler.errors import ConfigError, DataError
from tests.shards_facts import table


def through_chunks(thing: Any) -> Any:
    packed = pack(thing)
    return unpack(from_chunks(pickle.loads(pickle.dumps(packed.info)), list(to_chunks(packed))))


def through_file(thing: Any, folder: Path) -> Any:
    packed = pack(thing)
    write(packed, folder / "shard")
    return unpack(read(pickle.loads(pickle.dumps(packed.info)), folder / "shard"))


@pytest.mark.parametrize("count", [23, 1, 0])
def test_a_frame_comes_back_from_bytes_and_from_a_file(tmp_path: Path, count: int) -> None:
    frame = table().head(count)
    assert_frame_equal(through_chunks(frame), frame)
    assert_frame_equal(through_file(frame, tmp_path), frame)


def test_a_series_keeps_its_name_and_having_none(tmp_path: Path) -> None:
    for name in ("a", None, 3):
        series = pd.Series([1.5, 2.5], index=["x", "y"], name=name)
        assert_series_equal(through_chunks(series), series)


def test_indexes_of_every_kind_come_back() -> None:
    for index in (
        pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["p", "q"]),
        pd.date_range("2024-01-01", periods=2, name="day"),
        pd.RangeIndex(5, 7),
        pd.Index([7, 7]),
    ):
        frame = pd.DataFrame({"v": [1, 2]}, index=index)
        assert_frame_equal(through_chunks(frame), frame, check_freq=False)


def test_columns_that_are_not_strings_come_back() -> None:
    frame = pd.DataFrame({0: [1, 2], 1: ["a", None]})
    assert_frame_equal(through_chunks(frame), frame)
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    assert_frame_equal(through_chunks(twice), twice)


def test_a_large_table_is_cut_into_chunks_that_stand_alone() -> None:
    x = np.random.default_rng(0).random((5_000, 1_000))
    chunks = list(to_chunks(pack({"x": x})))

    assert len(chunks) == 3
    assert max(map(len, chunks)) < 20 << 20
    np.testing.assert_array_equal(through_chunks({"x": x})["x"], x)


def test_arrays_from_a_file_may_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    packed = pack({"x": np.arange(4)})
    write(packed, tmp_path / "shard")
    first = unpack(read(packed.info, tmp_path / "shard"))
    first["x"][0] = 9

    assert first["x"].tolist() == [9, 1, 2, 3]
    assert unpack(read(packed.info, tmp_path / "shard"))["x"].tolist() == [0, 1, 2, 3]


def test_what_is_known_of_a_shard_survives_bytes() -> None:
    for thing in ({"x": np.zeros((2, 3))}, (np.zeros(2), np.ones(2)), table(), [1, "a"], {"n": 1}, None):
        info = pack(thing).info
        assert pickle.loads(pickle.dumps(info)) == info


def test_shards_of_different_types_are_joined_as_pandas_joins_them() -> None:
    one, other = pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"a": [0.5, None]})
    assert_frame_equal(unpack(joined([pack(one), pack(other)])), pd.concat([one, other]))


def test_shards_of_different_kinds_are_not_joined() -> None:
    with pytest.raises(DataError, match="different kinds(.|\n)*ndarray, tuple"):
        joined([pack(np.zeros(2)), pack((np.zeros(2),))])
    with pytest.raises(DataError, match="different structure"):
        joined([pack({"a": np.zeros(2)}), pack({"b": np.zeros(2)})])


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), parts=st.integers(1, 7))
def test_every_row_is_in_exactly_one_piece(sizes: list[int], parts: int) -> None:
    bounds = even_bounds(sum(sizes), parts)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    found: dict[int, list[int]] = {target: [] for target in range(parts)}
    for shard, pieces in enumerate(overlaps(sizes, bounds)):
        for target, start, stop in pieces:
            found[target] += range(int(starts[shard]) + start, int(starts[shard]) + stop)
    assert [found[target] for target in range(parts)] == [list(range(*bound)) for bound in bounds]


@given(sizes=st.lists(st.integers(0, 50), min_size=1), frac=st.floats(0, 1))
def test_samples_add_up_and_no_shard_gives_more_than_it_has(sizes: list[int], frac: float) -> None:
    counts = shares(sizes, frac)
    assert sum(counts) == int(np.floor(sum(sizes) * frac + 0.5))
    assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))


def test_hashes_are_of_values_and_not_of_their_form() -> None:
    def hashes(*chunks: Any) -> Any:
        return frames.row_hashes(pa.table({"a": pa.chunked_array(list(chunks))}))

    assert (hashes([0.0, None, 2.0]) == hashes([-0.0], [None, 2.0])).all()
    assert len(set(hashes(["a", "b", None, ""]))) == 4


def test_types_that_spark_lacks_become_the_next_wider_ones() -> None:
    frame = pd.DataFrame(
        {
            "u8": np.array([255], np.uint8),
            "u64": np.array([2**64 - 1], np.uint64),
            "half": np.array([0.5], np.float16),
            "ns": pd.to_datetime(["2024-01-01 00:00:00.123456789"]),
            "span": pd.to_timedelta(["1h"]),
        }
    )
    found = frames.plain(pack(frame))

    assert [str(kind) for kind in found.schema.types] == [
        "int16",
        "decimal128(20, 0)",
        "float",
        "timestamp[us]",
        "duration[us]",
    ]
    assert int(found.column("u64")[0].as_py()) == 2**64 - 1


def test_columns_without_a_common_type_are_refused() -> None:
    with pytest.raises(DataError, match="incompatible types"):
        frames.whole([pa.table({"a": [1]}), pa.table({"a": ["x"]})])


def test_integers_with_nulls_stay_integers() -> None:
    found = unpack(from_table(pa.table({"a": pa.array([2**53 + 1, None])})))
    assert found["a"].dtype == "Int64"
    assert found["a"][0] == 2**53 + 1


def test_years_that_nanoseconds_do_not_reach_come_back() -> None:
    far = datetime.datetime(9999, 12, 31)
    found = unpack(from_table(pa.table({"t": pa.array([far], pa.timestamp("us"))})))
    assert found["t"][0].year == 9999


def test_merging_without_a_common_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="share no column"):
        frames.merge_names(["a"], ["b"], None)


def test_minus_zero_is_the_key_zero_beside_other_keys() -> None:
    table = pa.table({"a": [0.0, -0.0, 1.0], "b": [1, 1, 2]})

    groups = frames.grouped(table, ["a", "b"], [frames.Aggregate("count", None)], join=False)

    assert groups.num_rows == 2
    assert frames.distinct(table).num_rows == 2
