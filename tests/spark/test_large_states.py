"""States that are too large for Spark's task results go out to workers and come back all the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from kindler import Estimator, RunSettings
from kindler.callbacks import Callback
from kindler.errors import ConfigError
from tests.listening import listeners, wildcards
from tests.whole import WHOLE, whole_only

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

ROWS = [(float(i), 2.0 * i) for i in range(8)]
LARGE = 320 if WHOLE else 160  # megabytes; a message of Spark's holds 128


def pattern(megabytes: int) -> torch.Tensor:
    return torch.arange(megabytes << 18, dtype=torch.int32).view(torch.float32)


class Wide(nn.Module):
    """A linear model beside a table that takes no part in training."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(pattern(megabytes), requires_grad=False)
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.view(-1, 1))


def wide(megabytes: int, rendezvous: Literal["driver", "workers"]) -> Estimator:
    return Estimator.from_torch(
        model=lambda config: Wide(megabytes),
        optimizer=lambda model, config: torch.optim.SGD(model.linear.parameters(), 0.01),
        loss=nn.MSELoss(),
        workers=2,
        settings=RunSettings(rendezvous=rendezvous),
    )


def fit(est: Estimator, frame: Any, **options: Any) -> list[int]:
    columns = {"feature_cols": "x", "label_cols": "y"}
    history = est.fit(frame, batch_size=8, verbose=0, **columns, **options)
    return [row["epoch"] for row in history]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, "x float, y float")


@whole_only
@pytest.mark.slow
def test_a_state_of_hundreds_of_megabytes_returns_and_goes_out_again(frame: Any) -> None:
    est = wide(LARGE, "driver")

    assert fit(est, frame) == [1]
    first = {name: value.clone() for name, value in est.get_model().linear.state_dict().items()}
    assert fit(est, frame) == [2]

    model = est.get_model()
    assert torch.equal(model.table.view(torch.int32), pattern(LARGE).view(torch.int32))
    assert not torch.equal(model.linear.weight, first["weight"])


@pytest.mark.slow
def test_workers_that_cannot_reach_the_driver_send_a_large_state_through_the_checkpoint_folder(
    frame: Any, tmp_path: Path
) -> None:
    est = wide(80, "workers")

    assert fit(est, frame, checkpoint=tmp_path) == [1]
    assert fit(est, frame, checkpoint=tmp_path) == [2]
    assert torch.equal(est.get_model().table.view(torch.int32), pattern(80).view(torch.int32))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("kindler-")] == []


def grown(model: Any) -> Estimator:
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam,
        loss=nn.MSELoss(),
        workers=2,
        settings=RunSettings(rendezvous="workers"),
    )


def one_wide_layer(config: Any) -> nn.Module:
    """36 MB, three times as much with what Adam keeps."""
    return nn.Sequential(nn.Linear(1, 3_000_000), nn.Linear(3_000_000, 1))


class NotTrained(Callback):
    def on_step_end(self, run: Any) -> None:
        raise AssertionError("a step was made")


@pytest.mark.parametrize("creates", [True, False], ids=["made by workers", "made by the driver"])
def test_without_a_shared_folder_a_state_that_could_not_return_is_refused_before_the_first_step(
    frame: Any, creates: bool
) -> None:
    est = grown(one_wide_layer if creates else one_wide_layer({}))
    with pytest.raises(ConfigError, match=r"will have 10\d,.* bytes.*can come back.*\nHint:.*checkpoint="):
        fit(est, frame, callbacks=[NotTrained()])


class Look(Callback):
    def __init__(self, root: int, path: Path) -> None:
        self.root, self.path = root, path

    def on_step_end(self, run: Any) -> None:
        if run.rank == 0:
            self.path.write_text(json.dumps(listeners(self.root)))


@pytest.mark.parametrize("rendezvous", ["driver", "workers"])
def test_no_process_of_a_run_listens_on_a_wildcard_address(
    frame: Any, tmp_path: Path, rendezvous: Literal["driver", "workers"]
) -> None:
    look = Look(os.getpid(), tmp_path / "seen")
    est = Estimator.from_torch(
        model=nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1)),
        optimizer=torch.optim.Adam,
        loss=nn.MSELoss(),
        workers=2,
        settings=RunSettings(rendezvous=rendezvous, shared_memory=False),
    )
    fit(est, frame, callbacks=[look])

    assert wildcards(json.loads((tmp_path / "seen").read_text())) == []
