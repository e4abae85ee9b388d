"""Any number of local workers computes what one process would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator
from tests import exact

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

COLUMNS = {"feature_cols": ["id", "x"], "label_cols": "y"}


def test_two_workers_take_exactly_the_steps_of_the_global_mean() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    est = Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=2)
    x = np.array([[0.0], [0.0], [1.0], [1.0]], np.float32)

    est.fit((x, np.zeros((4, 1), np.float32)), epochs=2, batch_size=4, verbose=0)

    assert est.get_model().weight.item() == 0.25


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("rows", "batch_size", "epochs"), [(97, 20, 4), (2, 1, 10)])
def test_weights_rows_and_figures_equal_those_of_one_process(
    tmp_path: Path, workers: int, rows: int, batch_size: int, epochs: int
) -> None:
    data = exact.problem(max(rows, 3) if rows > 2 else rows)
    est = exact.estimator(workers=workers, engine="local")

    history = est.fit(
        data, epochs=epochs, batch_size=batch_size, callbacks=[exact.Note(tmp_path)], verbose=0, **COLUMNS
    )

    assert sum(history["steps"]) == 20
    assert history["num_samples"] == [rows] * epochs
    exact.assert_each_row_once_per_epoch(tmp_path, rows, epochs)
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, data))
    if rows > 2:
        figures = est.evaluate(data, batch_size=16, verbose=0)
        assert figures == pytest.approx(exact.single_process_figures(est.get_model(), data), abs=1e-5)


def test_workers_that_count_as_hosts_of_their_own_give_the_same_weights(tmp_path: Path) -> None:
    from kindler import RunSettings

    data = exact.problem(50)
    est = exact.estimator(workers=2, settings=RunSettings(shared_memory=False))

    est.fit(data, epochs=2, batch_size=10, callbacks=[exact.Note(tmp_path)], verbose=0, **COLUMNS)

    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, data))


def test_same_seed_and_worker_count_give_bit_identical_weights() -> None:
    def trained() -> list[torch.Tensor]:
        est = exact.estimator(workers=2, seed=11)
        est.fit(exact.problem(60), epochs=2, batch_size=16, verbose=0, **COLUMNS)
        return [p.detach().clone() for p in est.get_model().parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(), trained(), strict=True))


def test_a_second_fit_goes_on_from_where_the_model_is(tmp_path: Path) -> None:
    data = exact.problem(40)
    once, twice = exact.estimator(workers=2), exact.estimator(workers=2)
    options = {"batch_size": 8, "verbose": 0, **COLUMNS}

    once.fit(data, epochs=4, **options)
    twice.fit(data, epochs=2, **options)
    second = twice.fit(data, epochs=2, **options)

    assert second["epoch"] == [3, 4]
    assert [row["epoch"] for row in twice.history] == [1, 2, 3, 4]
    exact.assert_same_weights(twice.get_model(), once.get_model(), tolerance=0)


def test_max_steps_ends_in_the_middle_of_an_epoch() -> None:
    est = exact.estimator(workers=2)

    history = est.fit(exact.problem(100), epochs=5, batch_size=10, max_steps=13, verbose=0, **COLUMNS)

    assert history["steps"] == [10, 3]


def test_validation_figures_are_those_of_the_whole_validation_set() -> None:
    data, held_out = exact.problem(60), exact.problem(31)
    est = exact.estimator(workers=2)

    history = est.fit(data, epochs=1, batch_size=16, validation_data=held_out, verbose=0, **COLUMNS)

    expected = {f"val_{k}": v for k, v in exact.single_process_figures(est.get_model(), held_out).items()}
    assert {k: history[-1][k] for k in expected} == pytest.approx(expected, abs=1e-5)
