"""The facts of feature transformers on pandas and on shards of the local engine, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kindler import XShards
from kindler.engine import fork_server
from kindler.errors import ConfigError, DataError, NotFittedError
from kindler.features import MinMaxScaler, StandardScaler, StringIndexer
from tests.features_facts import Back, FeatureFacts, Give


@pytest.fixture(scope="module", autouse=True)
def _no_processes_left() -> Iterator[None]:
    yield
    fork_server.retire()


class TestPandas(FeatureFacts):
    @pytest.fixture
    def give(self) -> Give:
        return lambda frame: frame

    @pytest.fixture
    def back(self) -> Back:
        return lambda frame: frame


class TestLocalShards(FeatureFacts):
    @pytest.fixture
    def give(self) -> Give:
        return lambda frame: XShards.partition(frame, 2, engine="local")

    @pytest.fixture
    def back(self) -> Back:
        return lambda shards: shards.to_pandas()


def test_the_frame_that_is_given_stays_as_it_is() -> None:
    frame = pd.DataFrame({"city": ["a", "b"], "n": [1, 2]})
    before = frame.copy()

    MinMaxScaler(input_col="n").fit_transform(StringIndexer("city").fit_transform(frame))

    pd.testing.assert_frame_equal(frame, before)


def test_an_unknown_or_missing_value_is_named_with_its_row() -> None:
    indexer = StringIndexer("city").fit(pd.DataFrame({"city": ["a"]}))

    with pytest.raises(DataError, match=r"column 'city', row 1: 'x' was not seen(.|\n)*handle_invalid"):
        indexer.transform(pd.DataFrame({"city": ["a", "x"]}))
    with pytest.raises(DataError, match="row 0: is missing"):
        indexer.transform(pd.DataFrame({"city": [None]}))


def test_categories_and_integers_with_nulls_are_values_like_others() -> None:
    frame = pd.DataFrame(
        {"c": pd.Categorical(["y", "x", "y"], ["z", "y", "x"]), "n": pd.array([2**53 + 1, None, 7], "Int64")}
    )
    indexer = StringIndexer(["c", "n"], handle_invalid="keep")

    assert indexer.fit_transform(frame).to_dict("list") == {"c": [0, 1, 0], "n": [1, 2, 0]}
    assert indexer.labels_ == {"c": ["y", "x"], "n": [7, 2**53 + 1]}
    scaled = MinMaxScaler(input_col="n").fit_transform(pd.DataFrame({"n": pd.array([1, None, 3], "Int64")}))
    np.testing.assert_array_equal(scaled["n"], [0, np.nan, 1])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: StringIndexer([]), "must be a column name"),
        (lambda: StringIndexer(["a", "a"]), "more than once"),
        (lambda: StringIndexer(["a", "b"], "c"), "2 input columns, but output_col='c' names 1"),
        (lambda: StringIndexer("a", handle_invalid="drop"), "one of"),
        (lambda: MinMaxScaler(1, 1, input_col="a"), "min must be less than max"),
        (MinMaxScaler, "input_col=None"),
        (lambda: StandardScaler(input_col="a", ddof=2), "0 or 1"),
        (lambda: StringIndexer.from_dict({"kind": "MinMaxScaler", "format": 1}), "kind 'MinMaxScaler'"),
        (lambda: MinMaxScaler(input_col="a").fit([1, 2]), "cannot use a builtins.list"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([None, None], "no values to fit on"),
        ([1.0, np.inf], "infinite values"),
        ([[1.0], [1.0, 2.0]], "row 1: has 2 values where others have 1"),
        ([pd.Timestamp("2024-01-01")], "not numbers"),
    ],
)
def test_values_that_cannot_be_scaled_are_refused(values: list[Any], told: str) -> None:
    with pytest.raises(DataError, match=rf"column 'a'.*{told}"):
        StandardScaler(input_col="a").fit(pd.DataFrame({"a": values}))


def test_nothing_is_transformed_before_fit() -> None:
    for made in (StringIndexer("a"), MinMaxScaler(input_col="a")):
        with pytest.raises(NotFittedError, match="fit"):
            made.transform(pd.DataFrame({"a": [1]}))
        with pytest.raises(NotFittedError, match="fit"):
            made.to_dict()


def test_what_was_written_with_the_names_of_then_is_read() -> None:
    scaler = StandardScaler(with_mean=True, input_col="v").fit(pd.DataFrame({"v": [1.0, 3.0]}))
    state = scaler.to_dict()
    then = {
        "input_col": "inputCol",
        "output_col": "outputCol",
        "with_mean": "withMean",
        "with_std": "withStd",
    }
    again = StandardScaler.from_dict({then.get(name, name): value for name, value in state.items()})

    assert "with_mean" in state
    assert again.to_dict() == state


def test_vectors_of_another_length_than_learned_are_refused() -> None:
    scaler = MinMaxScaler(input_col="v").fit(pd.DataFrame({"v": [[1.0, 2.0]]}))
    with pytest.raises(DataError, match="vectors of 1 values, but MinMaxScaler was fitted on vectors of 2"):
        scaler.transform(pd.DataFrame({"v": [[1.0]]}))
