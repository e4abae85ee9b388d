"""Event files for TensorBoard, written on the driver: `<log_dir>/train` and `<log_dir>/validation`.

Uses tensorboard's record and message classes directly: its event writer would import TensorFlow if installed.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from kindler import limits
from kindler.errors import ConfigError, MissingExtraError

_numbers = itertools.count()


def log_folder(log_dir: str | PathLike[str]) -> Path:
    if find_spec("tensorboard") is None:
        raise MissingExtraError(what="log_dir=...", package="tensorboard", extra="tensorboard")
    name = os.fspath(log_dir).removeprefix("file://")
    if "://" in name:
        raise ConfigError(f"log_dir must be a local folder of the driver; received {name!r}.")
    return Path(name).absolute()


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._flushed = 0.0

    def __enter__(self) -> TensorBoard:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def add(self, part: str, tag: str, value: float, step: int, wall_time: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary: Any = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._write(part, summary=summary, step=step, wall_time=wall_time)

    def rewind(self, step: int) -> None:
        """Make readers drop what was written from `step` on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        start: Any = SessionLog(status=SessionLog.START)
        for part in ("train", "validation"):
            if part in self._writers or (self._folder / part).is_dir():
                self._write(part, session_log=start, step=step, wall_time=time.time())

    def flush(self) -> None:
        """Make what was written visible to readers, at most once a second."""
        if time.monotonic() - self._flushed >= limits.FLUSH_S:
            self._flushed = time.monotonic()
            for writer in self._writers.values():
                writer.flush()

    def _write(self, part: str, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if part not in self._writers:
            self._writers[part] = _open(self._folder / part)
            self._write(part, file_version="brain.Event:2", wall_time=time.time())
        event: Any = Event(**fields)
        self._writers[part].write(event.SerializeToString())


def _open(folder: Path) -> Any:
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    # Readers take files in the order of their names.
    who = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
    return RecordWriter((folder / f"events.out.tfevents.{time.time():017.6f}.{who}").open("wb"))
