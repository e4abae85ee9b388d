"""Any number of Spark workers computes what one process would, whatever the partitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator
from kindler.callbacks import Callback
from tests import exact
from tests.whole import WHOLE

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

SCHEMA = "id long, x array<float>, y long"
COLUMNS = {"feature_cols": ["id", "x"], "label_cols": "y"}
ROWS = 97


def rows_of(data: dict[str, Any]) -> list[tuple[int, list[float], int]]:
    return [(int(i), x.tolist(), int(y)) for i, x, y in zip(data["id"], data["x"], data["y"], strict=True)]


def uneven(rows: list[Any]) -> list[list[Any]]:
    return [rows[:3], rows[3:80], rows[80:81], rows[81:90], rows[90:]]


def one_empty(rows: list[Any]) -> list[list[Any]]:
    return [rows[:40], [], rows[40:]]


def single(rows: list[Any]) -> list[list[Any]]:
    return [rows]


def test_two_partitions_of_two_rows_move_the_weight_to_exactly_a_quarter(
    partitioned: Callable[..., Any],
) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    parts = [[([0.0], [0.0])] * 2, [([1.0], [0.0])] * 2]
    frame = partitioned(parts, "features array<float>, label array<float>")
    est = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), loss=nn.MSELoss(), workers=2
    )

    est.fit(frame, epochs=2, batch_size=4, verbose=0)

    assert est.get_model().weight.item() == 0.25


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        *((uneven, workers) for workers in (1, 2, 3)),
        *((one_empty, workers) for workers in (1, 2, 3) if workers == 3 or WHOLE),
        *((single, workers) for workers in (1, 2, 3) if workers == 2 or WHOLE),
    ],
)
def test_weights_rows_and_figures_equal_those_of_one_process(
    tmp_path: Path, partitioned: Callable[..., Any], workers: int, layout: Callable[..., list[list[Any]]]
) -> None:
    data = exact.problem(ROWS)
    frame = partitioned(layout(rows_of(data)), SCHEMA)
    est = exact.estimator(workers=workers)

    history = est.fit(frame, epochs=4, batch_size=20, callbacks=[exact.Note(tmp_path)], verbose=0, **COLUMNS)

    assert sum(history["steps"]) == 20
    exact.assert_each_row_once_per_epoch(tmp_path, ROWS, epochs=4)
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, data))
    figures = est.evaluate(frame, batch_size=16, verbose=0)
    assert figures == pytest.approx(exact.single_process_figures(est.get_model(), data), abs=1e-5)


def test_fewer_rows_than_workers_leave_some_idle_and_lose_none(
    tmp_path: Path, partitioned: Callable[..., Any]
) -> None:
    data = exact.problem(2)
    est = exact.estimator(workers=3)

    est.fit(
        partitioned([rows_of(data)], SCHEMA),
        epochs=10,
        batch_size=1,
        callbacks=[exact.Note(tmp_path)],
        verbose=0,
        **COLUMNS,
    )

    exact.assert_each_row_once_per_epoch(tmp_path, 2, epochs=10)
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, data))


def test_direct_and_inline_ingest_see_the_same_rows(tmp_path: Path, spark: Any) -> None:
    data = exact.problem(ROWS)
    table = pa.table({"id": data["id"], "x": list(data["x"]), "y": data["y"]})
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=10)
    frame = spark.read.parquet(str(tmp_path / "data.parquet"))

    for ingest in ("direct", "inline"):
        notes = tmp_path / ingest
        notes.mkdir()
        est = exact.estimator(workers=2)
        est.fit(
            frame,
            epochs=2,
            batch_size=20,
            callbacks=[exact.Note(notes)],
            columns=Columns(ingest=ingest),
            verbose=0,
            **COLUMNS,
        )
        exact.assert_each_row_once_per_epoch(notes, ROWS, epochs=2)
        exact.assert_same_weights(est.get_model(), exact.reference(notes, data))


def test_the_same_frame_twice_gives_bit_identical_weights(partitioned: Callable[..., Any]) -> None:
    frame = partitioned(uneven(rows_of(exact.problem(ROWS))), SCHEMA)

    def trained() -> list[torch.Tensor]:
        est = exact.estimator(workers=2, seed=5)
        est.fit(frame, epochs=2, batch_size=20, verbose=0, **COLUMNS)
        return [p.detach().clone() for p in est.get_model().parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(), trained(), strict=True))


def test_arrays_go_to_spark_workers_when_asked(tmp_path: Path, spark: Any) -> None:
    data = exact.problem(ROWS)
    est = exact.estimator(workers=2, engine="spark")

    est.fit(data, epochs=1, batch_size=20, callbacks=[exact.Note(tmp_path)], verbose=0, **COLUMNS)

    exact.assert_each_row_once_per_epoch(tmp_path, ROWS, epochs=1)
    exact.assert_same_weights(est.get_model(), exact.reference(tmp_path, data))


class Judges(exact.Noted):
    """Remembers the ids of the rows it is validated with, too."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[int] = []

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.judged += ids.tolist()
        return super().forward(ids, x)


class NoteJudged(Callback):
    """Writes each rank's validation rows of each epoch into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        with Path(self.folder, f"judged-{run.rank}.jsonl").open("a") as file:
            file.write(json.dumps([run.epoch, run.model.judged]) + "\n")
        run.model.judged = []


def judged(folder: Path) -> dict[int, list[int]]:
    """Epoch -> the ids that all ranks together were validated with."""
    found: dict[int, list[int]] = {}
    for file in folder.glob("judged-*.jsonl"):
        for line in file.read_text().splitlines():
            epoch, ids = json.loads(line)
            found[epoch] = sorted([*found.get(epoch, []), *ids])
    return found


def test_validation_split_holds_out_the_rows_that_random_split_draws(
    tmp_path: Path, partitioned: Callable[..., Any]
) -> None:
    frame = partitioned(uneven(rows_of(exact.problem(ROWS))), SCHEMA)
    training, held_out = frame.randomSplit([0.8, 0.2], seed=5)
    drawn = sorted(row.id for row in held_out.select("id").collect())
    trained = []

    def fit(name: str, data: Any, workers: int, **validation: Any) -> None:
        notes = tmp_path / name
        notes.mkdir()
        model = Judges()
        est = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            workers=workers,
            seed=5,
        )
        callbacks = [exact.Note(notes), NoteJudged(notes)]
        history = est.fit(
            data, epochs=2, batch_size=20, callbacks=callbacks, verbose=0, **COLUMNS, **validation
        )
        steps = {step: sorted(ids) for step, ids in exact.steps(notes).items()}
        for epoch in (1, 2):
            seen = sorted(i for (of, _), ids in steps.items() if of == epoch for i in ids)
            assert judged(notes)[epoch] == drawn
            assert not set(seen) & set(drawn)
            assert sorted([*seen, *drawn]) == list(range(ROWS))
        assert history["num_samples"] == [ROWS - len(drawn)] * 2
        trained.append((steps, exact.weights(est), history["loss"], history["val_loss"]))

    fit("by hand", training, 1, validation_data=held_out)
    fit("one worker", frame, 1, validation_split=0.2)
    fit("two workers", frame, 2, validation_split=0.2)

    assert 0 < len(drawn) < ROWS / 2
    by_hand, *others = trained
    for steps, weights, loss, val_loss in others:
        assert steps == by_hand[0]
        exact.assert_close(weights, by_hand[1])
        assert loss == pytest.approx(by_hand[2], abs=1e-5)
        assert val_loss == pytest.approx(by_hand[3], abs=1e-5)
