"""Models with a train step of the user's own train as in one process, and their bad losses are noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import own_steps
import problems
import pytest
from flavour import FLAVOUR, one_is_enough

from kindler import Columns, Estimator, RunSettings
from kindler.errors import NonFiniteLossError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(40)
BAD = {**DATA, "x": np.where(np.arange(40)[:, None] == 23, np.float32("nan"), DATA["x"])}
FIT: dict[str, Any] = {
    "feature_cols": "x",
    "label_cols": [],
    "epochs": 2,
    "batch_size": 8,
    "shuffle": False,
    "verbose": 0,
}


def estimator(creator: Any, settings: RunSettings | None = None, **config: Any) -> Estimator:
    config = {"flavour": FLAVOUR, **config}
    return Estimator.from_keras(model=creator, config=config, workers=2, engine="local", settings=settings)


@pytest.mark.parametrize(
    "creator",
    [
        own_steps.coder,
        pytest.param(
            own_steps.game,
            marks=pytest.mark.skipif(FLAVOUR == "jax", reason="Keras on JAX has one optimizer a model"),
        ),
    ],
)
def test_a_step_without_labels_trains_on_two_workers_as_in_one_process(creator: Any) -> None:
    est = estimator(creator)
    history = est.fit(DATA, **FIT)

    alone = problems.seeded(creator, {"flavour": FLAVOUR})
    alone(DATA["x"][:1])
    alone.fit(DATA["x"], epochs=2, batch_size=8, shuffle=False, verbose=0)
    found, expected = (model.get_weights()[:4] for model in (est.get_model(), alone))  # Keras 2 adds metrics
    assert problems.largest_difference(found, expected) < 1e-5
    assert history["num_samples"] == [40, 40]


@one_is_enough
def test_a_bad_loss_of_a_users_step_is_noticed_whatever_it_is_called() -> None:
    with pytest.raises(NonFiniteLossError, match="the loss is nan in step 3 on worker 1") as raised:
        estimator(own_steps.coder, named="error").fit(BAD, columns=Columns(allow_nan=True), **FIT)
    assert 23 in raised.value.rows
    # The second loss of the step is NaN on both workers, once the first has moved weights.
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan in step 3 on worker [01]"):
        estimator(own_steps.game).fit(BAD, columns=Columns(allow_nan=True), **FIT)

    est = estimator(own_steps.game, settings=RunSettings(nan_loss="skip"))
    with pytest.warns(RuntimeWarning, match="in step 3 .* The step is skipped"):
        history = est.fit(BAD, columns=Columns(allow_nan=True), **FIT)
    assert history["skipped_steps"] == [1, 1]
    assert all(np.isfinite(array).all() for array in est.get_model().get_weights())
