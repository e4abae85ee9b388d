"""Rows that go through Spark have one order too, whoever shares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kindler import Checkpoints, Columns
from tests import exact

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

SCHEMA = "id long, x array<float>, y long"


@pytest.fixture
def frame(partitioned: Callable[..., Any]) -> Any:
    """A hundred rows in partitions of different sizes."""
    data = exact.problem(100)
    rows = [(int(i), x.tolist(), int(y)) for i, x, y in zip(data["id"], data["x"], data["y"], strict=True)]
    return partitioned([rows[:70], [], rows[70:75], rows[75:]], SCHEMA)


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_two_and_three_workers_train_the_same_weights(tmp_path: Path, frame: Any, shuffle: bool) -> None:
    exact.assert_one_two_and_three_workers_train_alike(
        frame, 100, tmp_path, shuffle=shuffle, columns=Columns(ingest="inline")
    )


def test_another_number_of_workers_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, frame: Any) -> None:
    options = {"epochs": 3, "batch_size": 20, "verbose": 0, **exact.COLUMNS}
    saved = {"checkpoint": Checkpoints(tmp_path, every=4), **options}
    whole = exact.estimator(workers=2)
    whole.fit(frame, **options)
    with pytest.raises(RuntimeError, match="the power is gone"):
        exact.estimator(workers=2).fit(frame, callbacks=[exact.Breaks(9, tmp_path, 8)], **saved)
    (tmp_path / "notes").mkdir()
    again = exact.estimator(workers=3)

    again.fit(frame, callbacks=[exact.Note(tmp_path / "notes")], resume=True, **saved)

    assert min(exact.steps(tmp_path / "notes")) == (2, 9)
    exact.assert_close(exact.weights(again), exact.weights(whole))


def test_batch_norm_of_two_workers_is_as_good_as_of_one_on_sorted_rows(spark: Any) -> None:
    data = exact.clusters(1200, "sorted")
    x, y = data["x"], data["y"]
    rows = [(row.tolist(), int(label)) for row, label in zip(x, y, strict=True)]
    frame = spark.createDataFrame(rows, "x array<float>, y long").coalesce(1)

    found = [
        exact.accuracy(frame, (x, y), workers, columns=Columns(ingest="inline"))[0] for workers in (1, 2)
    ]

    assert found[0] > 0.85
    assert found[1] > found[0] - 0.02
