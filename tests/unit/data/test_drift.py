"""Which differences from the training data are an alarm: real ones, and never those of chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kindler.data.drift import DriftRule, drift_of
from kindler.data.statistics import Array, Statistics, measured, summarised
from kindler.errors import ConfigError

DRAW = np.random.default_rng(11)


def columns(rows: int, *, shift: float = 0.0, draw: np.random.Generator = DRAW) -> dict[str, Array]:
    normal = draw.normal(0, 1, rows)
    return {
        "normal": (normal + shift).astype(np.float32),
        "skewed": draw.lognormal(0, 1.5, rows),
        "half zeros": np.where(draw.random(rows) < 0.5, 0, draw.exponential(3, rows)),
        "count": draw.poisson(200, rows),
        "class": draw.integers(0, 10, rows),
        "rare": draw.choice([1.0, 2.0, 3.0], rows, p=[0.97, 0.025, 0.005]),
        "colour": draw.choice(["red", "green", "blue"], rows).astype(object),
        "holes": np.where(draw.random(rows) < 0.1, np.nan, normal),
        "x": draw.normal(size=(rows, 12)).astype(np.float32),
    }


def summaries(named: dict[str, Any], rows: int) -> Any:
    return summarised(measured(named), rows, cut=True)


KNOWN = Statistics(columns=summaries(columns(8192), 1_000_000))


def report(**changed: Any) -> dict[str, Any]:
    rows = len(next(iter(changed.values())))
    return drift_of(KNOWN, summaries(columns(rows) | changed, rows))


@pytest.mark.parametrize("rows", [200, 500, 5000])
def test_windows_like_the_training_data_raise_no_alarm(rows: int) -> None:
    for seed in range(40):
        window = columns(rows, draw=np.random.default_rng(seed))

        told = drift_of(KNOWN, summaries(window, rows))

        assert not told["alarm"], told["reasons"]


def test_a_shifted_column_raises_the_alarm_and_no_other_one_does() -> None:
    told = report(normal=DRAW.normal(1, 1, 500).astype(np.float32))

    assert told["alarm"]
    assert [name for name, one in told["columns"].items() if one["alarm"]] == ["normal"]
    assert told["columns"]["normal"]["psi"] > 0.5
    assert told["columns"]["normal"]["ks"] == pytest.approx(0.38, abs=0.08)
    assert told["reasons"][0].startswith("normal: PSI ")


def test_a_column_in_another_unit_raises_the_alarm() -> None:
    assert report(skewed=1000 * DRAW.lognormal(0, 1.5, 300))["columns"]["skewed"]["alarm"]


def test_missing_values_that_were_not_there_raise_the_alarm() -> None:
    normal = DRAW.normal(0, 1, 500)
    normal[::20] = np.nan

    told = report(normal=normal)

    assert told["columns"]["normal"]["missing"] == [0.0, 0.05]
    assert told["reasons"] == ["normal: 5.0% of the values are missing, and 0.0% were"]


def test_a_column_that_is_missing_altogether_raises_the_alarm() -> None:
    assert report(normal=np.full(300, np.nan))["columns"]["normal"]["alarm"]
    assert report(colour=np.full(300, None))["columns"]["colour"]["alarm"]


@pytest.mark.parametrize("new", [["violet"], [f"colour {i}" for i in range(300)]])
def test_new_categories_raise_the_alarm_and_are_not_named(new: list[str]) -> None:
    colours = DRAW.choice(["red", "green", "blue"], 500).astype(object)
    colours[:60] = np.resize(np.array(new, object), 60)

    told = report(colour=colours)

    assert told["columns"]["colour"]["new"] == pytest.approx(0.12, abs=0.02)
    assert "new categories" in told["reasons"][0]
    assert new[0] not in str(told)


def test_a_number_that_is_no_class_is_a_new_category() -> None:
    assert "new categories" in report(**{"class": np.resize([*range(10), 77], 500)})["reasons"][0]


def test_other_shares_of_the_same_categories_raise_the_alarm() -> None:
    told = report(colour=DRAW.choice(["red", "green", "blue"], 500, p=[0.8, 0.1, 0.1]).astype(object))

    assert "PSI" in told["columns"]["colour"]["alarm"]


def test_a_few_rows_never_raise_it() -> None:
    assert not report(normal=np.full(199, 1e6))["alarm"]


def test_predictions_are_compared_as_columns_are() -> None:
    known = Statistics(columns={}, predictions=summaries({"prediction": DRAW.normal(size=4000)}, 4000))
    shifted = summaries({"prediction": DRAW.normal(2, 1, 400)}, 400)

    assert drift_of(known, {}, shifted)["predictions"]["prediction"]["alarm"]


def test_columns_that_the_rows_lack_are_named_and_others_ignored() -> None:
    told = drift_of(KNOWN, summaries({"normal": DRAW.normal(size=300), "else": np.zeros(300)}, 300))

    assert list(told["columns"]) == ["normal"]
    assert "skewed" in told["unknown"]


def test_a_rule_says_what_is_an_alarm() -> None:
    shifted = summaries({"normal": DRAW.normal(0.5, 1, 3000)}, 3000)

    assert drift_of(KNOWN, shifted, rule=DriftRule(psi=0.1, ks=0.1))["alarm"]
    assert not drift_of(KNOWN, shifted, rule=DriftRule(psi=0.6, ks=0.4))["alarm"]
    with pytest.raises(ConfigError, match="must be greater than 0"):
        DriftRule(psi=0)
