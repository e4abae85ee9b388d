"""Models that stay loaded in a process, for whoever scores with them next.

Each is loaded once, also where several threads want it at the same time. The few that were used last stay,
and none for longer than some minutes without use. Whoever still scores with a model that was let go keeps it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["LoadedModels"]

_Model = TypeVar("_Model")
_MOST = 4
_IDLE_S = 300.0


class LoadedModels(Generic[_Model]):
    """Models by their keys.

    Args:
        most: How many stay.
        idle_s: Seconds without use after which one is let go.
        now: The clock.
    """

    def __init__(
        self, most: int = _MOST, idle_s: float = _IDLE_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._idle_s, self._now = most, idle_s, now
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a lock may be held, and threads are gone

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}
        self._models: OrderedDict[str, tuple[_Model, float]] = OrderedDict()
        self._sweeper: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._models)

    def get(self, key: str, load: Callable[[], _Model]) -> _Model:
        """The model of this key, which `load` makes if there is none."""
        with self._lock:
            if (found := self._used(key)) is not None:
                return found
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                if (found := self._used(key)) is not None:  # another thread has loaded it meanwhile
                    return found
            try:
                model = load()
            finally:
                with self._lock:
                    self._loading.pop(key, None)
            with self._lock:
                self._models[key] = model, self._now()
                while len(self._models) > self._most:
                    self._models.popitem(last=False)
                self._watch()
        return model

    def drop_idle(self) -> None:
        """Let go of models that nobody has asked for in a while."""
        with self._lock:
            for key, (_, used) in list(self._models.items()):
                if self._now() - used >= self._idle_s:
                    del self._models[key]

    def _used(self, key: str) -> _Model | None:
        if key not in self._models:
            return None
        model, _ = self._models.pop(key)
        self._models[key] = model, self._now()
        return model

    def _watch(self) -> None:
        if self._sweeper is None:
            self._sweeper = threading.Thread(target=self._sweep, name="kindler-models", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        while True:
            time.sleep(self._idle_s / 5)
            self.drop_idle()
            with self._lock:
                if not self._models:
                    self._sweeper = None
                    return
