"""Rows of shards as workers open them, and the columns that shards offer to a model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kindler import XShards
from kindler.data.column_options import ColumnOptions
from kindler.data.shards.source import ShardSource
from kindler.data.spool import Spool
from kindler.errors import ConfigError, DataError
from kindler.testing import thread_workers
from kindler.xshards import as_input


def source(shards: XShards, **options: Any) -> ShardSource:
    made, feed = as_input.prepare(
        shards, name="data", options=ColumnOptions(**options), spark=None, here=True
    )
    assert feed is None
    assert isinstance(made, ShardSource)
    return made


def opened(made: ShardSource, scratch: Path, size: int) -> list[Spool]:
    return thread_workers.opened(pickle.loads(pickle.dumps(made)), size, scratch)


def own(spool: Spool, name: str) -> Any:
    return spool.arrays[name] if spool.order is None else spool.arrays[name][spool.order]


def local(*sizes: int, **columns: Any) -> XShards:
    ends = np.cumsum(sizes)
    return XShards.from_shards(
        [
            {name: values[end - size : end] for name, values in columns.items()}
            for end, size in zip(ends, sizes, strict=True)
        ],
        engine="local",
    )


@pytest.mark.parametrize("sizes", [(100,), (34, 33, 33), (20, 0, 0, 80), (0, 1, 99, 0)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_row_belongs_to_one_rank_in_order(tmp_path: Path, sizes: tuple[int, ...], size: int) -> None:
    x, y = np.random.default_rng(0).random((100, 2), np.float32), np.arange(100)

    spools = opened(source(local(*sizes, x=x, y=y)), tmp_path, size)

    assert max(s.rows for s in spools) - min(s.rows for s in spools) <= 1
    places = np.argsort(np.concatenate([s.numbers for s in spools]))
    np.testing.assert_array_equal(np.concatenate([own(s, "x") for s in spools])[places], x)
    np.testing.assert_array_equal(np.concatenate([own(s, "y") for s in spools])[places], y)


def test_arrays_of_the_right_dtype_are_used_where_they_lie_and_others_are_written(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((10, 2), np.float32), np.arange(10, dtype=np.int32)

    first, second = opened(source(local(0, 10, x=x, y=y)), tmp_path, 2)

    written = sum(file.stat().st_size for file in tmp_path.rglob("*.bin"))
    assert written == 10 * 8  # the labels as int64
    assert not first.arrays["x"].flags.writeable
    np.testing.assert_array_equal(second.arrays["x"], x)
    assert second.arrays["y"].dtype == np.int64


def test_dtypes_follow_the_rules_of_arrays(tmp_path: Path) -> None:
    columns = {
        "bytes": np.arange(6, dtype=np.uint8),
        "wide": np.arange(6.0),
        "when": np.arange(6).astype("datetime64[D]"),
        "flag": np.arange(6) % 2 == 0,
        "label": np.arange(6, dtype=np.int16),
    }
    options = {"feature_cols": ["bytes", "wide", "when", "flag"], "label_cols": "label"}
    expected = {"bytes": "uint8", "wide": "float32", "when": "int64", "flag": "bool", "label": "int64"}

    arrays = opened(source(local(6, **columns), **options), tmp_path, 1)[0]
    frames = opened(
        source(XShards.partition(pd.DataFrame(columns), 2, engine="local"), **options), tmp_path, 1
    )[0]

    assert {name: array.dtype.name for name, array in arrays.arrays.items()} == expected
    assert {name: array.dtype.name for name, array in frames.arrays.items() if name != "when"} == {
        name: dtype for name, dtype in expected.items() if name != "when"
    }


@pytest.mark.parametrize(
    ("shard", "features", "labels"),
    [
        ({"x": np.ones((2, 3)), "y": np.ones(2)}, ["x"], ["y"]),
        ({"x": (np.ones(2), np.ones(2)), "y": [np.ones(2), np.ones(2)]}, ["x0", "x1"], ["y0", "y1"]),
        ({"x": {"b": np.ones(2), "a": np.ones(2)}, "y": {"t": np.ones(2)}}, ["b", "a"], ["t"]),
        ({"id": np.ones(2), "x": np.ones(2), "y": np.ones(2)}, ["x"], ["y"]),
        ((np.ones(2), np.ones(2)), ["x"], ["y"]),
        ({"features": np.ones(2), "label": np.ones(2)}, ["features"], ["label"]),
        (pd.DataFrame({"features": [1.0], "label": [1], "more": ["a"]}), ["features"], ["label"]),
    ],
)
def test_the_form_of_a_shard_says_what_are_inputs_and_targets(
    shard: Any, features: list[str], labels: list[str]
) -> None:
    chosen = as_input.choose(XShards.from_shards([shard], engine="local"), ColumnOptions())

    assert [column.name for column in chosen.columns.features] == features
    assert [column.name for column in chosen.columns.labels] == labels


@pytest.mark.parametrize(
    ("shard", "complaint"),
    [
        (3, "shard 0 is a int"),
        ({}, "shard 0 is an empty dict"),
        ((np.ones(2), np.ones(2), np.ones(2)), "tuple of 3 arrays"),
        ({"x": {"a": np.ones(2)}, "y": {"a": np.ones(2)}}, "each needs its own name"),
        ({"x": np.ones(2), "y": np.ones(3)}, r"'y': an array of float64 and shape \(3,\)"),
        ({"a": np.ones(2), "b": np.ones(2)}, "which columns does the model take"),
    ],
)
def test_shards_that_cannot_be_used_are_described(shard: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        as_input.choose(XShards.from_shards([shard], engine="local"), ColumnOptions())


def test_values_that_are_no_numbers_are_refused_before_a_worker_starts() -> None:
    shards = local(2, x=np.array(["a", "b"]), y=np.ones(2))
    with pytest.raises(DataError, match="column 'x'(.|\n)*cannot feed a model"):
        as_input.choose(shards, ColumnOptions())


def test_shards_without_rows_may_be_anything(tmp_path: Path) -> None:
    full = {"x": np.ones((2, 3)), "y": np.ones(2)}
    shards = XShards.from_shards([[], full, {"x": np.ones(0)}], engine="local")

    assert opened(source(shards), tmp_path, 1)[0].rows == 2
