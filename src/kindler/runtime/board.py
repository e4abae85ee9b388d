"""Tasks by their ids, for those who cannot keep a handle: a server whose clients come back and ask."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kindler.errors import ConfigError, NotFoundError
from kindler.runtime.handles import Handle
from kindler.runtime.messages import MODEL_VERBS
from kindler.runtime.runtime import Runtime
from kindler.store import Version

__all__ = ["Board"]

_WORDS = {"pending": "PENDING", "running": "RUNNING", "done": "SUCCESS"}


class Board:
    """Remembers the handles of tasks. Any thread may use it.

    Args:
        runtime: Gives the runtime of a bucket.
        keep: How many tasks are remembered; the oldest that has ended goes first.
    """

    def __init__(self, runtime: Callable[[str], Runtime], *, keep: int = 1000) -> None:
        self._runtime = runtime
        self._keep = keep
        self._handles: OrderedDict[str, Handle] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, bucket: str, model: str, action: str, datax: str, datay: str | None = None) -> str:
        """Begin a verb of a model on stored datasets; returns the task's id.

        Raises:
            ConfigError: There is no such verb.
            NotFoundError: There is no such model.
        """
        if action not in MODEL_VERBS:
            raise ConfigError(f"a model has no {action!r}; it has {', '.join(MODEL_VERBS)}.")
        data = (datax,) if datay is None else (datax, datay)
        handle: Handle = getattr(self._runtime(bucket).model(model), action)(*data)
        with self._lock:
            self._handles[handle.id] = handle
            ended = [name for name, one in self._handles.items() if one.ready()]
            for name in ended[: max(0, len(self._handles) - self._keep)]:
                del self._handles[name]
        return handle.id

    def status(self, task: str) -> str:
        """ "PENDING", "RUNNING", "SUCCESS" or "FAILURE".

        Raises:
            NotFoundError: There is no such task.
        """
        return _WORDS.get(self._handle(task).status, "FAILURE")

    def result(self, task: str) -> Any:
        """What a task that has ended gave, as JSON has it; raises what it raised."""
        return _plain(self._handle(task).get(0.0))

    def _handle(self, task: str) -> Handle:
        with self._lock:
            found = self._handles.get(task)
        if found is None:
            raise NotFoundError(what="task", name=task[:100])
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, Version):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside) for inside in value]
    return value.tolist() if hasattr(value, "tolist") else value
