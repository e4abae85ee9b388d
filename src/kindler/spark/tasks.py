"""Runs user code in Spark's Python workers.

Spark unpickles a function before any of it can run, and its workers do not search the driver's module path.
So a task travels as bytes, with the folders of the program's modules. Its errors reach the user as text from
Spark, at an action outside of Kindler; here they become one short error, the user's exception first.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import socket
import sys
import sysconfig
import threading
import traceback
import zipimport
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsBytes, TypeVar

import cloudpickle
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from kindler.data.parquet import each_here
from kindler.engine.placement import enter_program_path, program_path
from kindler.engine.worker import message_of
from kindler.errors import KindlerError
from kindler.spark.executors import slots
from kindler.spark.versions import is_connect, to_arrow

TASK_ERROR = "raised in a task of Spark"
_UNCOPIED_BYTES = 1 << 16
_BROADCAST_BYTES = 1 << 20  # smaller ones travel with the task
_BROADCASTS = 8
_DRIVER_FILES = 256  # as many are opened by the driver before tasks would have started
_PACKAGE = str(Path(__file__).resolve().parents[1])
_lock = threading.Lock()
_broadcasts: OrderedDict[tuple[str, str], _Broadcast] = OrderedDict()

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")
Task = Callable[[Iterator[_Batch]], Iterator[_Result]]


def sent_task(task: Task[_Batch, _Result]) -> Task[_Batch, _Result]:
    """Wrap a task for `mapInArrow` or a function of Arrow columns: it is unpickled where it runs."""
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
    """Leaves large bytes (models) out of the pickle, so that they are not copied."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.large: list[bytes] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not bytes or len(obj) < _UNCOPIED_BYTES:
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
            frames = traceback.extract_tb(exc.__traceback__)
            if frames and "/pyspark/" in frames[-1].filename:
                raise  # Spark's own, such as where the rows end because their sender has failed
            # This process ends with its error, and nobody else sees these.
            os.environ["SPARK_HIDE_TRACEBACK"] = os.environ["SPARK_SIMPLIFIED_TRACEBACK"] = "1"
            raise _shortened(exc) from None


@contextmanager
def _working_in(folder: str) -> Iterator[None]:
    """Relative paths mean the program's folder, if this machine has it; as for workers."""
    before = os.getcwd()
    if os.path.isdir(folder):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _shortened(exc: Exception) -> Exception:
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
    """Lines of user code, or of libraries if there are none; Kindler's own errors need no others."""
    frames = [
        frame for frame in traceback.extract_tb(exc.__traceback__) if not frame.filename.startswith(_PACKAGE)
    ]
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    if isinstance(exc, KindlerError):
        frames = own
    linecache.checkcache()
    return [line.rstrip("\n") for line in traceback.format_list(own or frames)]


def task_gpus(context: TaskContext) -> list[str]:
    return [a for kind, part in context.resources().items() if "gpu" in kind for a in part.addresses]


def forget_zip_folders() -> None:
    """Drop import caches of folders in zip files, so that Python rereads each zip only once.

    Spark's Python workers import pyspark from a zip file. In Spark 3.5 and 4.0 each task begins with a search
    for changed files, in newer ones the first task of a worker: Python rereads the zip's file list for each
    of its folders that something was imported from, about twenty times, a quarter of a second.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimport.zipimporter) and importer.prefix:
            sys.path_importer_cache.pop(path, None)  # made again where something is imported from there


class _Broadcast:
    def __init__(self, broadcast: Any) -> None:
        self._broadcast = broadcast

    def __bytes__(self) -> bytes:
        data: bytes = self._broadcast.value
        return data


def lent(spark: SparkSession, digest: str, data: bytes) -> bytes | SupportsBytes:
    """Broadcast once for all frames and tasks; small ones, and those of Connect, are returned unchanged."""
    if len(data) < _BROADCAST_BYTES or is_connect(spark):
        return data
    context = spark.sparkContext
    key = str(context.applicationId), digest
    with _lock:
        for other in [other for other in _broadcasts if other[0] != key[0]]:
            del _broadcasts[other]  # its session has ended
        if key not in _broadcasts:
            _broadcasts[key] = _Broadcast(context.broadcast(data))
        _broadcasts.move_to_end(key)
        while len(_broadcasts) > _BROADCASTS:
            _broadcasts.popitem(last=False)  # Spark lets go of it with the last frame that needs it
        return _broadcasts[key]


def at_files(spark: SparkSession, call: Callable[[], _Result]) -> _Result:
    """Run here, or in a task for a Connect client, which may not see the files."""
    return _in_tasks(spark, lambda _: call(), [""])[0] if is_connect(spark) else call()


def each_file(spark: SparkSession, call: Callable[[str], _Result], files: Sequence[str]) -> list[_Result]:
    """Map over files in order: here for a few, in Spark tasks for many."""
    return _in_tasks(spark, call, files) if len(files) > _DRIVER_FILES else each_here(call, files)


def _in_tasks(spark: SparkSession, call: Callable[[str], _Result], files: Sequence[str]) -> list[_Result]:
    def outcome(file: str) -> bytes:
        try:
            ended: tuple[_Result | None, Exception | None] = (call(file), None)
        except Exception as error:  # noqa: BLE001  # raised again by the driver
            ended = (None, error)
        return bytes(cloudpickle.dumps(ended))

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            own = [files[number] for number in batch.column(0).to_pylist()]
            answers = pa.array(each_here(outcome, own), pa.binary())
            yield pa.RecordBatch.from_arrays([batch.column(0), answers], ["number", "answer"])

    numbers = spark.range(0, len(files), 1, min(len(files), slots(spark)))
    table = to_arrow(numbers.mapInArrow(sent_task(task), "number bigint, answer binary"))
    results = []
    for answer in table.sort_by("number").column("answer"):
        result, error = cloudpickle.loads(answer.as_py())
        if error is not None:
            raise error
        results.append(result)
    return results
