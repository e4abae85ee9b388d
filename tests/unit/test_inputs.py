"""Data is recognised once, by a table of kinds; the kind decides the engine and what `predict` needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from kindler import XShards
from kindler.data.column_options import ColumnOptions
from kindler.errors import ConfigError
from kindler.estimator.checks import column_complaints
from kindler.estimator.inputs.contract import Input
from kindler.estimator.inputs.local import LoaderInput, MemoryInput, ParquetInput
from kindler.estimator.inputs.recognise import choose_engine, recognise
from kindler.estimator.inputs.shards import ShardsInput
from kindler.estimator.inputs.spark import FrameInput
from kindler.train.options import PredictOptions

X = np.ones((4, 2))
ARRAYS = MemoryInput({"x": X})
LOADER = LoaderInput(lambda config: [])


def frame() -> Any:
    """Looks like a Spark DataFrame from outside."""
    return type("DataFrame", (), {"__module__": "pyspark.sql.classic.dataframe"})()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"x": X}, MemoryInput),
        ((X, X), MemoryInput),
        (X, MemoryInput),
        ([X, X], MemoryInput),
        (pd.DataFrame({"x": [1]}), MemoryInput),
        (pa.table({"x": [1]}), MemoryInput),
        ("rows.parquet", ParquetInput),
        (Path("rows"), ParquetInput),
        (["a.parquet", Path("b.parquet")], ParquetInput),
        (lambda config, batch_size: [], LoaderInput),
        (XShards.from_shards([{"x": X}], engine="local"), ShardsInput),
        (frame(), FrameInput),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_each_kind_of_data_has_its_input(data: Any, kind: type[Input]) -> None:
    given = recognise(data)

    assert type(given) is kind
    assert given.data is data


@pytest.mark.parametrize("data", [42, None, [], {}, [X, 1], (X, X, X)], ids=repr)
def test_what_is_not_data_is_answered_with_what_is(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"data is (a|an) (?s:.*)Hint: pass a Spark DataFrame, an XShards"):
        recognise(data)


def test_spark_is_the_engine_where_some_of_the_data_lives_there() -> None:
    in_spark = FrameInput(frame())

    assert choose_engine("auto", ARRAYS) == "local"
    assert choose_engine("auto", ARRAYS, in_spark) == "spark"
    assert choose_engine("local", in_spark) == "local"
    assert choose_engine("spark", ARRAYS) == "spark"


def test_naming_columns_is_refused_where_all_data_is_made_by_user_code() -> None:
    columns = ColumnOptions(feature_cols="x", stack_features=False, allow_nan=True)

    assert [c.split()[0] for c in column_complaints(columns, LOADER, None)] == ["feature_cols"]
    assert list(column_complaints(columns, LOADER, ARRAYS)) == []


def test_only_parquet_files_are_scored_to_a_path_and_loaders_not_at_all() -> None:
    here, there = PredictOptions(), PredictOptions(output_path="scored")
    files = ParquetInput("rows.parquet")

    assert ARRAYS.score_complaints(here) == files.score_complaints(there) == []
    assert "output_path needs a Parquet path" in ARRAYS.score_complaints(there)[0]
    assert "pass output_path" in files.score_complaints(here)[0]
    assert "does not take functions or data loaders" in LOADER.score_complaints(here)[0]
