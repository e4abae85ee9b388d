"""Several workers compute what one process would with plain `model.fit` over the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest

from kindler import Estimator
from kindler.data.plan import ColumnOptions

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

COLUMNS = {"feature_cols": "x", "label_cols": "y"}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_two_workers_of_uneven_rows_take_the_steps_of_one_process(
    keras: Any, flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    data, cuts, config = problems.problem(130), (93, 37), {"flavour": flavour, "optimizer": optimizer}
    problems.deal(monkeypatch, cuts)
    est = Estimator.from_keras(model_creator=problems.classifier, config=config, workers=2, engine="local")

    history = est.fit(
        data,
        epochs=4,
        batch_size=26,
        callbacks=[problems.note_weights(keras, tmp_path)],
        verbose=0,
        **COLUMNS,
    )

    alone = problems.seeded(problems.classifier, config)
    batches = problems.global_batches(
        data, cuts, batch_size=26, epochs=4, options=ColumnOptions(**COLUMNS), folder=tmp_path
    )
    told = problems.fit_alone(keras, alone, batches)
    first, second = problems.noted_weights(tmp_path)
    assert sum(history["steps"]) == 20
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert problems.largest_difference(first, alone.get_weights()) < 1e-4
    for name in ("loss", "accuracy", "auc"):
        assert history[name] == pytest.approx(told[name], abs=1e-5), name
