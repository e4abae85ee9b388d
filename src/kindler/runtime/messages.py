"""Tasks and reports, and their wire format: a JSON header and raw buffers. Nothing is sent here."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kindler import frame as frames
from kindler.data.received import check_json
from kindler.engine.worker import describe
from kindler.errors import ConfigError, FrameError, KindlerError, TaskCancelledError, revive, worker_error
from kindler.frame import Frame
from kindler.runtime import value_codec
from kindler.store.names import check_bucket, parse_selector

READS = ("predict", "predict_proba", "decision_function", "score", "transform")
WRITES = ("fit", "partial_fit")
REDUCE = "reduce"  # called with a list of results
MODEL_VERBS = (*READS, *WRITES, REDUCE)

_LONGEST_S = 1e6  # what can be waited for at once
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}")
_LONGEST_TEXT = 100_000  # characters of each text of an error
_MOST_ITEMS = 100


def pack(frame: Frame) -> bytes:
    return frames.to_bytes(frame.kind, *frame.buffers, **frame.fields)


def unpack(content: Any) -> Frame:
    """Read what `pack` wrote, by anybody; raises FrameError."""
    try:
        return frames.from_bytes(memoryview(content), check_json)
    except (ValueError, TypeError) as exc:
        raise FrameError(f"not a frame: {exc}.") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """How a task is run.

    Attributes:
        label: The label of workers that may run it; workers without a label have "default".
        timeout_s: Seconds that it may run, including loading and excluding waiting.
        wait_s: Seconds that it may wait for a worker of a broker; local workers are started on demand.
        max_retries: How often it is restarted after its worker was lost.
        result_bytes: The largest result, in bytes; a task with a larger one fails.
        trusted: Whether it may run functions and pickles from the store.
        callback: The name of a script, which the worker calls with the result; or a function, which this
            process calls with the handle.

    >>> TaskSettings(timeout_s=0)
    Traceback (most recent call last):
    kindler.errors.ConfigError: timeout_s=0: must be a number of seconds above 0 and at most 1e+06.
    """

    label: str = "default"
    timeout_s: float = 1200.0
    wait_s: float = 3600.0
    max_retries: int = 1
    result_bytes: int = 4 << 30
    trusted: bool = False
    callback: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or not _LABEL.fullmatch(self.label):
            raise ConfigError(f"label={self.label!r}: must be letters, digits, - and _, at most 50.")
        for name, seconds in (("timeout_s", self.timeout_s), ("wait_s", self.wait_s)):
            if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_S:
                raise ConfigError(
                    f"{name}={seconds!r}: must be a number of seconds above 0 and at most {_LONGEST_S:g}."
                )
        if type(self.max_retries) is not int or self.max_retries < 0:
            raise ConfigError(f"max_retries={self.max_retries!r}: must be 0 or more.")
        if type(self.result_bytes) is not int or self.result_bytes < 1:
            raise ConfigError(f"result_bytes={self.result_bytes!r}: must be at least 1.")
        if isinstance(self.callback, str):
            parse_selector(self.callback)
        elif self.callback is not None and not callable(self.callback):
            raise ConfigError(f"callback={self.callback!r}: must be the name of a script, or a function.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task(TaskSettings):
    """A task for a worker, and its settings. `name` has the version of the model or script; `buffers` are the
    arguments, a list and a dict, as `value_codec.encode` wrote them; tasks of one `family` may share a
    process."""

    id: str
    shelf: str
    bucket: str
    name: str
    verb: str
    buffers: tuple[bytes, ...]
    family: str = ""

    def frame(self) -> Frame:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "buffers"}
        return Frame("task", values, self.buffers)

    @staticmethod
    def read(frame: Frame) -> Task:
        """Read and validate a task; raises FrameError."""
        values = frame.fields
        if frame.kind != "task" or set(values) != {f.name for f in fields(Task)} - {"buffers"}:
            raise FrameError(f"expected a task, received a frame of kind {frame.kind[:40]!r}.")
        try:
            task = Task(**values, buffers=frame.buffers)
            check_bucket(task.bucket)
            parse_selector(task.name)
        except (ConfigError, TypeError) as exc:
            raise FrameError(f"invalid task: {exc}") from exc
        text = all(isinstance(values[name], str) for name in ("id", "family"))
        known = (task.shelf, task.verb) == ("scripts", "run") or (
            task.shelf == "models" and task.verb in MODEL_VERBS
        )
        if not (text and known and type(task.trusted) is bool):
            raise FrameError(
                f"invalid task: unknown verb {task.verb!r} of {task.shelf!r}, or an invalid setting."
            )
        return task

    def __str__(self) -> str:
        return f"{self.verb}() of {self.name!r}"


@dataclass(frozen=True, slots=True)
class Report:
    """A report on a task; `buffers` are the result, as `value_codec.encode` wrote it, and `log` is the last
    lines that the task printed."""

    state: str
    buffers: tuple[bytes, ...] = ()
    error: Mapping[str, Any] | None = None
    log: str = ""

    @staticmethod
    def failed(error: BaseException, log: str = "") -> Report:
        return Report("failed", error=described(error), log=log)

    @staticmethod
    def cancelled(reason: str) -> Report:
        return Report("cancelled", error=described(TaskCancelledError(reason)))

    def frame(self, task_id: str) -> Frame:
        values = {"id": task_id, "state": self.state, "error": self.error, "log": self.log}
        return Frame("report", values, self.buffers)

    @staticmethod
    def read(frame: Frame) -> tuple[str, Report]:
        """Read a report and the id of its task; raises FrameError."""
        values = frame.fields
        if frame.kind != "report" or set(values) != {"id", "state", "error", "log"}:
            raise FrameError(f"expected a report, received a frame of kind {frame.kind[:40]!r}.")
        if values["state"] not in ("running", "done", "failed", "cancelled"):
            raise FrameError(f"unknown state of a task: {values['state']!r}.")
        if not isinstance(values["error"], dict | None):
            raise FrameError(f"the error of a task is malformed: {str(values['error'])[:100]!r}.")
        report = Report(values["state"], frame.buffers, values["error"], str(values["log"]))
        return str(values["id"]), report

    def result(self, resolve: value_codec.Resolve | None = None) -> Any:
        return value_codec.decode(self.buffers, resolve)

    def exception(self) -> KindlerError:
        """The exception to raise for a failed task: of its own type, if that is known here."""
        error = self.error or {}
        named, own = error.get("types"), error.get("own")
        types = [str(name) for name in named or ()] if isinstance(named, list) else []
        types = types or ["builtins:Exception"]
        message = str(error.get("message", "unknown error"))
        return revive(types[0], message, own if isinstance(own, dict) else {}) or worker_error(
            types=types,
            message=message,
            traceback=str(error.get("traceback", "")),
            rank=0,
            host=str(error.get("host", "unknown")),
            fields=_texts(error.get("fields")),
        )


def _texts(fields: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in fields.items()} if isinstance(fields, dict) else {}


def described(exc: BaseException) -> dict[str, Any]:
    """An exception as the JSON of a report: `engine.worker.describe` and the host. Long texts are cut."""
    error = describe(exc) | {"host": socket.gethostname()}
    plain: dict[str, Any] = _cut(json.loads(json.dumps(error, default=str)))
    return plain


def _cut(value: Any) -> Any:
    """A frame whose header is too long cannot be read, and the caller would never hear of the error."""
    if isinstance(value, dict):
        return {key[:_LONGEST_TEXT]: _cut(inside) for key, inside in list(value.items())[:_MOST_ITEMS]}
    if isinstance(value, list):
        return [_cut(inside) for inside in value[:_MOST_ITEMS]]
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return (
            f"{value[: _LONGEST_TEXT // 2]} ... ({len(value)} characters) ... {value[-_LONGEST_TEXT // 2 :]}"
        )
    return value
