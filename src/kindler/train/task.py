"""What a worker needs to know of a run: built on the driver, pickled once, closed over nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kindler.config import RunSettings
from kindler.data.sources import Source

__all__ = ["Task"]


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
        seed: Decides initial weights, order and dropout.
        device: "auto", "cpu", "cuda" or "cuda:N".
        callbacks: Hooks of the user's.
        model_dir: Where a checkpoint is written after each epoch.
        show: Whether anybody looks at the progress within an epoch.
        settings: Time limits, threads.
    """

    framework: str
    data: Source
    validation: Source | None = None
    batch_size: int
    epochs: int = 0
    max_steps: int | None = None
    shuffle: bool = True
    seed: int = 0
    device: str = "auto"
    callbacks: tuple[Any, ...] = ()
    model_dir: str | None = None
    show: bool = True
    settings: RunSettings = field(default_factory=RunSettings)
