"""Asynchronous training and rounds on Spark's tasks: the server takes no slot, wherever ranks meet."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, RunSettings
from kindler.callbacks import Callback
from kindler.strategies import Async, LocalSGD, Strategy

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

SLOTS = 4


class Weight(nn.Module):
    """One weight, whatever the rows: the gradient of its mean output is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() + 0 * x[:, :1]


def its_output(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


@pytest.mark.parametrize(
    ("meets", "strategy"),
    [
        ("driver", Async(lock=True)),
        ("workers", Async(max_staleness=1)),
        ("driver", LocalSGD(every_steps=2)),
    ],
)
def test_all_slots_train_and_every_update_counts(spark: Any, meets: Any, strategy: Strategy) -> None:
    frame = spark.range(80, numPartitions=3).selectExpr("float(id) AS features", "float(0) AS label")
    model = Weight()
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=its_output,
        workers=SLOTS,
        settings=RunSettings(rendezvous=meets),
        engine="spark",
    )
    history = est.fit(
        frame,
        epochs=2,
        batch_size=20,
        columns=Columns(shapes={"features": (1,)}),
        strategy=strategy,
        verbose=0,
    )

    weight = est.get_model().weight.detach().numpy()
    assert history["num_samples"] == [80, 80]
    if strategy.name == "async":
        np.testing.assert_array_equal(weight, np.full(2, -float(sum(history["updates"]))))
        assert sum(history["updates"]) == 2 * 4 * SLOTS
    else:
        assert history["rounds"] == [2, 2]
        np.testing.assert_array_equal(weight, np.full(2, -8.0))


class DieOnce(Callback):
    """The first worker dies in the second epoch, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Any) -> None:
        marker = Path(self.folder, "dead")
        if (run.rank, run.epoch) == (0, 2) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_in_a_round_is_replaced_with_its_rows_where_spark_does_not_retry(
    spark: Any, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    rows = [(row.tolist(), float(row.sum())) for row in random.normal(size=(40, 2))]
    frame = spark.createDataFrame(rows, "features array<float>, label float").repartition(3)
    found = []
    for callbacks in ([], [DieOnce(tmp_path)]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        est = Estimator.from_torch(
            model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), loss=nn.MSELoss(), workers=2
        )
        history = est.fit(
            frame,
            epochs=3,
            batch_size=8,
            columns=Columns(shapes={"label": (1,)}),
            callbacks=callbacks,
            strategy=LocalSGD(every_steps=2),
            verbose=0,
        )
        weights = [value.tolist() for value in est.get_model().state_dict().values()]
        found.append((history["loss"], history["num_samples"], weights))

    assert (tmp_path / "dead").exists()
    assert found[1] == found[0]
