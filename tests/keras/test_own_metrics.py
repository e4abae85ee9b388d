"""Metrics of a user's own are those of all rows on several workers, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import own_metrics
import pytest
from flavour import FLAVOUR, KERAS, one_is_enough

from kindler import Estimator
from kindler.errors import ConfigError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
Y = np.arange(30, dtype=np.float32)[:, None]
ERRORS = np.abs(X.sum(axis=1, keepdims=True) - Y)


def judged(*metrics: str, workers: int = 2) -> dict[str, Any]:
    config = {"flavour": FLAVOUR, "metrics": metrics}
    est = Estimator.from_keras(model=own_metrics.model, config=config, workers=workers, engine="local")
    return est.evaluate({"x": X, "y": Y}, batch_size=10, verbose=0)


@pytest.mark.filterwarnings("ignore::kindler.errors.UntrainedWarning")
def test_what_can_be_merged_is_that_of_all_rows() -> None:
    figures = judged("told", "mean", "by_row")

    assert figures["told"] == pytest.approx(ERRORS.max(), rel=1e-5)
    assert figures["mean"] == pytest.approx(ERRORS.mean(), rel=1e-5)
    assert figures["by_row"] == pytest.approx(ERRORS.mean(), rel=1e-5)


@one_is_enough
@pytest.mark.filterwarnings("ignore::kindler.errors.UntrainedWarning")
@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("last", r"'last' \(Last\) cannot be merged over workers.*'value' was .*Hint: keep sums"),
        ("peak", r"'peak' \(Peak\) cannot be merged over workers.*merge_over_workers = \{'value': 'max'\}"),
        ("wrong", r"Wrong.merge_over_workers: the variable 'value' has 'median'; expected 'sum', 'max'"),
    ],
)
def test_what_cannot_is_refused_with_several_workers(metric: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        judged(metric)


@one_is_enough
@pytest.mark.filterwarnings("ignore::kindler.errors.UntrainedWarning")
def test_with_one_worker_they_are_what_keras_computes() -> None:
    assert judged("peak", "by_batch", workers=1)["peak"] == pytest.approx(ERRORS.max(), rel=1e-5)


@one_is_enough
@pytest.mark.filterwarnings("ignore::kindler.errors.UntrainedWarning")
def test_a_metric_of_batches_says_that_it_is_not_one_of_rows() -> None:
    with pytest.warns(UserWarning, match="'by_batch' depends on how rows are batched"):
        judged("by_batch")


@one_is_enough
def test_accuracy_of_one_hot_labels_is_that_of_their_classes() -> None:
    model = KERAS.Sequential([KERAS.Input((3,)), KERAS.layers.Softmax()])
    model.compile(optimizer="sgd", loss="categorical_crossentropy", metrics=["accuracy"])
    classes = np.arange(30) % 3
    est = Estimator.from_keras(model, workers=2, engine="local")

    figures = est.evaluate({"x": X, "y": np.eye(3, dtype=np.float32)[classes]}, verbose=0)

    assert figures["accuracy"] == pytest.approx((X.argmax(axis=1) == classes).mean())
