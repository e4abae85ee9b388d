"""Tasks that hold code of the user's, for Spark's Python workers.

Spark unpickles a function before any of it can run, and its workers do not look for modules where the driver
does. So the task travels as bytes, with the folders that the program's modules are in, which `fit` sends to
its workers, too. What a task raises reaches the user as text that Spark makes of it, at an action outside of
Kindler: here it becomes one short error, the user's exception first.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import socket
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
from pyspark import TaskContext

from kindler.engine.placement import enter_program_path, program_path
from kindler.engine.worker import message_of
from kindler.errors import KindlerError

TASK_ERROR = "raised in a task of Spark"
_LARGE_BYTES = 1 << 16
_PACKAGE = str(Path(__file__).resolve().parents[1])

_Batch = TypeVar("_Batch")
_Made = TypeVar("_Made")
Task = Callable[[Iterator[_Batch]], Iterator[_Made]]


def sent_task(task: Task[_Batch, _Made]) -> Task[_Batch, _Made]:
    """The task, for `mapInArrow` and functions of Arrow columns: it is unpickled where it runs."""
    return _Sent(task)


class _Sent:
    def __init__(self, task: Task[Any, Any]) -> None:
        self._task = task

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        return self._task(batches)

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(self._task)
        return _Arrived, (file.getvalue(), pickler.large, program_path(), os.getcwd())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves large bytes, which are models, to whoever pickles the rest: they are not copied."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.large: list[bytes] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not bytes or len(obj) < _LARGE_BYTES:
            return None
        self.large.append(obj)
        return len(self.large) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, large: list[bytes]) -> None:
        super().__init__(io.BytesIO(data))
        self._large = large

    def persistent_load(self, pid: int) -> bytes:
        return self._large[pid]


class _Arrived:
    """Such a task in a Python worker of Spark, or on its way to another one."""

    def __init__(self, data: bytes, large: list[bytes], paths: tuple[str, ...], folder: str) -> None:
        self._sent = data, large, paths, folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arrived, self._sent

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        data, large, paths, folder = self._sent
        try:
            enter_program_path(paths)
            with _working_in(folder):
                yield from _Unpickler(data, large).load()(batches)
        except Exception as exc:
            if _is_of_spark(exc):
                raise
            # This process ends with its error, and nobody else sees these.
            os.environ["SPARK_HIDE_TRACEBACK"] = os.environ["SPARK_SIMPLIFIED_TRACEBACK"] = "1"
            raise _shortened(exc, paths) from None


@contextmanager
def _working_in(folder: str) -> Iterator[None]:
    """Files that the program names relative to its folder, where this machine has that; as for workers."""
    before = os.getcwd()
    if os.path.isdir(folder):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _is_of_spark(exc: BaseException) -> bool:
    """Whether Spark's own code raised it, such as where the rows end because their sender has failed."""
    frames = traceback.extract_tb(exc.__traceback__)
    return bool(frames) and "/pyspark/" in frames[-1].filename


def _shortened(exc: Exception, paths: tuple[str, ...]) -> Exception:
    """An exception of the same name, whose text says where the user's code raised it."""
    context = TaskContext.get()
    partition = "" if context is None else f" (partition {context.partitionId()})"
    lines = [message_of(exc), "", f"{TASK_ERROR}{partition} on host {socket.gethostname()}"]
    if isinstance(exc, ModuleNotFoundError):
        lines[-1] += ", which looked for it in the folders of the program, too."
        lines.append(
            "Hint: the executors must see those folders; otherwise send it, as in"
            f' spark.sparkContext.addPyFile("{(exc.name or "module").partition(".")[0]}.py").'
        )
    elif places := _places(exc):
        lines[-1] += ":"
        lines += places
    kind = type(type(exc).__name__, (Exception,), {"__module__": type(exc).__module__})
    short: Exception = kind("\n".join(lines))
    return short


def _places(exc: Exception) -> list[str]:
    """The lines of the user's own code; those of libraries where there are none. Ours explain themselves."""
    frames = [
        frame for frame in traceback.extract_tb(exc.__traceback__) if not frame.filename.startswith(_PACKAGE)
    ]
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    if isinstance(exc, KindlerError):
        frames = own
    linecache.checkcache()
    return [line.rstrip("\n") for line in traceback.format_list(own or frames)]
