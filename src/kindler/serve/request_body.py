"""Reads the bodies of requests: none too large, none too slow, and not too much of them at once."""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.settings import ServeSettings

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Unpack: TypeAlias = Callable[[bytes, str, int], Awaitable[bytes]]  # as `decompressed`

_CLOSE = {"connection": "close"}  # what is left of the body would be taken for the next request
# What is packed in more than the first, or becomes more than the second, is unpacked elsewhere: putting its
# pieces together holds Python's lock.
_HERE_PACKED, _HERE_BYTES = 16 << 10, 1 << 20
# A body that was refused is a costly one if it was larger than this. Answers about such bodies are held back,
# so that they take no more than a share of the server's time; the first ones come at once.
_COSTLY_BYTES = 64 << 10
_REFUSALS = (400, 413, 415, 422)
_REFUSING_SHARE, _REFUSING_CREDIT_S, _LONGEST_PAUSE_S = 0.05, 5.0, 10.0
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class ClientGoneError(Exception):
    """The client went away before it had sent its request."""


class Bodies:
    """The bodies that a server holds."""

    def __init__(self, settings: ServeSettings, unpack: Unpack | None = None) -> None:
        self._settings = settings
        self._unpack = unpack or _in_thread
        self.held_bytes = 0
        self._refusing_s, self._refused_at = 0.0, 0.0

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        """A whole body, decompressed. It counts as held until `release`.

        Raises:
            Problem: 400, 408, 413, 415 or 503: it is broken, too slow, too large, of an unknown encoding,
                or too much is held already.
            ClientGoneError: Nobody sends it any more.
        """
        limit = self._settings.body_bytes
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > limit:
            raise Problem(413, f"the body has {declared[:20]} bytes; at most {limit} are allowed.", _CLOSE)
        parts: list[bytes] = []
        try:
            with _within(self._settings.timeout_s):
                await self._gather(receive, parts)
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            coding = headers.get("content-encoding", "").strip().lower()
            content = body
            if coding not in ("", "identity"):
                content = await self.decompressed(body, coding, limit)
        except TimeoutError as exc:
            self.held_bytes -= sum(map(len, parts))
            late = f"the body did not arrive within {self._settings.timeout_s:g} s."
            raise Problem(408, late, _CLOSE) from exc
        except BaseException:
            self.held_bytes -= sum(map(len, parts))
            raise
        self.held_bytes += len(content) - len(body)
        return content

    async def decompressed(self, body: bytes, coding: str, limit: int) -> bytes:
        """What `decompressed` gives."""
        if len(body) <= _HERE_PACKED:
            try:
                return await _in_thread(body, coding, min(limit, _HERE_BYTES))
            except Problem as exc:
                if exc.status != 413 or limit <= _HERE_BYTES:
                    raise
        return await self._unpack(body, coding, limit)

    def release(self, body: bytes) -> None:
        """A body that was read is not needed any more."""
        self.held_bytes -= len(body)

    @contextmanager
    def holding(self, body: bytes) -> Iterator[None]:
        """Count a body that something else has read; a 503 Problem if too much is held already."""
        if self.held_bytes and self.held_bytes + len(body) > self._settings.queue_bytes:
            raise self._busy(self.held_bytes)
        self.held_bytes += len(body)
        try:
            yield
        finally:
            self.held_bytes -= len(body)

    def pause_after(self, error: Exception, size: int, seconds: float) -> float:
        """Seconds to wait before the client is told why its body, of a size, was refused.

        Somebody who sends bodies without a pause that are costly to refuse, as it took `seconds` to find out,
        would keep the server from its work.
        """
        problem = as_problem(error)
        if problem is None or problem.status not in _REFUSALS:  # not the body's fault
            return 0.0
        if size <= _COSTLY_BYTES and not problem.costly:
            return 0.0
        now = time.monotonic()
        paid = _REFUSING_SHARE * (now - self._refused_at)
        self._refusing_s, self._refused_at = max(0.0, self._refusing_s - paid) + seconds, now
        debt = max(0.0, self._refusing_s - _REFUSING_CREDIT_S)
        return min(_LONGEST_PAUSE_S, debt / _REFUSING_SHARE)

    @staticmethod
    def _busy(others: int, headers: Mapping[str, str] | None = None) -> Problem:
        text = f"the server is busy with {others} bytes of other requests."
        return Problem(503, text, {**(headers or {}), "retry-after": "1"})

    async def _gather(self, receive: Receive, parts: list[bytes]) -> None:
        settings = self._settings
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > settings.body_bytes:
                raise Problem(413, f"the body has more than {settings.body_bytes} bytes.", _CLOSE)
            others = self.held_bytes - (size - len(part))
            if others and others + size > settings.queue_bytes:
                raise self._busy(others, _CLOSE)
            parts.append(part)
            self.held_bytes += len(part)
            if not message.get("more_body"):
                return


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """As `anyio.fail_after`, which takes four times as long: every prediction passes here."""
    task = asyncio.current_task()
    late = False

    def end() -> None:
        nonlocal late
        late = True
        if task is not None:
            task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        yield
    except asyncio.CancelledError as exc:
        # Somebody else may have cancelled it as well, which then counts.
        if not late or (sys.version_info >= (3, 11) and task is not None and task.uncancel()):
            raise
        raise TimeoutError from exc
    finally:
        timer.cancel()


async def _in_thread(body: bytes, coding: str, limit: int) -> bytes:
    return await asyncio.to_thread(decompressed, body, coding, limit)


def decompressed(body: bytes, coding: str, limit: int) -> bytes:
    """A body as it was before it was compressed.

    Raises:
        Problem: 400, 413 or 415: it is broken, becomes larger than `limit`, or is of an unknown coding.
    """
    if coding not in _WINDOWS:
        raise Problem(415, f"unsupported content encoding {coding[:40]!r}; expected gzip or deflate.")
    engine = zlib.decompressobj(_WINDOWS[coding])
    try:
        content = engine.decompress(body, limit + 1)
    except zlib.error as exc:
        raise Problem(400, f"the body is not valid {coding}: {exc}.") from exc
    if len(content) > limit:
        raise Problem(413, f"the body has more than {limit} bytes when decompressed.")
    if engine.unused_data:
        raise Problem(400, f"the body has data after the end of its {coding} stream.")
    if not engine.eof:
        raise Problem(400, f"the body ends in the middle of its {coding} stream.")
    return content
