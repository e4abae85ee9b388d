"""What a server writes down of requests: an access log of all, an audit log of changes and refusals.

Both are JSON, one object a line. A thread writes, so that no request waits for a disk; when it cannot follow,
lines are dropped and counted, and the next line says how many.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import orjson

from kindler.errors import ConfigError

REQUEST_ID = "x-request-id"
LEVELS = ("debug", "info", "warning", "error")
_MAX_WAITING = 100_000
_MAX_SHOWN = 500
_VALID_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_log = logging.getLogger("kindler.serve")


def request_id(headers: Mapping[str, str]) -> str:
    """The id that a request came with, if it can be written down, or a new one."""
    sent = headers.get(REQUEST_ID, "")
    return sent if sent and _VALID_ID.fullmatch(sent) else secrets.token_hex(8)


@dataclass(slots=True)
class Entry:
    """What is known of a request, filled in as it is answered.

    Attributes:
        method: Its HTTP method, or "gRPC".
        path: Its path without the query, or the gRPC method.
        trace: Its W3C `traceparent`, if it had one.
        model: The model that answered, as counters have it.
        changes: Whether it may change something: the audit log has it.
        counted: Whether the server's counters have it: predictions, and what was refused before an endpoint.
        notes: Anything else, such as the versions that shadow calls went to.
    """

    id: str
    method: str
    path: str
    protocol: str
    client: str = ""
    trace: str | None = None
    status: int = 0
    key: str | None = None
    bucket: str = "default"
    model: str | None = None
    version: int | None = None
    rows: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    changes: bool = False
    counted: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, headers: Mapping[str, str], method: str, path: str, protocol: str, client: str) -> Entry:
        trace = headers.get("traceparent")
        return cls(request_id(headers), method, path, protocol, client, trace and trace[:_MAX_SHOWN])

    def line(self, seconds: float) -> dict[str, Any]:
        """The entry as an object; what is not known is left out."""
        level = "error" if self.status >= 500 else "warning" if self.status >= 400 else "info"
        known = {name: getattr(self, name) for name in ("key", "model", "version", "rows", "trace")}
        return {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "level": level,
            "request_id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.path[:_MAX_SHOWN],
            "protocol": self.protocol,
            "status": self.status,
            "ms": round(seconds * 1e3, 3),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bucket": self.bucket[:_MAX_SHOWN],
            **{name: value for name, value in known.items() if value is not None},
            **self.notes,
        }


class JsonLog:
    """A file of JSON lines that a thread writes, and opens again when it was moved away; "-" is stderr."""

    def __init__(self, path: str) -> None:
        try:
            file = logging.StreamHandler() if path == "-" else logging.handlers.WatchedFileHandler(path)
        except OSError as exc:
            raise ConfigError(f"cannot write the log {path!r}: {exc.strerror or exc}.") from exc
        file.setFormatter(_Json())
        # A full disk must not end a server, nor may a line that cannot be written.
        failed = lambda record: _log.warning("cannot write to the log %s", path, exc_info=True)  # noqa: E731
        file.handleError = failed  # type: ignore[method-assign]
        self._file, self._dropped = file, 0
        self._waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._writer = logging.handlers.QueueListener(self._waiting, file)
        self._writer.start()

    def write(self, line: Mapping[str, Any]) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self.write({"level": "warning", "message": f"{dropped} lines were dropped"})
        self._waiting.put(logging.LogRecord("kindler.requests", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.stop()
        self._file.close()


class RequestLog:
    """Writes all requests to the access log, and changes and refusals to the audit log, where there are any.

    The access log has requests from a level on: "info" has all, "warning" those with a 4xx status or worse,
    "error" those with a 5xx status.
    """

    def __init__(self, access: str | None = None, audit: str | None = None, level: str = "info") -> None:
        self._access = JsonLog(access) if access else None
        self._audit = self._access if audit and audit == access else JsonLog(audit) if audit else None
        self._least = LEVELS.index(level)

    def add(self, entry: Entry, seconds: float) -> None:
        audited = self._audit is not None and (entry.changes or entry.status in (401, 403))
        if self._access is None and not audited:
            return
        line = entry.line(seconds)
        if self._access is not None and LEVELS.index(line["level"]) >= self._least:
            self._access.write({"log": "access", **line})
        if self._audit is not None and audited:
            self._audit.write({"log": "audit", **line})

    def close(self) -> None:
        for log in {self._access, self._audit}:
            if log is not None:
                log.close()


def configure(level: str, form: str) -> None:
    """Send the server's own messages from a level on to standard error, as "text" or "json"."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_Json() if form == "json" else plain)
    logger = logging.getLogger("kindler")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: Any = record.msg  # of a request; else a text
        if not isinstance(line, Mapping):
            time = datetime.fromtimestamp(record.created, timezone.utc)
            line = {
                "log": "server",
                "time": time.isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
            }
            if record.exc_info:
                line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
