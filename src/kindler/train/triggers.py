"""What functions that end a run, or write its checkpoints, decide by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kindler.train.metric_names import BOOKKEEPING

_NO_SCORES = BOOKKEEPING | {"loss", "lr"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training has come; the same on all workers.

    Attributes:
        epoch: The current epoch, counted from 1 since the model was created.
        step: Optimizer steps since the model was created.
        epoch_ended: True at the end of an epoch, False after a step within one.
        loss: The epoch's training loss over all workers; None within an epoch.
        score: The first validation metric, or the first training metric without validation; None within an
            epoch.
    """

    epoch: int
    step: int
    epoch_ended: bool = False
    loss: float | None = None
    score: float | None = None


Trigger: TypeAlias = Callable[[Progress], bool]


def end_of_epoch(epoch: int, step: int, row: Mapping[str, Any]) -> Progress:
    return Progress(epoch=epoch, step=step, epoch_ended=True, loss=row.get("loss"), score=score_of(row))


def score_of(row: Mapping[str, Any]) -> float | None:
    """The score of an epoch, from its row of the history.

    >>> score_of({"epoch": 1, "loss": 0.5, "accuracy": 0.8, "val_loss": 0.6, "val_accuracy": 0.7})
    0.7
    """
    numbers = [name for name, value in row.items() if isinstance(value, int | float)]  # the others are curves
    metrics = [name for name in numbers if name.removeprefix("val_") not in _NO_SCORES]
    judged = [name for name in metrics if name.startswith("val_")]
    return next((float(row[name]) for name in (*judged, *metrics)), None)
