"""Tasks and reports, and their form on the wire: a JSON header and raw buffers. Nothing is sent here."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kindler.engine.channel import Frame
from kindler.engine.worker import describe
from kindler.errors import ConfigError, FrameError, KindlerError, revive, worker_error
from kindler.runtime import value_codec
from kindler.store.names import check_bucket
from kindler.store.selectors import parse

__all__ = ["MODEL_VERBS", "READS", "WRITES", "Report", "Task", "described", "pack", "unpack"]

READS = ("predict", "predict_proba", "decision_function", "score", "transform")
WRITES = ("fit", "partial_fit")
MODEL_VERBS = (*READS, *WRITES)

_HEAD = struct.Struct("!4sI")
_MAGIC = b"KRT1"
_MAX_HEADER_BYTES = 64 << 20


def pack(frame: Frame) -> bytes:
    """A frame as one piece of bytes."""
    header = json.dumps(
        {"kind": frame.kind, "fields": frame.fields, "sizes": [len(b) for b in frame.buffers]}
    ).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *frame.buffers])


def unpack(content: Any) -> Frame:
    """The frame that `pack` made.

    Raises:
        FrameError: It is none; nothing of it was executed.
    """
    if not isinstance(content, bytes | bytearray | memoryview) or len(content) < _HEAD.size:
        raise FrameError("not a frame: too short, or not bytes.")
    view = memoryview(content)
    magic, length = _HEAD.unpack(view[: _HEAD.size])
    if magic != _MAGIC or length > min(_MAX_HEADER_BYTES, len(view) - _HEAD.size):
        raise FrameError("not a frame: wrong first bytes.")
    body = view[_HEAD.size + length :]
    try:
        header = json.loads(bytes(view[_HEAD.size : _HEAD.size + length]))
        kind, told, sizes = header["kind"], header["fields"], header["sizes"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FrameError(f"not a frame: invalid header: {exc}.") from exc
    whole = isinstance(sizes, list) and all(type(n) is int and n >= 0 for n in sizes)
    if not (isinstance(kind, str) and isinstance(told, dict) and whole) or sum(sizes) != len(body):
        raise FrameError("not a frame: the header does not match the buffers.")
    buffers = []
    for size in sizes:
        buffers.append(bytes(body[:size]))
        body = body[size:]
    return Frame(kind, told, tuple(buffers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a worker is to do.

    Attributes:
        id: Its name, unique.
        shelf: "models" or "scripts".
        bucket: The bucket.
        name: Which of the shelf, with its version.
        verb: What to do with it.
        arguments: The arguments, as `values.encode` wrote them: a list and a dict.
        buffers: The buffers of the arguments.
        trusted: Whether code and pickles in the store may run; the worker must allow it too.
        timeout_s: Seconds that it may run.
        wait_s: Seconds that it may wait for a worker of a broker.
        max_retries: How often it is begun again after its worker was lost.
        label: What its worker must be.
        family: What it computes with, so that frameworks that do not go together get workers of their own.
        callback: A script to be called with the result.
        reply_to: Where reports go, if they do not come back by themselves.
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
        """Its form on the wire."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "buffers"}
        return Frame("task", told, self.buffers)

    @staticmethod
    def read(frame: Frame) -> Task:
        """From the wire, checked.

        Raises:
            FrameError: It is no task.
        """
        told = frame.fields
        names = {f.name for f in fields(Task)} - {"buffers"}
        if frame.kind != "task" or set(told) != names:
            raise FrameError(f"expected a task, received a frame of kind {frame.kind[:40]!r}.")
        try:
            task = Task(**told, buffers=frame.buffers)
            check_bucket(task.bucket)
            parse(task.name)
            if task.callback is not None:
                parse(task.callback)
        except (ConfigError, TypeError) as exc:
            raise FrameError(f"invalid task: {exc}") from exc
        text = all(isinstance(told[name], str) for name in ("id", "label", "family", "reply_to"))
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
        """The same, whose reports go to a queue."""
        return replace(self, reply_to=queue)


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a task.

    Attributes:
        state: "running", "done", "failed" or "cancelled".
        value: Its result, as `values.encode` wrote it.
        buffers: The buffers of the result.
        error: What it failed with, as `engine.worker.describe` tells it, and the host.
        log: The last that it printed.
    """

    state: str
    value: Any = None
    buffers: tuple[bytes, ...] = ()
    error: Mapping[str, Any] | None = None
    log: str = ""

    def frame(self, task_id: str) -> Frame:
        """Its form on the wire."""
        told = {"id": task_id, "state": self.state, "value": self.value, "error": self.error, "log": self.log}
        return Frame("report", told, self.buffers)

    @staticmethod
    def read(frame: Frame) -> tuple[str, Report]:
        """The task's id and the report.

        Raises:
            FrameError: It is no report.
        """
        told = frame.fields
        if frame.kind != "report" or set(told) != {"id", "state", "value", "error", "log"}:
            raise FrameError(f"expected a report, received a frame of kind {frame.kind[:40]!r}.")
        if told["state"] not in ("running", "done", "failed", "cancelled"):
            raise FrameError(f"unknown state of a task: {told['state']!r}.")
        report = Report(told["state"], told["value"], frame.buffers, told["error"], str(told["log"]))
        return str(told["id"]), report

    def result(self, resolve: value_codec.Resolve | None = None) -> Any:
        """The result itself."""
        return value_codec.decode(self.value, self.buffers, resolve)

    def exception(self) -> KindlerError:
        """What to raise for a task that failed: its own error, as far as it is known here."""
        said = self.error or {}
        types = [str(name) for name in said.get("types", [])] or ["builtins:Exception"]
        message = str(said.get("message", "unknown error"))
        return revive(types[0], message, dict(said.get("own", {}))) or worker_error(
            types=types,
            message=message,
            traceback=str(said.get("traceback", "")),
            rank=0,
            host=str(said.get("host", "unknown")),
            fields=_texts(said.get("fields")),
        )


def _texts(fields: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in fields.items()} if isinstance(fields, dict) else {}


def described(exc: BaseException) -> dict[str, Any]:
    """An exception as a report tells it: plain JSON."""
    told = describe(exc) | {"host": socket.gethostname()}
    plain: dict[str, Any] = json.loads(json.dumps(told, default=str))
    return plain
