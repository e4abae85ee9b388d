"""The order of rows is the run's: however many workers there are, and however the rows are sorted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from kindler import Checkpoints, Estimator
from kindler.callbacks import Callback
from kindler.errors import ConfigError, DataError
from tests import exact

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROWS = 1200


def stored(data: dict[str, np.ndarray], path: Path, **options: Any) -> str:
    table = pa.table({name: list(values) if values.ndim > 1 else values for name, values in data.items()})
    pq.write_table(table, path, **options)
    return str(path)


@pytest.mark.parametrize("kind", ["arrays", "parquet"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_two_and_three_workers_train_the_same_weights(tmp_path: Path, kind: str, shuffle: bool) -> None:
    data: Any = exact.problem(97)
    given = stored(data, tmp_path / "rows.parquet", row_group_size=10) if kind == "parquet" else data

    exact.assert_one_two_and_three_workers_train_alike(given, 97, tmp_path, shuffle=shuffle)


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[np.ndarray], list[float]]:
    est = exact.estimator(workers=2)
    history = est.fit(exact.problem(100), epochs=3, batch_size=20, verbose=0, **exact.COLUMNS)
    return exact.weights(est), history["loss"]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("kept", "every"), [(5, None), (8, 4)], ids=["end", "middle"])
def test_another_number_of_workers_goes_on_to_the_same_weights(
    tmp_path: Path, uninterrupted: Any, workers: int, kept: int, every: int | None
) -> None:
    """From the end of epoch 1, and from step 3 of epoch 2, of a run that two workers began."""
    checkpoint = Checkpoints(tmp_path, every=every)
    options = {"epochs": 3, "batch_size": 20, "checkpoint": checkpoint, "verbose": 0, **exact.COLUMNS}
    with pytest.raises(RuntimeError, match="the power is gone"):
        exact.estimator(workers=2).fit(
            exact.problem(100), callbacks=[exact.Breaks(kept + 1, tmp_path, kept)], **options
        )
    notes = tmp_path / "notes"
    notes.mkdir()
    again = exact.estimator(workers=workers)

    history = again.fit(exact.problem(100), callbacks=[exact.Note(notes)], resume=True, **options)

    assert min(exact.steps(notes)) == (2, kept + 1)
    exact.assert_close(exact.weights(again), uninterrupted[0])
    assert history["loss"] == pytest.approx(uninterrupted[1], abs=1e-5), (
        "tallies of the part before count once"
    )
    assert history["num_samples"] == [100] * 3


@pytest.mark.parametrize(
    ("order", "kind"), [("sorted", "arrays"), ("sorted", "parquet"), ("in turns", "arrays")]
)
def test_batch_norm_of_two_workers_is_as_good_as_of_one_however_rows_are_sorted(
    tmp_path: Path, order: str, kind: str
) -> None:
    rows = exact.clusters(ROWS, order)
    data = stored(rows, tmp_path / "rows.parquet", row_group_size=100) if kind == "parquet" else rows

    one, _ = exact.accuracy(data, rows, 1)
    two, model = exact.accuracy(data, rows, 2)

    assert one > 0.85
    assert two > one - 0.02
    hidden: Any = model[0](torch.from_numpy(rows["x"])).detach()  # type: ignore[index]
    spread = hidden.var(0) / model[1].running_var  # type: ignore[index]
    assert 0.7 < spread.min() < spread.max() < 1.4, "what the layer expects is what all rows have"


class Started(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_run_begin(self, run: Any) -> None:
        Path(self.folder, f"rank-{run.rank}").touch()


def synchronised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 3))


@pytest.mark.parametrize("model", [synchronised, synchronised()], ids=["creator", "instance"])
def test_synchronised_batch_norm_is_refused_for_several_workers_and_trains_with_one(
    tmp_path: Path, model: Any
) -> None:
    def estimator(workers: int) -> Estimator:
        optimizer = lambda module: torch.optim.SGD(module.parameters(), lr=0.1)  # noqa: E731
        return Estimator.from_torch(
            model=model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), workers=workers
        )

    with pytest.raises(ConfigError, match=r"SyncBatchNorm \('1'\)(?s:.*)Hint: use BatchNorm.*or workers=1"):
        estimator(2).fit(exact.clusters(ROWS, "sorted"), callbacks=[Started(tmp_path)], verbose=0)
    assert list(tmp_path.iterdir()) == []
    assert len(estimator(1).fit(exact.clusters(ROWS, "sorted"), batch_size=100, verbose=0)) == 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_label_of_no_class_is_named_by_its_row_in_the_data(shuffle: bool) -> None:
    x, y = np.zeros((200, 4), np.float32), np.zeros(200, np.float32)
    y[137] = 0.5
    est = Estimator.from_torch(
        model=nn.Linear(4, 2), optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss(), workers=2
    )

    with pytest.raises(DataError, match=r"column 'y', row 137\b.*0\.5"):
        est.fit((x, y), batch_size=20, shuffle=shuffle, verbose=0)
