"""What Keras's `fit` tells on its way: the user's callbacks, between what must happen before and after them.

A `CallbackList` of Keras's own kind stands around the user's callbacks, so that they see figures that are
already merged over all workers, and files are written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kindler.frameworks.keras.metrics import plain

__all__ = ["Watch", "make_hooks", "writes"]

_WRITERS = (
    "ModelCheckpoint",
    "TensorBoard",
    "CSVLogger",
    "RemoteMonitor",
    "ProgbarLogger",
    "OrbaxCheckpoint",
)
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class Watch(Protocol):
    """Who is told how training goes; epochs and steps are counted as Keras counts them."""

    def train_begins(self) -> None:
        """After the callbacks of that name."""

    def epoch_begins(self, epoch: int) -> None:
        """Before the callbacks of that name."""

    def step_begins(self) -> None:
        """Before the callbacks of that name."""

    def step_ends(self, steps: int, logs: Any) -> bool:
        """After so many steps of this epoch; whether to end the run here, which all ranks decide alike."""

    def epoch_ends(self, epoch: int, logs: dict[str, Any], hooks: Any) -> None:
        """Before the user's callbacks: make `logs` those of all ranks, validation included."""

    def epoch_over(self, epoch: int, logs: dict[str, Any], asked_to_stop: bool) -> bool:
        """After the user's callbacks; whether the run ends, on all ranks."""


def writes(keras: Any, callback: Any) -> bool:
    """Whether this callback of Keras's own only writes or shows: one rank does that for all."""
    kinds = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
    return isinstance(callback, kinds)


def make_hooks(
    keras: Any, callbacks: Sequence[Any], *, model: Any, watch: Watch, several: bool, **params: Any
) -> Any:
    """The list of callbacks to hand to `fit`.

    Args:
        keras: Keras 3, or tf_keras.
        callbacks: The user's, as far as they run on this rank.
        model: The model.
        watch: Who is told.
        several: Whether there are other ranks, so that a stop must wait until all can agree.
        params: What callbacks find in `params`.
    """
    listens = any(_overrides(keras, callback, name) for callback in callbacks for name in _BATCH_HOOKS)

    class Hooks(keras.callbacks.CallbackList):  # type: ignore[misc]
        """Around the user's callbacks; `opens` and `closes` join several calls of `fit` to one run."""

        opens = closes = True
        offset = 0
        asked = False

        def on_train_begin(self, logs: Any = None) -> None:
            if self.opens:
                super().on_train_begin(logs)
                watch.train_begins()

        def on_train_end(self, logs: Any = None) -> None:
            if self.closes:
                super().on_train_end(logs)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            watch.epoch_begins(epoch)
            super().on_epoch_begin(epoch, logs)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            watch.step_begins()
            if listens:
                super().on_train_batch_begin(batch + self.offset, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if listens:
                super().on_train_batch_end(batch + self.offset, logs)
            if several and model.stop_training:
                self.asked, model.stop_training = True, False
            if watch.step_ends(batch + self.offset + 1, logs):
                model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hasattr(self, "_flush_futures"):
                self._flush_futures()
            figures = {name: plain(value) for name, value in (logs or {}).items()}
            ending = model.stop_training
            watch.epoch_ends(epoch, figures, self)
            super().on_epoch_end(epoch, figures)
            asked = self.asked or (model.stop_training and not ending)
            model.stop_training = watch.epoch_over(epoch, figures, asked) or ending
            self.offset = 0

    return Hooks(list(callbacks), add_history=True, add_progbar=False, model=model, **params)


def _overrides(keras: Any, callback: Any, name: str) -> bool:
    own = getattr(type(callback), name, None)
    return name in vars(callback) or own is not getattr(keras.callbacks.Callback, name, None)
