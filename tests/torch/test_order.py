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

from kindler import Callback, Estimator, SeveralIteration
from kindler.errors import ConfigError, DataError
from tests import exact

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

COLUMNS = {"feature_cols": ["id", "x"], "label_cols": "y"}


def stored(data: dict[str, np.ndarray], path: Path, **options: Any) -> str:
    table = pa.table({name: list(values) if values.ndim > 1 else values for name, values in data.items()})
    pq.write_table(table, path, **options)
    return str(path)


def weights(est: Estimator) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in est.get_model().parameters()]


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["arrays", "parquet"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_two_and_three_workers_train_the_same_weights(tmp_path: Path, kind: str, shuffle: bool) -> None:
    data: Any = exact.problem(97)
    given = stored(data, tmp_path / "rows.parquet", row_group_size=10) if kind == "parquet" else data
    trained = []
    for workers in (1, 2, 3):
        notes = tmp_path / str(workers)
        notes.mkdir()
        est = exact.estimator(workers=workers, seed=4)
        est.fit(
            given,
            epochs=2,
            batch_size=20,
            shuffle=shuffle,
            callbacks=[exact.Note(notes)],
            verbose=0,
            **COLUMNS,
        )
        trained.append((weights(est), {step: sorted(ids) for step, ids in exact.steps(notes).items()}))

    assert_close(trained[1][0], trained[0][0])
    assert_close(trained[2][0], trained[0][0])
    assert trained[0][1] == trained[1][1] == trained[2][1]
    if not shuffle:
        ids = [i for (epoch, _), batch in trained[0][1].items() if epoch == 1 for i in batch]
        assert ids == list(range(97)), "consecutive rows"


class Breaks(Callback):
    """Raises after a step, once the checkpoint of an earlier one is written."""

    def __init__(self, step: int, folder: Path, kept: int) -> None:
        self.step, self.folder, self.kept = step, str(folder), kept

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step and run.rank == 1:
            exact.await_file(Path(self.folder), f"checkpoint-*-step-{self.kept:09d}.kindler")
            raise RuntimeError("the power is gone")


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[np.ndarray], list[float]]:
    est = exact.estimator(workers=2)
    history = est.fit(exact.problem(100), epochs=3, batch_size=20, verbose=0, **COLUMNS)
    return weights(est), history["loss"]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("kept", "trigger"), [(5, None), (8, SeveralIteration(4))], ids=["end", "middle"])
def test_another_number_of_workers_goes_on_to_the_same_weights(
    tmp_path: Path, uninterrupted: Any, workers: int, kept: int, trigger: Any
) -> None:
    """From the end of epoch 1, and from step 3 of epoch 2, of a run that two workers began."""
    options = {"epochs": 3, "batch_size": 20, "checkpoint_trigger": trigger, "verbose": 0, **COLUMNS}
    with pytest.raises(RuntimeError, match="the power is gone"):
        exact.estimator(workers=2, model_dir=tmp_path).fit(
            exact.problem(100), callbacks=[Breaks(kept + 1, tmp_path, kept)], **options
        )
    notes = tmp_path / "notes"
    notes.mkdir()
    again = exact.estimator(workers=workers, model_dir=tmp_path)

    history = again.fit(exact.problem(100), callbacks=[exact.Note(notes)], resume=True, **options)

    assert min(exact.steps(notes)) == (2, kept + 1)
    assert_close(weights(again), uninterrupted[0])
    assert history["loss"] == pytest.approx(uninterrupted[1], abs=1e-5), (
        "tallies of the part before count once"
    )
    assert history["num_samples"] == [100] * 3


ROWS = 1200


def clusters(order: str) -> dict[str, np.ndarray]:
    """Three classes around centres of their own, sorted by class or in turns."""
    random = np.random.default_rng(5)
    y = np.sort(np.arange(ROWS) % 3) if order == "sorted" else np.arange(ROWS) % 3
    x = random.normal(size=(3, 6))[y] * 1.2 + random.normal(size=(ROWS, 6))
    return {"x": x.astype(np.float32), "y": y}


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def accuracy(data: Any, validation: Any, workers: int) -> tuple[float, nn.Module]:
    est = Estimator.from_torch(
        model=normalised,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        workers=workers,
    )
    history = est.fit(data, epochs=3, batch_size=48, validation_data=validation, verbose=0)
    return history["val_accuracy"][-1], est.get_model()


@pytest.mark.parametrize(
    ("order", "kind"), [("sorted", "arrays"), ("sorted", "parquet"), ("in turns", "arrays")]
)
def test_batch_norm_of_two_workers_is_as_good_as_of_one_however_rows_are_sorted(
    tmp_path: Path, order: str, kind: str
) -> None:
    rows = clusters(order)
    data = stored(rows, tmp_path / "rows.parquet", row_group_size=100) if kind == "parquet" else rows

    one, _ = accuracy(data, rows, 1)
    two, model = accuracy(data, rows, 2)

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
        estimator(2).fit(clusters("sorted"), callbacks=[Started(tmp_path)], verbose=0)
    assert list(tmp_path.iterdir()) == []
    assert len(estimator(1).fit(clusters("sorted"), batch_size=100, verbose=0)) == 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_label_of_no_class_is_named_by_its_row_in_the_data(shuffle: bool) -> None:
    x, y = np.zeros((200, 4), np.float32), np.zeros(200, np.float32)
    y[137] = 0.5
    est = Estimator.from_torch(
        model=nn.Linear(4, 2), optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss(), workers=2
    )

    with pytest.raises(DataError, match=r"column 'y', row 137\b.*0\.5"):
        est.fit((x, y), batch_size=20, shuffle=shuffle, verbose=0)
