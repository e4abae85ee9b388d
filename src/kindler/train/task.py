"""What a worker needs to know of a run: built on the driver, pickled once, closed over nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kindler.config import RunSettings
from kindler.data.row_order import Dealing
from kindler.data.sources import Source
from kindler.sync.contract import SyncConfig
from kindler.train.loader_source import StreamSource
from kindler.train.triggers import Trigger

__all__ = ["ENDLESS", "Task"]

ENDLESS = 2**31  # epochs, where only a trigger ends the run


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run.

    Attributes:
        framework: The framework's name in the registry.
        data: The rows to train on, or to evaluate.
        validation: Rows to evaluate after each epoch.
        batch_size: Rows per step over all workers.
        epochs: How many epochs to train; 0 evaluates `data` instead.
        max_steps: Optimizer steps after which training ends, whatever the epochs say.
        shuffle: Whether rows are reordered each epoch.
        dealing: How rows are dealt to workers; None is as for a run that begins with these workers.
        seed: Decides initial weights, order and dropout.
        device: "auto", "cpu", "cuda" or "cuda:N".
        callbacks: Hooks of the user's.
        model_dir: The folder of checkpoints.
        run_id: The run's name in its checkpoints.
        checkpoint_trigger: When a checkpoint is written; None is after each epoch.
        keep_checkpoints: How many of the newest are kept.
        best_metric: The figure whose best epoch is kept too.
        end_trigger: Ends the run before its epochs do.
        steps_per_epoch: Steps of an epoch; None is one pass over the rows.
        initial_epoch: Where to count epochs from; None goes on counting.
        validation_freq: Validate after every so many epochs, or after those of these numbers.
        class_weight: Weights of rows by their label (Keras).
        weighted: Whether the last label column is a weight per row (Keras).
        log_steps: Whether every worker tells the loss of every step.
        show: Whether anybody looks at the progress within an epoch.
        settings: Time limits, threads.
        sync: How workers agree.
    """

    framework: str
    data: Source | StreamSource
    validation: Source | StreamSource | None = None
    batch_size: int
    epochs: int = 0
    max_steps: int | None = None
    shuffle: bool = True
    dealing: Dealing | None = None
    seed: int = 0
    device: str = "auto"
    callbacks: tuple[Any, ...] = ()
    model_dir: str | None = None
    run_id: str = ""
    checkpoint_trigger: Trigger | None = None
    keep_checkpoints: int | None = 3
    best_metric: str | None = None
    end_trigger: Trigger | None = None
    steps_per_epoch: int | None = None
    initial_epoch: int | None = None
    validation_freq: int | tuple[int, ...] = 1
    class_weight: dict[int, float] | None = None
    weighted: bool = False
    log_steps: bool = False
    show: bool = True
    settings: RunSettings = field(default_factory=RunSettings)
    sync: SyncConfig = field(default_factory=SyncConfig)

    def validates(self, epoch: int) -> bool:
        """Whether the validation data is judged after this epoch."""
        freq = self.validation_freq
        return epoch % freq == 0 if isinstance(freq, int) else epoch in freq
