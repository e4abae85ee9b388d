"""Models that stay loaded in a process. Each is loaded once, even if several threads want it at the same
time. The few that were used last stay, and go when another is asked for minutes later. Whoever still
scores with a dropped model keeps it."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

_Model = TypeVar("_Model")
_MOST = 4
_IDLE_S = 300.0


@dataclass
class _Kept(Generic[_Model]):
    model: _Model
    content: str | None
    used: float


class LoadedModels(Generic[_Model]):
    """Keeps the `most` recently used models, each for `idle_s` seconds without use."""

    def __init__(
        self, most: int = _MOST, idle_s: float = _IDLE_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._idle_s, self._now = most, idle_s, now
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # another thread may have held a lock

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}
        self._models: OrderedDict[str, _Kept[_Model]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._models)

    def get(self, key: str, load: Callable[[], _Model], *, content: str | None = None) -> _Model:
        """`content` is what `forget` finds the model by."""
        with self._lock:
            self._drop_idle()
            if (kept := self._used(key)) is not None:
                return kept.model
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                if (kept := self._used(key)) is not None:  # another thread has loaded it meanwhile
                    return kept.model
            try:
                model = load()
                with self._lock:
                    self._models[key] = _Kept(model, content, self._now())
                    while len(self._models) > self._most:
                        self._models.popitem(last=False)
            finally:
                with self._lock:
                    self._loading.pop(key, None)
        return model

    def forget(self, content: str) -> None:
        with self._lock:
            for key in [key for key, kept in self._models.items() if kept.content == content]:
                del self._models[key]

    def _used(self, key: str) -> _Kept[_Model] | None:
        kept = self._models.get(key)
        if kept is not None:
            kept.used = self._now()
            self._models.move_to_end(key)
        return kept

    def _drop_idle(self) -> None:
        for key in [key for key, kept in self._models.items() if self._now() - kept.used >= self._idle_s]:
            del self._models[key]
