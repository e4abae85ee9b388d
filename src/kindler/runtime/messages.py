"""Tasks and reports, and their wire format: a JSON header and raw buffers. Nothing is sent here."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kindler.data.received import check_json
from kindler.engine.worker import describe
from kindler.errors import ConfigError, FrameError, KindlerError, revive, worker_error
from kindler.frame import Frame
from kindler.runtime import value_codec
from kindler.store.names import check_bucket
from kindler.store.selectors import parse

READS = ("predict", "predict_proba", "decision_function", "score", "transform")
WRITES = ("fit", "partial_fit")
REDUCE = "reduce"  # called with a list of results
MODEL_VERBS = (*READS, *WRITES, REDUCE)

_HEAD = struct.Struct("!4sI")
_MAGIC = b"KRT1"
_MAX_HEADER_BYTES = 64 << 20
_LONGEST_TEXT = 100_000  # characters of each text of an error
_MOST_ITEMS = 100


def pack(frame: Frame) -> bytes:
    """Serialize a frame."""
    header = json.dumps(
        {"kind": frame.kind, "fields": frame.fields, "sizes": [len(b) for b in frame.buffers]}
    ).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *frame.buffers])


def unpack(content: Any) -> Frame:
    """Deserialize what `pack` wrote.

    Raises:
        FrameError: It is not a frame. Nothing of it was executed.
    """
    if not isinstance(content, bytes | bytearray | memoryview) or len(content) < _HEAD.size:
        raise FrameError("not a frame: too short, or not bytes.")
    view = memoryview(content)
    magic, length = _HEAD.unpack(view[: _HEAD.size])
    if magic != _MAGIC or length > min(_MAX_HEADER_BYTES, len(view) - _HEAD.size):
        raise FrameError("not a frame: wrong first bytes.")
    body = view[_HEAD.size + length :]
    try:
        header = json.loads(check_json(bytes(view[_HEAD.size : _HEAD.size + length])))
        kind, values, sizes = header["kind"], header["fields"], header["sizes"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FrameError(f"not a frame: invalid header: {exc}.") from exc
    sized = isinstance(sizes, list) and all(type(n) is int and n >= 0 for n in sizes)
    if not (isinstance(kind, str) and isinstance(values, dict) and sized) or sum(sizes) != len(body):
        raise FrameError("not a frame: the header does not match the buffers.")
    buffers = []
    for size in sizes:
        buffers.append(bytes(body[:size]))
        body = body[size:]
    return Frame(kind, values, tuple(buffers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task for a worker.

    Attributes:
        id: Its unique id.
        shelf: "models" or "scripts".
        bucket: The bucket.
        name: The name of the model or script, with its version.
        verb: The method to call.
        arguments: The arguments, a list and a dict, as `value_codec.encode` wrote them.
        buffers: The buffers of the arguments.
        trusted: Whether code and pickles in the store may run; the worker must allow it too.
        timeout_s: Seconds that it may run.
        wait_s: Seconds that it may wait for a worker of a broker.
        max_retries: How often it is started again after its worker was lost.
        label: The label of workers that may run it.
        family: The framework it uses; frameworks that do not share a process get workers of their own.
        callback: A script to call with the result.
        reply_to: The queue for reports, if the engine needs one.
    """

    id: str
    shelf: str
    bucket: str
    name: str
    verb: str
    arguments: Any
    buffers: tuple[bytes, ...] = ()
    trusted: bool = False
    timeout_s: float = 1200.0
    wait_s: float = 3600.0
    max_retries: int = 1
    label: str = "default"
    family: str = ""
    callback: str | None = None
    reply_to: str = ""

    def frame(self) -> Frame:
        """Its wire format."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "buffers"}
        return Frame("task", values, self.buffers)

    @staticmethod
    def read(frame: Frame) -> Task:
        """Read and validate a task.

        Raises:
            FrameError: The frame is not a valid task.
        """
        values = frame.fields
        names = {f.name for f in fields(Task)} - {"buffers"}
        if frame.kind != "task" or set(values) != names:
            raise FrameError(f"expected a task, received a frame of kind {frame.kind[:40]!r}.")
        try:
            task = Task(**values, buffers=frame.buffers)
            check_bucket(task.bucket)
            parse(task.name)
            if task.callback is not None:
                parse(task.callback)
        except (ConfigError, TypeError) as exc:
            raise FrameError(f"invalid task: {exc}") from exc
        text = all(isinstance(values[name], str) for name in ("id", "label", "family", "reply_to"))
        known = (task.shelf, task.verb) == ("scripts", "run") or (
            task.shelf == "models" and task.verb in MODEL_VERBS
        )
        plain = type(task.trusted) is bool and type(task.max_retries) is int
        seconds = (task.timeout_s, task.wait_s)
        timed = all(isinstance(one, int | float) and 0 < one <= 1e6 for one in seconds)
        if not (text and known and plain and timed):
            raise FrameError(
                f"invalid task: unknown verb {task.verb!r} of {task.shelf!r}, or an invalid setting."
            )
        return task

    def __str__(self) -> str:
        return f"{self.verb}() of {self.name!r}"

    def replying_to(self, queue: str) -> Task:
        """The same task, with a queue for its reports."""
        return replace(self, reply_to=queue)


@dataclass(frozen=True, slots=True)
class Report:
    """A report on a task.

    Attributes:
        state: "running", "done", "failed" or "cancelled".
        value: The result, as `value_codec.encode` wrote it.
        buffers: The buffers of the result.
        error: The error, as `described` writes it.
        log: The last lines that the task printed.
    """

    state: str
    value: Any = None
    buffers: tuple[bytes, ...] = ()
    error: Mapping[str, Any] | None = None
    log: str = ""

    def frame(self, task_id: str) -> Frame:
        """Its wire format."""
        values = {"id": task_id, "state": self.state, "value": self.value, "error": self.error}
        return Frame("report", values | {"log": self.log}, self.buffers)

    @staticmethod
    def read(frame: Frame) -> tuple[str, Report]:
        """Read a report and the id of its task.

        Raises:
            FrameError: The frame is not a report.
        """
        values = frame.fields
        if frame.kind != "report" or set(values) != {"id", "state", "value", "error", "log"}:
            raise FrameError(f"expected a report, received a frame of kind {frame.kind[:40]!r}.")
        if values["state"] not in ("running", "done", "failed", "cancelled"):
            raise FrameError(f"unknown state of a task: {values['state']!r}.")
        if not isinstance(values["error"], dict | None):
            raise FrameError(f"an error of a task that is none: {str(values['error'])[:100]!r}.")
        report = Report(values["state"], values["value"], frame.buffers, values["error"], str(values["log"]))
        return str(values["id"]), report

    def result(self, resolve: value_codec.Resolve | None = None) -> Any:
        """Decode the result."""
        return value_codec.decode(self.value, self.buffers, resolve)

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
