"""Wraps the user's callbacks in Keras's `fit`: figures are merged over workers, and files written once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

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


class Watch(Protocol):
    """Follows Keras's loop; epochs and steps count from 0, as in Keras."""

    def train_begins(self) -> None: ...

    def epoch_begins(self, epoch: int) -> None: ...

    def step_begins(self) -> None: ...

    def step_ends(self, steps: int, logs: Any) -> bool:
        """Called after each step; True ends the run here, and all ranks decide alike.

        `logs` is a mapping whose `later(name)` defers fetching a metric from its device until `float`.
        """

    def epoch_ends(self, epoch: int, logs: dict[str, Any], hooks: Any) -> None:
        """Called before the user's callbacks: make `logs` those of all ranks, validation included."""

    def epoch_over(self, epoch: int, logs: dict[str, Any], asked_to_stop: bool) -> bool:
        """Called after the user's callbacks; True ends the run on all ranks."""


def writes(keras: Any, callback: Any) -> bool:
    """One rank does for all what only writes or displays."""
    kinds = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
    return isinstance(callback, kinds)


def make_hooks(
    keras: Any, callbacks: Sequence[Any], *, model: Any, watch: Watch, several: bool, **params: Any
) -> Any:
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
            told = {name: plain(value) for name, value in figures.items()}  # callbacks may add to them
            model.stop_training = watch.epoch_over(epoch, told, asked) or ending
            self.offset = 0

    return Hooks(list(callbacks), add_history=True, add_progbar=False, model=model, **params)


class Remembering:
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


class Later:
    def __init__(self, value: Any) -> None:
        self._value = value

    def set_out(self) -> None:
        if hasattr(self._value, "copy_to_host_async"):  # JAX
            self._value.copy_to_host_async()

    def __float__(self) -> float:
        value = plain(self._value)
        return float(value) if isinstance(value, int | float) else 0.0  # a curve is no loss


class _Figures(Mapping[str, Any]):
    """Logs as plain numbers, fetched from the device only on access."""

    def __init__(self, logs: Mapping[str, Any]) -> None:
        self._logs = logs

    def __getitem__(self, name: str) -> Any:
        return plain(self._logs[name])

    def later(self, name: str) -> Later:
        return Later(self._logs[name])

    @staticmethod
    def floats(figures: Sequence[Later]) -> list[float]:
        """Start all copies before waiting for the first."""
        for figure in figures:
            figure.set_out()
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
