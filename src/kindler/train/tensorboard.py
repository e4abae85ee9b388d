"""Event files for TensorBoard, written on the driver: `<log_dir>/train` and `<log_dir>/validation`.

Uses tensorboard's record and message classes directly: its event writer would import TensorFlow if installed.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from kindler.errors import ConfigError, MissingExtraError

_FLUSH_EVERY_S = 1.0
_numbers = itertools.count()


def log_folder(log_dir: str | PathLike[str]) -> Path:
    if find_spec("tensorboard") is None:
        raise MissingExtraError(what="log_dir=...", package="tensorboard", extra="tensorboard")
    name = os.fspath(log_dir).removeprefix("file://")
    if "://" in name:
        raise ConfigError(f"log_dir must be a local folder of the driver; received {name!r}.")
    return Path(name).absolute()


def board(folder: Path | None) -> AbstractContextManager[TensorBoard | None]:
    return nullcontext() if folder is None else TensorBoard(folder)


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _EventFile] = {}

    def __enter__(self) -> TensorBoard:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def add(self, part: str, tag: str, value: float, step: int, wall_time: float) -> None:
        self._file(part).scalar(tag, value, step, wall_time)

    def rewind(self, step: int) -> None:
        """Make readers drop what was written from `step` on."""
        for part in ("train", "validation"):
            if part in self._files or (self._folder / part).is_dir():
                self._file(part).restart(step)

    def flush(self) -> None:
        """Make what was written visible to readers, at most once a second."""
        for file in self._files.values():
            file.flush_now_and_then()

    def _file(self, part: str) -> _EventFile:
        if part not in self._files:
            self._files[part] = _EventFile(self._folder / part)
        return self._files[part]


class _EventFile:
    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take files in the order of their names.
        who = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        file = (folder / f"events.out.tfevents.{time.time():017.6f}.{who}").open("wb")
        self._records: Any = RecordWriter(file)
        self._flushed = 0.0
        self._write(file_version="brain.Event:2", wall_time=time.time())
        self.flush_now_and_then()

    def scalar(self, tag: str, value: float, step: int, wall_time: float) -> None:
        summary = self._summaries.Summary(value=[self._summaries.Summary.Value(tag=tag, simple_value=value)])
        self._write(summary=summary, step=step, wall_time=wall_time)

    def restart(self, step: int) -> None:
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(session_log=log, step=step, wall_time=time.time())

    def flush_now_and_then(self) -> None:
        if time.monotonic() - self._flushed >= _FLUSH_EVERY_S:
            self._flushed = time.monotonic()
            self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._events.Event(**fields).SerializeToString())
