"""Losses that compare rows with one another: with the rows of all workers, or refused."""

from __future__ import annotations

from typing import Any

import contrastive
import numpy as np
import problems
import pytest
from flavour import FLAVOUR, one_unless_whole, two_unless_whole

from kindler import Estimator
from kindler.errors import ConfigError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

RANDOM = np.random.default_rng(3)
DATA = {
    "x": RANDOM.normal(size=(64, contrastive.WIDTH)).astype(np.float32),
    "y": RANDOM.normal(size=(64, 1)).astype(np.float32),
}
FIT: dict[str, Any] = {
    "feature_cols": "x",
    "label_cols": "y",
    "batch_size": 7,
    "verbose": 0,
}
NOT_JAX = pytest.mark.skipif(FLAVOUR == "jax", reason="JAX's train steps have other arguments")


def estimator(kind: str, workers: int, **config: Any) -> Estimator:
    config = {"kind": kind, "flavour": FLAVOUR, **config}
    return Estimator.from_keras(model=contrastive.model, config=config, workers=workers, engine="local")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gathers", marks=two_unless_whole),
        pytest.param("steps", marks=one_unless_whole),
    ],
)
@pytest.mark.skipif(FLAVOUR == "jax", reason="refused there")
def test_rows_of_all_workers_train_as_in_one_process(kind: str) -> None:
    alone, several = estimator(kind, 1), estimator(kind, 3)  # of the last row two workers have none
    losses = [est.fit(DATA, epochs=2, **FIT)["loss"] for est in (alone, several)]

    found, expected = (est.get_model().get_weights() for est in (several, alone))
    assert problems.largest_difference(found, expected) < 1e-6
    np.testing.assert_allclose(*losses, rtol=1e-5)


@one_unless_whole
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("compares", r"the loss compares\(\) of"),
        ("adds_of_all", r"the loss of the model, with what Adds adds to it, of"),
        pytest.param("compares_in_steps", r"what Compares.train_step gives", marks=NOT_JAX),
    ],
)
def test_what_compares_rows_without_gathering_is_refused(kind: str, match: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){match}.*not a mean over rows.*Hint.*all_gather"):
        estimator(kind, 2, restless=True).fit(DATA, **FIT)


@one_unless_whole
@pytest.mark.parametrize("kind", ["row_by_row", "adds_means", pytest.param("means_in_steps", marks=NOT_JAX)])
def test_means_are_trained_whatever_layers_draw_or_take_from_their_batch(kind: str) -> None:
    assert estimator(kind, 2, restless=True).fit(DATA, **FIT)["num_samples"] == [64]


@pytest.mark.skipif(FLAVOUR != "jax", reason="of JAX alone")
def test_jax_says_that_it_cannot_gather() -> None:
    with pytest.raises(ConfigError, match=r"(?s)Keras on JAX compiles a step.*keras_backend='torch'"):
        estimator("gathers", 2).fit(DATA, **FIT)
