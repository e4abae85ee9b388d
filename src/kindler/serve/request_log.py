"""What a server writes down of requests: an access log of all, an audit log of changes and refusals.

Both are JSON, one object a line. A thread writes, so that no request waits for a disk; when it cannot follow,
lines are dropped and counted, and the next line says how many.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import orjson

from kindler.errors import ConfigError

REQUEST_ID = "x-request-id"
LEVELS = ("debug", "info", "warning", "error")
_MOST_WAITING = 100_000
_SHOWN = 500
_GIVEN_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_log = logging.getLogger("kindler.serve")


def request_id(headers: Mapping[str, str]) -> str:
    """The id of a request: the one that it came with, if that can be written down, or a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if given and _GIVEN_ID.fullmatch(given) else secrets.token_hex(8)


@dataclass(slots=True)
class Entry:
    """What is known of a request, filled in as it is answered.

    Attributes:
        id: Its id.
        method: Its HTTP method, or "gRPC".
        path: Its path without the query, or the gRPC method.
        protocol: The protocol's name.
        client: The address it came from.
        trace: Its W3C `traceparent`, if it had one.
        status: The HTTP status.
        key: The id of its API key.
        bucket: The bucket.
        model: The model that answered.
        version: The version that answered.
        rows: The rows of the prediction.
        bytes_in: The bytes of its body.
        bytes_out: The bytes of the answer.
        changes: Whether it may change something: the audit log has it.
        notes: Anything else, such as the version that a shadow call went to.
    """

    id: str
    method: str
    path: str
    protocol: str
    client: str = ""
    trace: str = ""
    status: int = 0
    key: str | None = None
    bucket: str = "default"
    model: str | None = None
    version: int | None = None
    rows: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    changes: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    def line(self, seconds: float) -> dict[str, Any]:
        """The entry as an object; what is not known is left out."""
        shown: dict[str, Any] = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "level": _level(self.status),
            "request_id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.path[:_SHOWN],
            "protocol": self.protocol,
            "status": self.status,
            "ms": round(seconds * 1e3, 3),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bucket": self.bucket[:_SHOWN],
        }
        for name in ("key", "model", "version", "rows"):
            value = getattr(self, name)
            if value is not None:
                shown[name] = value
        if self.trace:
            shown["trace"] = self.trace[:_SHOWN]
        return shown | self.notes


class Lines:
    """A file of JSON lines that is written beside the requests, and opened again when it was moved away.

    Args:
        path: The file, which is appended to; "-" is standard error.

    Raises:
        ConfigError: It cannot be written to.
    """

    def __init__(self, path: str) -> None:
        self._path = None if path == "-" else Path(path)
        self._file: TextIO = self._opened()
        self._waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="kindler-log", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Write a line soon."""
        if self._waiting.qsize() >= _MOST_WAITING:
            self.dropped += 1
            return
        self._waiting.put(line)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._waiting.put(None)
        self._thread.join(5)
        if self._path is not None:
            with suppress(OSError):
                self._file.close()

    def _work(self) -> None:
        while True:
            lines = [self._waiting.get()]
            while lines[-1] is not None and len(lines) < 1000 and not self._waiting.empty():
                lines.append(self._waiting.get())
            told = [line for line in lines if line is not None]
            dropped, self.dropped = self.dropped, 0
            if dropped:
                told.append({"level": "warning", "message": f"{dropped} lines were dropped"})
            try:
                self._follow()
                self._file.write("".join(orjson.dumps(line).decode() + "\n" for line in told))
                self._file.flush()
            except (OSError, ValueError) as exc:  # a full disk must not end a server
                _log.warning("cannot write to the log %s: %s", self._path or "on standard error", exc)
            if lines[-1] is None:
                return

    def _follow(self) -> None:
        """Open the file again if it was renamed or removed, as tools do that rotate logs."""
        if self._path is None:
            return
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            same = False
        if not same:
            old, self._file = self._file, self._opened()
            old.close()

    def _opened(self) -> TextIO:
        if self._path is None:
            return sys.stderr
        try:
            return open(self._path, "a", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"cannot write the log {str(self._path)!r}: {exc.strerror or exc}.") from exc


class RequestLog:
    """Writes entries to the access log and the audit log, where there are any.

    Args:
        access: Where all requests go; None for nowhere.
        audit: Where changes and refusals go; None for nowhere.
        level: The least level of a line in the access log: "info" has all requests, "warning" those with a
            4xx status or worse, "error" those with a 5xx status.
    """

    def __init__(self, access: str | None = None, audit: str | None = None, level: str = "info") -> None:
        self._access = Lines(access) if access else None
        self._audit = self._access if audit and audit == access else Lines(audit) if audit else None
        self._least = LEVELS.index(level)

    def add(self, entry: Entry, seconds: float) -> None:
        """A request was answered."""
        audited = self._audit is not None and (entry.changes or entry.status in (401, 403))
        if self._access is None and not audited:
            return
        line = entry.line(seconds)
        if self._access is not None and LEVELS.index(line["level"]) >= self._least:
            self._access.write({"log": "access", **line})
        if self._audit is not None and audited:
            self._audit.write({"log": "audit", **line})

    def close(self) -> None:
        """Write what waits."""
        for log in {self._access, self._audit}:
            if log is not None:
                log.close()


def configure(level: str, form: str) -> None:
    """Let the server's own messages go to standard error.

    Args:
        level: The least level.
        form: "text" or "json".
    """
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_Json() if form == "json" else plain)
    logger = logging.getLogger("kindler")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "log": "server",
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def _level(status: int) -> str:
    return "error" if status >= 500 else "warning" if status >= 400 else "info"
