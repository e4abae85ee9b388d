"""Summaries of columns: what is measured, how parts are merged, and what may be read again."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.data.columns import Column
from kindler.data.ragged import to_ragged
from kindler.data.statistics import (
    MOST_MEASURES,
    POINTS,
    Statistics,
    Summary,
    measured,
    merged,
    sample_size,
    some_rows,
    summarised,
)
from kindler.errors import DataError

DRAWN = np.random.default_rng(7)
VALUES = {
    "normal": DRAWN.normal(5, 3, 40_000).astype(np.float32),
    "skewed": DRAWN.lognormal(0, 2, 40_000),
    "half zeros": np.where(DRAWN.random(40_000) < 0.5, 0.0, DRAWN.normal(size=40_000)),
    "sorted": np.arange(40_000),
}


def summary(values: Any) -> Summary:
    return summarised({"v": np.asarray(values)}, len(values))["v"]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_merged_summaries_keep_ranks_within_their_bound_of_the_exact_ones(name: str, parts: int) -> None:
    values = VALUES[name]
    ends = np.sort(DRAWN.choice(len(values), parts - 1, replace=False))

    [whole] = merged([{"v": summary(part)} for part in np.split(values, ends)]).values()

    asked = np.unique(np.quantile(values, np.linspace(0, 1, 999), method="lower"))
    exact = np.searchsorted(np.sort(values), asked, side="right") / len(values)
    assert np.abs(whole.rank(asked) - exact).max() <= 2 / POINTS
    assert (whole.rows, whole.sampled) == (len(values), len(values))


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 50, 127, 128, 129, 500, 4000]), min_size=1, max_size=9),
    form=st.sampled_from(["normal", "lognormal", "few", "one value", "a worker each", "an outlier"]),
    seed=st.integers(0, 1000),
)
def test_ranks_and_moments_are_within_their_bound_however_the_rows_are_split(
    sizes: list[int], form: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    values = {
        "normal": draw.normal(size=sum(sizes)),
        "lognormal": draw.lognormal(0, 3, sum(sizes)),
        "few": draw.integers(0, 5, sum(sizes)).astype(np.float64),
        "one value": np.ones(sum(sizes)),
        "a worker each": np.sort(draw.normal(size=sum(sizes))),
        "an outlier": np.where(np.arange(sum(sizes)) == 0, 1e12, draw.normal(size=sum(sizes))),
    }[form]

    [whole] = merged([{"v": summary(part)} for part in np.split(values, np.cumsum(sizes)[:-1])]).values()

    ordered = np.sort(values)
    asked = np.unique(values)
    exact = np.searchsorted(ordered, asked, side="right") / len(values)
    assert np.abs(whole.rank(asked) - exact).max() <= 2 / POINTS + 1e-9
    assert (whole.quantiles[0], whole.quantiles[-1]) == (values.min(), values.max())
    assert whole.mean == pytest.approx(values.mean())
    assert whole.std == pytest.approx(values.std(), abs=1e-6 * abs(values).max())


def test_merged_moments_are_those_of_all_rows() -> None:
    values = VALUES["normal"].astype(np.float64)

    [whole] = merged([{"v": summary(values[:100])}, {"v": summary(values[100:])}]).values()

    assert whole.mean == pytest.approx(values.mean())
    assert whole.std == pytest.approx(values.std())
    assert (whole.quantiles[0], whole.quantiles[-1]) == (values.min(), values.max())


def test_a_part_that_was_sampled_counts_by_the_rows_it_stands_for() -> None:
    few = summarised({"v": np.zeros(10)}, rows=300)["v"]
    many = summarised({"v": np.ones(100)}, rows=100)["v"]

    [whole] = merged([{"v": few}, {"v": many}]).values()

    assert whole.mean == pytest.approx(0.25)
    assert whole.categories == pytest.approx({0.0: 0.75, 1.0: 0.25})
    assert (whole.rows, whole.sampled) == (400, 110)


def test_nan_and_infinity_are_missing_and_in_nothing_else() -> None:
    known = summary([1.0, np.nan, np.inf, 3.0])

    assert known.missing == 0.5
    assert (known.mean, known.categories) == (2.0, {1.0: 0.5, 3.0: 0.5})


def test_a_column_without_any_value_is_all_missing() -> None:
    nothing = summary([np.nan, np.nan])

    [whole] = merged([{"v": nothing}, {"v": summary([4.0])}]).values()

    assert (nothing.missing, nothing.quantiles) == (1.0, ())
    assert (whole.missing, whole.mean) == (pytest.approx(2 / 3), 4.0)


def test_values_become_categories_while_they_are_few() -> None:
    assert summary(np.arange(64)).categories is not None
    assert summary(np.arange(65)).categories is None
    assert merged([{"v": summary(np.arange(64))}, {"v": summary([99])}])["v"].categories is None


def test_texts_are_kept_only_if_they_are_categories() -> None:
    few = np.array(["red", "blue", "red", None] * 25, object)
    names = np.array([f"person {i}" for i in range(100)], object)

    made = summarised(measured({"colour": few, "name": names}), 100)

    assert made["colour"].categories == pytest.approx({"red": 2 / 3, "blue": 1 / 3})
    assert made["colour"].missing == 0.25
    assert "name" not in made
    assert "person" not in json.dumps({name: one.to_json() for name, one in made.items()})
    assert made["length(name)"].mean == pytest.approx(8.9)


def test_a_row_of_a_few_values_has_a_measure_of_each_and_one_of_many_their_mean() -> None:
    few, many = np.arange(12.0).reshape(4, 3), np.ones((4, 28, 28), np.uint8)

    names = measured({"x": few, "image": many, "y": np.zeros((4, 1))})

    assert list(names) == ["x[0]", "x[1]", "x[2]", "mean(image)", "y"]
    assert names["x[1]"].tolist() == [1.0, 4.0, 7.0, 10.0]
    assert names["mean(image)"].tolist() == [1.0] * 4


def test_a_column_in_a_spool_and_the_same_one_in_memory_have_the_same_measures() -> None:
    import pyarrow as pa

    texts = ["a", "bcd", "", "e"]
    spooled = to_ragged(pa.array(texts), Column(name="t", role="feature", ragged=True), where=str)

    in_spool = measured({"t": spooled}, np.array([1, 3]))
    in_memory = measured({"t": np.array([texts[1], texts[3]], object)})

    assert {k: v.tolist() for k, v in in_spool.items()} == {k: v.tolist() for k, v in in_memory.items()}


def test_of_very_many_columns_the_first_ones_are_measured() -> None:
    assert len(measured({f"c{i}": np.zeros(2) for i in range(1000)})) == MOST_MEASURES


def test_a_sample_has_one_row_of_each_stretch() -> None:
    rows = some_rows(1000, 100, seed=3)

    assert (rows // 10).tolist() == list(range(100))
    assert some_rows(5, sample_size(5)).tolist() == [0, 1, 2, 3, 4]
    assert len(some_rows(0, 0)) == 0


def example() -> dict[str, Any]:
    columns = summarised(measured({"v": VALUES["normal"], "c": np.array(["a", "b"] * 20_000)}), 40_000)
    return Statistics(columns=merged([columns]), predictions={}).to_json()


def test_statistics_are_plain_json_that_can_be_read_again() -> None:
    content = json.loads(json.dumps(example(), allow_nan=False))

    assert Statistics.from_json(content).to_json() == content


def changed(**fields: Any) -> dict[str, Any]:
    content = copy.deepcopy(example())
    content["columns"]["v"].update(fields)
    return content


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {"format": 2, "columns": {}, "predictions": {}},
        {"format": 1, "columns": {f"c{i}": {} for i in range(MOST_MEASURES + 1)}, "predictions": {}},
        {"format": 1, "columns": {"x" * 10_000: {}}, "predictions": {}},
        changed(rows=-1),
        changed(rows=1.5),
        changed(rows=1 << 80),
        changed(missing=2),
        changed(mean=float("nan")),
        changed(mean=10**400),
        changed(quantiles=[1.0]),
        changed(quantiles=[2.0, 1.0]),
        changed(quantiles=[0.0] * 100_000),
        changed(quantiles="abc"),
        changed(categories=[[i, 0.0] for i in range(1000)]),
        changed(categories=[[[], 0.1]]),
        changed(categories={"a": 1}),
    ],
)
def test_statistics_that_somebody_else_made_up_are_rejected(content: Any) -> None:
    with pytest.raises(DataError, match="are not statistics of a model"):
        Statistics.from_json(content)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1e999", '{"format": 1}', "x" * (5 << 20)])
def test_a_file_of_statistics_that_is_damaged_or_too_large_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "statistics.json").write_text(text)

    with pytest.raises(DataError, match="statistics of a model"):
        Statistics.read(tmp_path / "statistics.json")


def kept(statistics: Mapping[str, Any]) -> int:
    return len(json.dumps(statistics))


def test_statistics_of_many_columns_stay_small() -> None:
    columns = {f"c{i}": VALUES["skewed"] for i in range(MOST_MEASURES)}

    assert kept(Statistics(columns=summarised(measured(columns), 40_000)).to_json()) < 1 << 20
