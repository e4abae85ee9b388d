"""The bodies of requests: none too large, none too slow, not too much of them at once, and how they are read.

A few bytes can stand for gigabytes, and a parser can hold Python's lock for seconds. So large or packed
bodies are read in processes of their own, where neither reaches anybody else: what takes more memory than its
bytes can be worth fails, and what takes too long is ended. A parser with a flaw reaches nothing either: the
process is sandboxed where the system can. `load` is that process's side, `Bodies` the server's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from kindler import sandbox
from kindler.data import received
from kindler.data.arrow import stream
from kindler.engine.fork_server import Recipe
from kindler.engine.placement import half_of_memory, usable_cores
from kindler.errors import KindlerError
from kindler.models.signature import Signature, signature_from
from kindler.sandbox.child import Fields, Handler, RemoteError
from kindler.sandbox.process import ProcessLost, Reply, SandboxProcess, Start
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.protocols import Codec, InferRequest, RawRequest, Target
from kindler.serve.protocols.mlflow import Mlflow
from kindler.serve.protocols.omega import RAW, OmegaCodec
from kindler.serve.protocols.tables import ARROW, CSV, PARQUET, read_table
from kindler.serve.protocols.tfserving import TfServing
from kindler.serve.protocols.v2 import LENGTH, V2, TooManyTexts
from kindler.serve.settings import ServeSettings

try:
    from kindler.serve.grpc_api.messages import InferMessage, request_from
except ModuleNotFoundError:  # protobuf; then nobody sends messages either
    pass

_T = TypeVar("_T")
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

READERS = max(1, min(4, usable_cores() // 2))
_CODECS: dict[str, Codec] = {codec.name: codec for codec in (V2(), TfServing(), Mlflow(), OmegaCodec())}
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
_GROWTH, _SPARE_BYTES = 32, 64 << 20  # JSON's smallest values become about 25 times as large
_TEXT_BYTES, _BINARY_BYTES, _CSV_BYTES = 1 << 20, 1 << 18, 8 << 10
_START_S, _LONGEST_S = 60.0, 30.0
_OUTPUT_BYTES = 4 << 30
_NICE = 10
_BESIDE_INPUTS = tuple(one.name for one in fields(InferRequest) if one.name != "inputs")
# One arena, and pools without reserves that are given back: what is asked for is what is counted.
_MEMORY = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "OMP_NUM_THREADS": "1",
    "HOME": sandbox.EMPTY_HOME,
}


class ClientGoneError(Exception):
    """The client went away before it had sent its request."""


class Bodies:
    """The bodies that a server holds and reads; the executor is where large copies are made and checked."""

    def __init__(self, settings: ServeSettings, executor: Executor | None = None) -> None:
        self._settings = settings
        self._executor = executor
        self.held_bytes = 0
        self._refusing_s, self._refused_at = 0.0, 0.0
        self._timeout_s = min(settings.timeout_s, _LONGEST_S)
        self._turns = asyncio.Semaphore(READERS)
        self._processes: set[SandboxProcess] = set()
        self._free: list[SandboxProcess] = []

    def close(self) -> None:
        for process in list(self._processes):
            self._end(process)

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
                content = await self._decompressed(body, coding, limit)
        except BaseException as exc:
            self.held_bytes -= sum(map(len, parts))
            if not isinstance(exc, TimeoutError):
                raise
            late = f"the body did not arrive within {self._settings.timeout_s:g} s."
            raise Problem(408, late, _CLOSE) from exc
        self.held_bytes += len(content) - len(body)
        return content

    def release(self, body: bytes) -> None:
        """A body that was read is not needed any more."""
        self.held_bytes -= len(body)

    @contextmanager
    def holding(self, body: bytes) -> Iterator[None]:
        """Count a body that something else has read; a 503 Problem if too much is held already."""
        self._take(len(body), 0)
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

    async def decode(
        self, codec: Codec, sent: RawRequest, target: Target, signature: Signature
    ) -> InferRequest:
        """What `codec.decode` gives, wherever that is computed."""
        where = where_read(sent)
        try:
            if where == "here":
                return codec.decode(sent, signature, target)
            if where == "thread":
                return await asyncio.to_thread(codec.decode, sent, signature, target)
        except TooManyTexts:
            pass
        asked = {
            "what": "request",
            "codec": codec.name,
            "headers": dict(sent.headers),
            "query": dict(sent.query),
            "signature": asdict(signature),
            "target": asdict(target),
            "most_rows": self._settings.rows,
        }
        return await self._asked(asked, sent.body, _as_request)

    async def message(self, content: bytes) -> InferRequest:
        """The request of a large message of gRPC."""
        return await self._asked({"what": "message", "most_rows": self._settings.rows}, content, _as_request)

    async def table(self, body: bytes, content_type: str) -> tuple[pa.Table, str | None]:
        if where_read(RawRequest(body, {"content-type": content_type}, {})) == "process":
            return await self._asked({"what": "table", "content_type": content_type}, body, _as_table)
        return await self._in_thread(lambda: read_table(body, content_type))

    async def _gather(self, receive: Receive, parts: list[bytes]) -> None:
        size, most = 0, self._settings.body_bytes
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part: bytes = message.get("body", b"")
            if size + len(part) > most:
                raise Problem(413, f"the body has more than {most} bytes.", _CLOSE)
            self._take(len(part), size, _CLOSE)
            parts.append(part)
            size += len(part)
            if not message.get("more_body"):
                return

    def _take(self, size: int, own: int, headers: Mapping[str, str] | None = None) -> None:
        """Hold more bytes for a body that holds some; a 503 Problem if others hold too many."""
        others = self.held_bytes - own
        if others and others + own + size > self._settings.queue_bytes:
            text = f"the server is busy with {others} bytes of other requests."
            raise Problem(503, text, {**(headers or {}), "retry-after": "1"})
        self.held_bytes += size

    async def _decompressed(self, body: bytes, coding: str, limit: int) -> bytes:
        if len(body) <= _HERE_PACKED:
            try:
                return await asyncio.to_thread(decompressed, body, coding, min(limit, _HERE_BYTES))
            except Problem as exc:
                if exc.status != 413 or limit <= _HERE_BYTES:
                    raise
        asked = {"what": "content", "coding": coding, "limit": limit}
        # Twice: zlib puts its pieces together at the end.
        most = 2 * limit + _SPARE_BYTES
        return await self._asked(asked, body, lambda reply: bytes(reply.outputs["content"]), most)

    async def _asked(
        self, asked: Fields, body: bytes, read: Callable[[Reply], _T], most: int | None = None
    ) -> _T:
        """What `read` makes of a process's answer, which is not believed: it has read a stranger's body."""
        most = _GROWTH * len(body) + _SPARE_BYTES if most is None else most
        async with self._turns:
            process = self._free.pop() if self._free else await self._started()
            is_sound = False  # unless it can be asked again
            try:
                reply = await process.ask(
                    asked,
                    {"body": [body]},
                    growth_bytes=len(body) + most,
                    arrow=True,
                    most_values=len(body),  # two bytes of a body are a value at most
                )
                if "status" in reply.fields:
                    raise _refusal(reply)
                value = await self._in_thread(lambda: read(reply))
                is_sound = True
                return value
            except Problem as exc:
                is_sound = exc.costly = True
                raise
            except Exception as exc:
                is_sound = isinstance(exc, KindlerError | MemoryError | RemoteError)
                raise self._problem(exc, len(body), most) from exc
            finally:
                if not is_sound:
                    self._end(process)
                elif process in self._processes:
                    self._free.append(process)

    def _problem(self, error: Exception, size: int, most: int) -> Problem:
        if isinstance(error, ProcessLost) and error.hung:
            problem = Problem(413, f"reading the body took longer than {self._timeout_s:g} s.")
        elif isinstance(error, MemoryError) or (isinstance(error, ProcessLost) and not error.malformed):
            limit = f"takes more than the {most} bytes of memory allowed for its size"
            problem = Problem(413, f"reading the body of {size} bytes {limit}.")
        else:
            name = f": {error.name}" if isinstance(error, RemoteError) else ""
            problem = Problem(400, f"the body cannot be read{name}.")
        problem.costly = True
        return problem

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except Problem as exc:
            exc.costly = True
            raise

    async def _started(self) -> SandboxProcess:
        start = Start(
            recipe=Recipe(environment=tuple(sorted(_MEMORY.items())), inherits=sandbox.ENVIRONMENT),
            target="kindler.serve.bodies:load",
            options={},
            sandboxed=None,
            load_s=_START_S,
            call_s=self._timeout_s,
            memory_bytes=half_of_memory(),
            output_bytes=_OUTPUT_BYTES,
        )
        try:
            process, _ = await SandboxProcess.started(
                start, loads=self._executor, moves=self._executor, lost=lambda process, _: self._end(process)
            )
        except Exception as exc:
            raise Problem(503, "body decoder unavailable.", {"retry-after": "5"}) from exc
        self._processes.add(process)
        with suppress(OSError):  # it has ended
            # Whoever sends much waits longer than whoever sends little.
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        return process

    def _end(self, process: SandboxProcess) -> None:
        self._processes.discard(process)
        with suppress(ValueError):
            self._free.remove(process)
        process.end()


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


def where_read(sent: RawRequest) -> str:
    """Where a body is read: "here" if that takes no time, in a "thread", or in a "process" of its own.

    Bodies of bytes and Arrow are looked at where they lie. Text becomes objects, which takes Python's lock,
    and a Parquet file may become anything.
    """
    kind, size = sent.content_type, len(sent.body)
    if kind == PARQUET:
        return "process"
    if kind == CSV:
        return "process" if size > _CSV_BYTES else "here"
    length = sent.headers.get(LENGTH, "")
    text = min(size, int(length)) if length.isdecimal() and len(length) < 12 else size
    if kind in (ARROW, RAW) or text < size:
        where = "thread" if size > _BINARY_BYTES else "here"
        return "process" if text > _TEXT_BYTES and text < size else where
    return "process" if size > _TEXT_BYTES else "here"


def load(options: Fields) -> tuple[Fields, Handler]:
    def handle(asked: Fields, parts: dict[str, Any]) -> tuple[Fields, Mapping[str, Any]]:
        try:
            return _read(asked, parts["body"])
        except Problem as exc:
            return {"status": exc.status, "message": exc.message}, {}

    return {}, handle


def _read(asked: Fields, body: bytes) -> tuple[Fields, Mapping[str, Any]]:
    if asked["what"] == "content":
        return {}, {"content": decompressed(body, asked["coding"], asked["limit"])}
    if asked["what"] == "table":
        table, mode = read_table(body, asked["content_type"])
        return {"mode": mode}, {"content": stream(table)}
    if asked["what"] == "message":
        sent = InferMessage(body)
        request = request_from(sent.parsed(), sent.raw)
    else:
        signature, target = signature_from(asked["signature"]), Target(**asked["target"])
        request = _CODECS[asked["codec"]].decode(
            RawRequest(body, asked["headers"], asked["query"]), signature, target
        )
    request.check_rows(asked["most_rows"])
    answer = {name: getattr(request, name) for name in _BESIDE_INPUTS}
    answer["params"] = dict(request.params)
    if request.outputs is not None:
        answer["outputs"] = {name: dict(wishes) for name, wishes in request.outputs.items()}
    return answer, request.inputs


def _refusal(reply: Reply) -> Problem:
    status, message = reply.fields["status"], reply.fields.get("message")
    if type(status) is not int or not 400 <= status < 600 or type(message) is not str:
        raise ValueError("no refusal of a body")
    return Problem(status, message)


def _as_request(reply: Reply) -> InferRequest:
    return InferRequest(inputs=reply.outputs, **reply.fields)


def _as_table(reply: Reply) -> tuple[pa.Table, str | None]:
    return received.arrow_table(reply.outputs["content"]), reply.fields["mode"]


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
