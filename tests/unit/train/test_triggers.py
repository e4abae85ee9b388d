"""The score of an epoch, by which functions may end a run."""

from __future__ import annotations

from kindler.train.triggers import Progress, end_of_epoch, score_of


def test_the_score_is_the_first_metric_of_validation_or_else_of_training() -> None:
    row = {"epoch": 1, "steps": 3, "num_samples": 9, "loss": 0.5, "f1": 0.8, "auc": 0.9, "seconds": 1.0}

    assert score_of(row) == 0.8
    assert score_of({**row, "val_loss": 0.4, "val_f1": 0.7, "val_num_samples": 3}) == 0.7
    assert score_of({"epoch": 1, "loss": 0.5, "val_loss": 0.1}) is None


def test_the_loss_and_the_score_are_known_at_the_end_of_an_epoch_only() -> None:
    ended = end_of_epoch(2, 8, {"epoch": 2, "loss": 0.5, "auc": 0.75})
    within = Progress(epoch=2, step=8)

    assert (ended.epoch, ended.step, ended.epoch_ended, ended.loss, ended.score) == (2, 8, True, 0.5, 0.75)
    assert (within.epoch_ended, within.loss, within.score) == (False, None, None)
