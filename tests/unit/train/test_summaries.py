"""Figures over steps: merged exactly over workers, kept over several fits, found by Orca's names too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kindler.errors import ConfigError, NotFittedError
from kindler.train.summaries import EventFiles, Summaries, log_folder
from tests.events import scalars


def row(epoch: int, **figures: Any) -> dict[str, Any]:
    return {"epoch": epoch, "steps": 2, "num_samples": 8, "seconds": 1.0, "rows_per_s": 8.0, **figures}


def told(summaries: Summaries, part: str, tag: str) -> list[list[float]]:
    """(step, value) of a series."""
    points: list[list[float]] = summaries.series(part, tag)[:, :2].tolist()
    return points


def summaries_of(*reports: dict[str, Any]) -> Summaries:
    made = Summaries(clock=lambda: 7.0)
    for fields in reports:
        made.report(fields)
    return made


def steps(rank: int, first: int, loss: list[float], rows: list[float], lr: list[float]) -> dict[str, Any]:
    return {"name": "steps", "rank": rank, "first": first, "loss": loss, "rows": rows, "lr": lr}


def test_a_step_is_the_mean_over_the_rows_of_all_ranks_once_all_have_told() -> None:
    made = summaries_of({"name": "gang", "workers": 2}, steps(0, 1, [1.0, 2.0], [3, 1], [0.1, 0.2]))
    with pytest.raises(NotFittedError):
        made.series("train", "batch_loss")
    made.report(steps(1, 1, [5.0], [1], [0.1]))
    assert told(made, "train", "batch_loss") == [[1.0, 2.0]]
    made.report(steps(1, 2, [math.nan], [0], [0.2]))
    assert told(made, "train", "batch_loss") == [[1.0, 2.0], [2.0, 2.0]]
    assert told(made, "train", "lr") == [[1.0, 0.1], [2.0, 0.2]]


def test_the_end_of_an_epoch_completes_its_steps() -> None:
    made = summaries_of(
        steps(0, 1, [1.0, 2.0, 9.0], [1, 1, 1], []), {"name": "epoch", "step": 2, "row": row(1, loss=0.5)}
    )

    assert told(made, "train", "batch_loss") == [[1.0, 1.0], [2.0, 2.0]]


def test_steps_that_a_replaced_worker_did_not_report_are_left_out_and_take_nothing_back() -> None:
    made = summaries_of(
        {"name": "gang", "workers": 2},
        steps(0, 1, [1.0, 2.0, 3.0], [1, 1, 1], []),
        steps(1, 1, [1.0], [1], []),
        steps(1, 3, [3.0], [1], []),
        {"name": "epoch", "step": 3, "row": row(1, loss=0.5)},
        {"name": "epoch", "step": 6, "row": row(2, loss=0.5)},
    )

    assert told(made, "train", "batch_loss") == [[1.0, 1.0], [3.0, 3.0]]


def test_a_new_gang_forgets_what_the_last_one_left_unfinished() -> None:
    made = summaries_of(
        {"name": "gang", "workers": 2},
        steps(0, 1, [100.0], [1], [0.1]),
        {"name": "gang", "workers": 1},
        steps(0, 1, [1.0], [1], [0.1]),
    )

    assert told(made, "train", "batch_loss") == [[1.0, 1.0]]


def test_epochs_are_told_at_their_last_step_with_the_time() -> None:
    made = summaries_of(
        {"name": "epoch", "step": 2, "row": row(1, loss=0.5, val_loss=0.75, val_num_samples=4)},
        {"name": "epoch", "step": 4, "row": row(2, loss=0.25)},
        {"name": "progress", "step": 1},
    )

    assert made.series("train", "loss").tolist() == [[2.0, 0.5, 7.0], [4.0, 0.25, 7.0]]
    assert told(made, "validation", "loss") == told(made, "validation", "val_loss") == [[2.0, 0.75]]


def test_orcas_names_and_any_case_are_understood() -> None:
    made = summaries_of(
        {"name": "epoch", "step": 2, "row": row(1, loss=0.5, lr=0.1, accuracy=0.9, val_my_f1=0.5)}
    )

    assert told(made, "train", "Loss") == [[2.0, 0.5]]
    assert told(made, "train", "LearningRate") == [[2.0, 0.1]]
    assert told(made, "train", "Throughput") == [[2.0, 8.0]]
    assert told(made, "train", "Top1Accuracy") == told(made, "train", "ACCURACY") == [[2.0, 0.9]]
    assert told(made, "validation", "MyF1") == [[2.0, 0.5]]


def test_orcas_loss_is_that_of_every_step_where_steps_are_told() -> None:
    made = summaries_of(
        {"name": "gang", "workers": 1},
        {"name": "steps", "rank": 0, "first": 1, "loss": [0.75, 0.25], "rows": [4, 4], "lr": [0.1, 0.05]},
        {"name": "epoch", "step": 2, "row": row(1, loss=0.5, lr=0.1)},
    )

    assert told(made, "train", "Loss") == [[1.0, 0.75], [2.0, 0.25]]
    assert told(made, "train", "loss") == [[2.0, 0.5]]
    assert told(made, "train", "lr") == [[1.0, 0.1], [2.0, 0.05]]


def test_an_unknown_tag_is_answered_with_those_there_are() -> None:
    made = summaries_of({"name": "epoch", "step": 2, "row": row(1, loss=0.5)})

    with pytest.raises(ConfigError, match=r"no train summary 'auc'; available: \['loss', 'rows_per_s'\]"):
        made.series("train", "auc")
    with pytest.raises(ConfigError, match=r"validation_data"):
        made.series("validation", "loss")
    with pytest.raises(NotFittedError, match=r"call fit\(\) first"):
        Summaries().series("train", "loss")


def test_training_that_went_back_replaces_what_came_after() -> None:
    made = summaries_of(
        *({"name": "epoch", "step": 2 * e, "row": row(e, loss=1 / e, val_loss=1.0)} for e in (1, 2, 3)),
        {"name": "epoch", "step": 4, "row": row(2, loss=0.4)},
    )

    assert told(made, "train", "loss") == [[2.0, 1.0], [4.0, 0.4]]
    assert told(made, "validation", "loss") == [[2.0, 1.0]]


def test_what_no_report_told_is_taken_from_the_history() -> None:
    made = Summaries()
    with made.writing(None):
        made.report({"name": "epoch", "step": 2, "row": row(1, loss=0.5)})
        made.finish([row(1, loss=0.5), row(2, loss=0.25)])

    assert told(made, "train", "loss") == [[2.0, 0.5], [4.0, 0.25]]


def test_tensorboard_reads_what_was_written_over_several_fits(tmp_path: Path) -> None:
    made = Summaries()
    for epoch in (1, 2):
        with EventFiles(tmp_path) as sink, made.writing(sink):
            made.report({"name": "gang", "workers": 1})
            fields = {"first": 2 * epoch - 1, "loss": [0.75, 0.25], "rows": [4, 4], "lr": [0.5, 0.25]}
            made.report({"name": "steps", "rank": 0, **fields})
            made.report({"name": "epoch", "step": 2 * epoch, "row": row(epoch, loss=0.5, val_loss=2.0)})

    assert scalars(tmp_path / "train") == {
        "batch_loss": [(1, 0.75), (2, 0.25), (3, 0.75), (4, 0.25)],
        "lr": [(1, 0.5), (2, 0.25), (3, 0.5), (4, 0.25)],
        "loss": [(2, 0.5), (4, 0.5)],
        "rows_per_s": [(2, 8.0), (4, 8.0)],
    }
    assert scalars(tmp_path / "validation") == {"loss": [(2, 2.0), (4, 2.0)]}


def test_tensorboard_forgets_steps_that_training_went_back_behind(tmp_path: Path) -> None:
    made = Summaries()
    with EventFiles(tmp_path) as sink, made.writing(sink):
        for epoch in (1, 2, 3):
            made.report({"name": "epoch", "step": epoch, "row": row(epoch, loss=float(epoch), val_loss=1.0)})
    with EventFiles(tmp_path) as sink, made.writing(sink):
        made.report({"name": "epoch", "step": 2, "row": row(2, loss=0.5)})

    assert scalars(tmp_path / "train")["loss"] == [(1, 1.0), (2, 0.5)]
    assert scalars(tmp_path / "validation")["loss"] == [(1, 1.0)]


def test_what_was_written_before_an_error_is_there(tmp_path: Path) -> None:
    def interrupted() -> None:
        made = Summaries()
        with EventFiles(tmp_path) as sink, made.writing(sink):
            made.report({"name": "epoch", "step": 1, "row": row(1, loss=0.5)})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert scalars(tmp_path / "train")["loss"] == [(1, 0.5)]


def test_a_folder_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/logs"):
        log_folder("s3://bucket/logs")
