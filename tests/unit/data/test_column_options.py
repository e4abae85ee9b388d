"""The user's words about columns, checked against the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler.data.column_options import ColumnOptions
from kindler.data.columns import ColumnPlan
from kindler.errors import ConfigError, DataError


def column_plan(
    available: Any, feature_cols: Any = None, label_cols: Any = None, **options: Any
) -> ColumnPlan:
    return ColumnOptions(feature_cols=feature_cols, label_cols=label_cols, **options).plan(available)


def names(available: Any, *args: Any, **options: Any) -> tuple[list[str], list[str]]:
    plan = column_plan(available, *args, **options)
    return [column.name for column in plan.features], [column.name for column in plan.labels]


def test_the_usual_names_are_found() -> None:
    assert names(["label", "features", "x", "y"]) == (["features"], ["label"])
    assert names(["x", "y", "id"]) == (["x"], ["y"])
    assert names(["features", "x", "y"]) == (["x"], ["y"])
    assert names(["features"], need_labels=False) == (["features"], [])
    assert names(["a", "y"], "a") == (["a"], ["y"])
    assert names(["x", "b"], None, "b") == (["x"], ["b"])


def test_names_may_be_one_or_several() -> None:
    assert names(["a", "b", "c"], ["b", "a"], "c") == (["b", "a"], ["c"])
    assert names(["a"], "a", ["a"]) == (["a"], ["a"])
    assert names(["a", "y"], "a", []) == (["a"], [])


def test_no_usual_names_lists_the_columns_and_what_to_pass() -> None:
    with pytest.raises(
        ConfigError, match=r"\['a', 'b'\](?s:.*)pass feature_cols=\[...\] and label_cols=\[...\]"
    ):
        column_plan(["a", "b"])
    with pytest.raises(ConfigError, match=r"Hint: pass label_cols=\[...\]\.$"):
        column_plan(["a", "b"], "a")
    with pytest.raises(ConfigError, match=r"Hint: pass feature_cols=\[...\]\.$"):
        column_plan(["a", "b"], need_labels=False)


def test_an_unknown_column_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"feature_cols: there is no column 'pixel'. Did you mean 'pixels'\?"
    ):
        column_plan(["pixels", "label"], "pixel")
    with pytest.raises(ConfigError, match="label_cols: there is no column 'q'"):
        column_plan(["x", "y"], "x", "q")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": {"z": "int8"}}, "dtypes: there is no column 'z'"),
        ({"shapes": {"z": (1,)}}, "shapes: there is no column 'z'"),
        ({"allow_nan": ["z"]}, "allow_nan: there is no column 'z'"),
        ({"dtypes": {"x": "float33"}}, "'float33'.*not a numpy dtype"),
        ({"dtypes": {"x": "str"}}, "a model takes integers, floats or booleans"),
        ({"shapes": {"x": (-1, 2)}}, "must be the sizes of one row"),
        ({"shapes": {"x": (1.5,)}}, "must be the sizes of one row"),
        ({"feature_cols": []}, "at least one input"),
        ({"feature_cols": ["x", "x"]}, r"feature_cols: \['x'\] appear more than once"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        column_plan(["x", "y"], **options)


def test_options_reach_their_columns() -> None:
    plan = column_plan(
        ["x", "y"], dtypes={"x": np.float64}, shapes={"x": [2, 3], "y": 1}, allow_nan="x", stack_features=True
    )

    (x,), (y,) = plan.features, plan.labels
    assert (x.dtype, x.shape, x.allow_nan, x.role) == ("float64", (2, 3), True, "feature")
    assert (y.dtype, y.shape, y.allow_nan, y.role) == (None, (1,), False, "label")
    assert plan.stack_features
    assert all(column.allow_nan for column in column_plan(["x", "y"], allow_nan=True).all)


def test_types_that_cannot_work_are_refused_before_anything_is_read() -> None:
    with pytest.raises(DataError, match="column 'x': values of type string cannot feed a model"):
        column_plan({"x": pa.string(), "y": pa.int64()})
    with pytest.raises(DataError, match=r"dtypes=\{'x': 'uint8'\}"):
        column_plan({"x": pa.binary(), "y": pa.int64()})
    assert names({"x": pa.binary(), "y": pa.int64(), "s": pa.string()}, dtypes={"x": "uint8"}) == (
        ["x"],
        ["y"],
    )


def test_text_is_ragged_where_the_model_takes_it_and_cannot_be_stacked() -> None:
    types = {"text": pa.string(), "tokens": pa.list_(pa.int64()), "x": pa.float32(), "y": pa.int64()}
    asked = ColumnOptions(feature_cols=["text", "x"], label_cols="y", ragged="text")

    assert [column.ragged for column in asked.plan(types).features] == [True, False]
    lists = replace(asked, feature_cols=["tokens"])
    assert not lists.plan(types).features[0].ragged
    assert replace(lists, ragged="all", length_col="x").plan(types).names == ("tokens", "y", "x")
    assert not replace(lists, ragged="all", shapes={"tokens": 3}).plan(types).features[0].ragged
    with pytest.raises(ConfigError, match="'text' is text"):
        replace(asked, stack_features=True).plan(types)
