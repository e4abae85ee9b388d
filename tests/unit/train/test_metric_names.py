"""Which way a figure gets better."""

from __future__ import annotations

import math

import pytest

from kindler.errors import ConfigError
from kindler.train.metric_names import Direction, direction, improves, parse


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "val_loss",
        "mse",
        "RMSE",
        "val_mae",
        "MeanSquaredError",
        "top_error",
        "head_loss_1",
        "precision_error",
    ],
)
def test_losses_and_errors_are_better_small(name: str) -> None:
    assert direction(name) == "min"


@pytest.mark.parametrize(
    "name",
    ["acc", "val_accuracy", "AUC", "auroc", "F1", "val_f1_score", "R2Score", "r2", "precision_1", "Recall"],
)
def test_scores_are_better_large(name: str) -> None:
    assert direction(name) == "max"


def test_a_name_that_does_not_say_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'val_gain'.*Hint.*'max:val_gain'"):
        direction("val_gain")


def test_a_prefix_decides() -> None:
    assert parse("max:val_gain") == ("val_gain", "max")
    assert parse("min:accuracy") == ("accuracy", "min")
    assert parse("val_auc") == ("val_auc", "max")


def test_another_prefix_belongs_to_the_name() -> None:
    assert [parse(name) for name in ("head:loss", "head:auc")] == [("head:loss", "min"), ("head:auc", "max")]


def test_better_is_by_more_than_the_least_difference_and_never_nan() -> None:
    assert improves(0.4, 0.5, "min")
    assert not improves(0.45, 0.5, "min", min_delta=0.1)
    assert improves(0.7, 0.5, "max", min_delta=0.1)
    assert not improves(math.nan, None, "min")
    assert improves(1e9, None, "min")


@pytest.mark.parametrize("way", ["min", "max"])
@pytest.mark.parametrize("delta", [0.0, 0.25])
def test_what_is_only_as_good_as_required_is_not_better(way: Direction, delta: float) -> None:
    required = 0.5 - delta if way == "min" else 0.5 + delta

    assert not improves(required, 0.5, way, min_delta=delta)
    assert not improves(0.5, 0.5, way)
    assert improves(math.nextafter(required, -1 if way == "min" else 1), 0.5, way, min_delta=delta)
