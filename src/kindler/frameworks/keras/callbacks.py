"""Wraps the user's callbacks in Keras's `fit`: figures are merged over workers, and files written once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kindler.frameworks.keras.metrics import plain

_WRITERS = (
    "ModelCheckpoint",
    "TensorBoard",
    "CSVLogger",
    "RemoteMonitor",
    "ProgbarLogger",
    "OrbaxCheckpoint",
)
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


def make_hooks(
    keras: Any, callbacks: Sequence[Any], *, model: Any, watch: Any, rank: int, size: int, **params: Any
) -> Any:
    """Tell `watch` (`train/fit_loop.py`) where Keras's loop is; epochs and steps count from 0, as in Keras.

    The first rank calls all callbacks, others those that do more than write or display.
    """
    writers = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
    callbacks = [callback for callback in callbacks if rank == 0 or not isinstance(callback, writers)]
    listens = any(_overrides(keras, callback, name) for callback in callbacks for name in _BATCH_HOOKS)

    class Hooks(keras.callbacks.CallbackList):  # type: ignore[misc]
        """`opens` and `closes` join several calls of `fit` into one run."""

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
            if watch.epoch_begins(epoch):
                super().on_epoch_begin(epoch, logs)
            watch.epoch_has_begun()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            watch.step_begins()
            if listens:
                super().on_train_batch_begin(batch + self.offset, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            watch.step_made(batch + self.offset + 1)
            if listens:
                super().on_train_batch_end(batch + self.offset, logs)
                watch.step_made(batch + self.offset + 1)  # they may draw random numbers
            if size > 1 and model.stop_training:
                self.asked, model.stop_training = True, False
            if watch.step_ends(batch + self.offset + 1, _Figures(logs or {})):
                model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hasattr(self, "_flush_futures"):
                self._flush_futures()
            figures = {name: plain(value) for name, value in (logs or {}).items()}
            ending = model.stop_training
            watch.epoch_ends(epoch, figures, self)
            super().on_epoch_end(epoch, figures)
            asked = self.asked or (model.stop_training and not ending)
            final = {name: plain(value) for name, value in figures.items()}  # callbacks may add to them
            model.stop_training = watch.epoch_over(epoch, final, asked) or ending
            self.offset = 0

    params.update(verbose=0, rank=rank, size=size)
    return Hooks(callbacks, add_history=True, add_progbar=False, model=model, **params)


class CallbackState:
    """Keeps a callback's counters, not its constructor arguments."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._given = set(inspect.signature(type(callback).__init__).parameters)

    def state_dict(self) -> dict[str, Any]:
        counted = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in vars(self._callback).items()
            if name not in self._given and _is_number(value)
        }
        return {"class": type(self._callback).__name__, "counted": counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["class"] == type(self._callback).__name__:
            vars(self._callback).update(state["counted"])


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or getattr(value, "shape", None) == ()


class _Pending:
    """A figure that is fetched from its device only by `float`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __float__(self) -> float:
        value = plain(self.value)
        return float(value) if isinstance(value, int | float) else 0.0  # a curve is not a loss


class _Figures(Mapping[str, Any]):
    """Logs as plain numbers, fetched from the device only on access."""

    def __init__(self, logs: Mapping[str, Any]) -> None:
        self._logs = logs

    def __getitem__(self, name: str) -> Any:
        return plain(self._logs[name])

    def later(self, name: str) -> _Pending:
        return _Pending(self._logs[name])

    @staticmethod
    def floats(figures: Sequence[_Pending]) -> list[float]:
        """Start all copies before waiting for the first."""
        for figure in figures:
            if hasattr(figure.value, "copy_to_host_async"):  # JAX
                figure.value.copy_to_host_async()
        return [float(figure) for figure in figures]

    def __contains__(self, name: object) -> bool:
        return name in self._logs  # that of Mapping would bring the figure

    def __iter__(self) -> Iterator[str]:
        return iter(self._logs)

    def __len__(self) -> int:
        return len(self._logs)


def _overrides(keras: Any, callback: Any, name: str) -> bool:
    own = getattr(type(callback), name, None)
    return name in vars(callback) or own is not getattr(keras.callbacks.Callback, name, None)
