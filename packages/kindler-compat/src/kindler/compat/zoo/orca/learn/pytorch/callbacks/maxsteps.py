"""`MaxstepsCallback`."""

from __future__ import annotations

from typing import Any

from kindler.compat.zoo.orca.learn.pytorch.callbacks.base import Callback

__all__ = ["MaxstepsCallback"]


class MaxstepsCallback(Callback):
    """Ends training after the epoch in which so many steps are made; `fit(max_steps=...)` ends it there."""

    def __init__(self, max_step: int) -> None:
        self.max_step = max_step

    def after_train_iter(self, runner: Any) -> None:
        """Stop when it is time."""
        if runner.global_step >= self.max_step:
            runner.stop = True
