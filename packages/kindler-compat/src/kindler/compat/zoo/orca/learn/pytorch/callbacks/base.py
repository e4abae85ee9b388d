"""`Callback`: hooks that Orca's callbacks have, each called with a runner."""

from __future__ import annotations

from typing import Any

__all__ = ["Callback"]


class Callback:
    """Base class of Orca's callbacks; they run on every worker. See `runner.Runner` for their argument."""

    def before_run(self, runner: Any) -> None:
        """Before the first epoch."""

    def after_run(self, runner: Any) -> None:
        """After the last epoch."""

    def before_epoch(self, runner: Any) -> None:
        """Before each epoch of any kind."""

    def after_epoch(self, runner: Any) -> None:
        """After each epoch of any kind."""

    def before_iter(self, runner: Any) -> None:
        """Before each batch of any kind."""

    def after_iter(self, runner: Any) -> None:
        """After each batch of any kind."""

    def before_train_epoch(self, runner: Any) -> None:
        """Before each epoch of training."""
        self.before_epoch(runner)

    def after_train_epoch(self, runner: Any) -> None:
        """After each epoch of training and its validation; `runner.epoch_stats` has its figures."""
        self.after_epoch(runner)

    def before_val_epoch(self, runner: Any) -> None:
        """Before validation."""
        self.before_epoch(runner)

    def after_val_epoch(self, runner: Any) -> None:
        """After validation."""
        self.after_epoch(runner)

    def before_pred_epoch(self, runner: Any) -> None:
        """Never called: `predict` has no callbacks."""
        self.before_epoch(runner)

    def after_pred_epoch(self, runner: Any) -> None:
        """Never called."""
        self.after_epoch(runner)

    def before_train_iter(self, runner: Any) -> None:
        """Before each step."""
        self.before_iter(runner)

    def after_train_iter(self, runner: Any) -> None:
        """After each step."""
        self.after_iter(runner)

    def before_val_iter(self, runner: Any) -> None:
        """Before each batch of validation."""
        self.before_iter(runner)

    def after_val_iter(self, runner: Any) -> None:
        """After each batch of validation."""
        self.after_iter(runner)

    def before_pred_iter(self, runner: Any) -> None:
        """Never called."""
        self.before_iter(runner)

    def after_pred_iter(self, runner: Any) -> None:
        """Never called."""
        self.after_iter(runner)

    def every_n_epoch(self, runner: Any, n: int) -> bool:
        """Whether this is the n-th, 2n-th, ... epoch."""
        return n > 0 and runner.epochs % n == 0

    def every_n_iter(self, runner: Any, n: int) -> bool:
        """Whether this is the n-th, 2n-th, ... step."""
        return n > 0 and (runner.global_step + 1) % n == 0
