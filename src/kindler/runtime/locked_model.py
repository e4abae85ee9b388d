"""A model in a process that is locked in (see `kindler.jail`), for workers that trust nobody.

The worker itself reads and writes the store, and cannot be locked in. So what strangers have stored is read,
and called, by a process of its own, which has nothing but the files of the version. It is used like a
`LoadedModel`. What it answers is passed on as it came: a worker does not read it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import socket
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler import jail
from kindler.engine import fork_server
from kindler.engine.fork_server import PrintedLines, print_line
from kindler.engine.placement import half_of_memory
from kindler.errors import FrameError, WorkerLost
from kindler.frame import ChannelClosed
from kindler.frameworks.keras import backends
from kindler.models.registry import MODEL_KINDS, Row
from kindler.runtime import value_codec
from kindler.runtime.messages import Report
from kindler.store import Version

_ENTRY = "kindler.runtime._locked_model_main:main"
_START_S = 300.0
_IDLE_S = 300.0
_EXIT_S = 5.0
_LOOK_S = 0.25
_HEADER_BYTES = 4 << 20
_ANSWER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Encoded:
    """A result as `value_codec.encode` wrote it, by a process that nobody trusts."""

    value: Any
    buffers: tuple[bytes, ...]


@functools.cache
def _lacking() -> str | None:
    return jail.lacking()


def can_be_locked_in(version: Version) -> bool:
    """Whether a version of a model is called by a process that is locked in: see `Kinds.locked_in`."""
    return MODEL_KINDS.locked_in(str(version), version.kind, version.meta, _lacking())


class LockedModel:
    """A model in a process of its own.

    Args:
        version: Which.
        folder: Where its files lie while it is loaded.

    Attributes:
        is_gone: Whether its process has ended.

    Raises:
        KindlerError: It cannot be loaded.
    """

    def __init__(self, version: Version, folder: Path) -> None:
        self._name = str(version)
        self.is_gone = False
        self._over = threading.Event()
        self._excess: str | None = None
        self._memory_bytes = _memory_of(version)
        row = MODEL_KINDS.row(version.kind, version.meta)
        environment = {"HOME": jail.NOWHERE}
        if row.family == "keras":
            environment["KERAS_BACKEND"] = backends.backend_of(None, None)
        recipe = fork_server.Recipe(
            preload=("kindler.runtime._locked_model_main", *_preload(row)),
            environment=tuple(sorted(environment.items())),
            idle_s=_IDLE_S,
            inherits=jail.ENVIRONMENT,
        )
        self._child = fork_server.start_child(recipe, owner=os.getpid(), timeout_s=_START_S, entry=_ENTRY)
        self._printed = PrintedLines(self._child.output, _print)
        self._child.channel.limit(header_bytes=_HEADER_BYTES, message_bytes=_ANSWER_BYTES + _HEADER_BYTES)
        threading.Thread(target=self._printed.pump, daemon=True).start()
        watched = (weakref.ref(self), self._child.pid, self._memory_bytes, self._over)
        threading.Thread(target=_watch, args=watched, daemon=True).start()
        try:
            order: dict[str, Any] = {"model_kind": version.kind, "folder": str(folder)}
            order |= {"meta": dict(version.meta), "memory_bytes": self._memory_bytes}
            order["answer_bytes"] = _ANSWER_BYTES
            self._child.channel.send("load", **order)
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, verb: str, /, *data: Any, **options: Any) -> Encoded:
        """Run a verb: see `LoadedModel.call`.

        Raises:
            KindlerError: What it raised.
        """
        tree, buffers = value_codec.encode([list(data), options])
        self._child.channel.send("call", *buffers, verb=verb, arguments=tree)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if not self.is_gone:
            self._ended()

    def _ended(self) -> int:
        self.is_gone = True
        self._over.set()
        self._child.kill()
        try:
            code, _ = self._child.wait(_EXIT_S)
        except TimeoutError:
            code = -signal.SIGKILL  # it ends with this one
        self._printed.close()
        self._child.close()
        return code

    def _end_for(self, excess: str) -> None:
        self._excess = excess
        self._child.kill()

    def _answer(self) -> Encoded:
        try:
            _, report = Report.read(self._child.channel.receive())
        except (ChannelClosed, FrameError) as exc:
            raise WorkerLost(
                f"the process of {self._name}, which was locked in, {self._excess or 'is gone'}",
                rank=None,
                host=socket.gethostname(),
                exit_code=self._ended(),
                log_tail="",
            ) from exc
        self._printed.catch_up()
        if report.state != "done":
            raise report.exception()
        return Encoded(report.value, report.buffers)


def _watch(model: weakref.ref[LockedModel], pid: int, memory_bytes: int, over: threading.Event) -> None:
    """End a process that takes more than a limit that the kernel does not set; until nobody needs it."""
    while model() is not None and not over.wait(_LOOK_S):
        excess = jail.excess(pid, memory_bytes, threads=jail.MOST_THREADS)
        watched = model() if excess is not None else None
        if watched is not None:
            watched._end_for(str(excess))
            return


def _memory_of(version: Version) -> int:
    """Half of the machine's memory, or less if that was stored with the version."""
    limits = version.attributes.get("limits")
    asked = limits.get("memory_bytes") if isinstance(limits, Mapping) else None
    return min(half_of_memory(), asked if type(asked) is int and asked > 0 else half_of_memory())


def _preload(row: Row) -> tuple[str, ...]:
    """What is installed of it."""
    names = {name.partition(".")[0] for name in (*row.loaded, *row.preload)} - {"kindler"}
    return row.preload if all(importlib.util.find_spec(name.partition(":")[0]) for name in names) else ()


def _print(line: str) -> None:
    """What the process prints is part of the task's log."""
    try:
        print_line(line)
    except (OSError, ValueError):
        pass  # nobody reads it any more
