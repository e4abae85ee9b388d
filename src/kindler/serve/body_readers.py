"""Processes that read large or packed bodies, so that the server neither stands still nor grows meanwhile.

A few bytes can stand for gigabytes, and a parser can hold Python's lock for seconds. In a process of its own
neither reaches anybody else: what takes more memory than its bytes can be worth fails, and what takes too
long is ended. A parser with a flaw reaches nothing either: the process is sandboxed where the system can.
`load` is that process's side, `Readers` the server's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, TypeVar

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
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Codec, Sent
from kindler.serve.protocols.mlflow import Mlflow
from kindler.serve.protocols.omega import RAW, OmegaCodec
from kindler.serve.protocols.tables import ARROW, PARQUET, read_table
from kindler.serve.protocols.tfserving import TfServing
from kindler.serve.protocols.v2 import LENGTH, V2
from kindler.serve.request_body import decompressed
from kindler.serve.requests import InferRequest, Target, check_rows

try:
    from kindler.serve.grpc_api.tensors import InferMessage, request_from
except ModuleNotFoundError:  # protobuf; then nobody sends messages either
    pass

READERS = max(1, min(4, usable_cores() // 2))
_CODECS: dict[str, Codec] = {codec.name: codec for codec in (V2(), TfServing(), Mlflow(), OmegaCodec())}
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
_T = TypeVar("_T")


def where_read(sent: Sent) -> str:
    """Where a body is read: "here" if that takes no time, in a "thread", or in a "process" of its own.

    Bodies of bytes and Arrow are looked at where they lie. Text becomes objects, which takes Python's lock,
    and a Parquet file may become anything.
    """
    kind, size = sent.content_type, len(sent.body)
    if kind == PARQUET:
        return "process"
    if kind == "text/csv":
        return "process" if size > _CSV_BYTES else "here"
    length = sent.headers.get(LENGTH, "")
    text = min(size, int(length)) if length.isdecimal() and len(length) < 12 else size
    if kind in (ARROW, RAW) or text < size:
        where = "thread" if size > _BINARY_BYTES else "here"
        return "process" if text > _TEXT_BYTES and text < size else where
    return "process" if size > _TEXT_BYTES else "here"


def load(options: Fields) -> tuple[Fields, Handler]:
    """The target of a process that reads bodies."""

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
            Sent(body, asked["headers"], asked["query"]), signature, target
        )
    check_rows(request, asked["most_rows"])
    answer = {name: getattr(request, name) for name in _BESIDE_INPUTS}
    answer["params"] = dict(request.params)
    if request.outputs is not None:
        answer["outputs"] = {name: dict(wishes) for name, wishes in request.outputs.items()}
    return answer, request.inputs


class Readers:
    """Reads bodies in processes of their own, which start when they are first needed.

    Args:
        executor: Where large copies are made and checked.
        timeout_s: Seconds that reading a body may take.
        most_rows: The rows that a request may have.
    """

    def __init__(self, executor: Executor, timeout_s: float, most_rows: int) -> None:
        self._executor = executor
        self._most_rows = most_rows
        self._timeout_s = min(timeout_s, _LONGEST_S)
        self._turns = asyncio.Semaphore(READERS)
        self._processes: set[SandboxProcess] = set()
        self._free: list[SandboxProcess] = []

    async def request(self, codec: Codec, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        """What `codec.decode` gives."""
        asked = {
            "what": "request",
            "codec": codec.name,
            "headers": dict(sent.headers),
            "query": dict(sent.query),
            "signature": asdict(signature),
            "target": asdict(target),
            "most_rows": self._most_rows,
        }
        return await self._asked(asked, sent.body, _as_request)

    async def message(self, content: bytes) -> InferRequest:
        """The request of a message of gRPC."""
        return await self._asked({"what": "message", "most_rows": self._most_rows}, content, _as_request)

    async def decompressed(self, body: bytes, coding: str, limit: int) -> bytes:
        """What `request_body.decompressed` gives."""
        asked = {"what": "content", "coding": coding, "limit": limit}
        # Twice: zlib puts its pieces together at the end.
        most = 2 * limit + _SPARE_BYTES
        return await self._asked(asked, body, lambda reply: bytes(reply.outputs["content"]), most)

    async def table(self, body: bytes, content_type: str) -> tuple[pa.Table, str | None]:
        """What `read_table` gives."""
        if where_read(Sent(body, {"content-type": content_type}, {})) == "process":
            return await self._asked({"what": "table", "content_type": content_type}, body, _as_table)
        return await self._in_thread(lambda: read_table(body, content_type))

    def close(self) -> None:
        """End the processes."""
        for process in list(self._processes):
            self._end(process)

    async def _asked(
        self, asked: Fields, body: bytes, read: Callable[[Reply], _T], most: int | None = None
    ) -> _T:
        """What `read` makes of the answer, which is not believed: the process has read a stranger's body."""
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
                found = await self._in_thread(lambda: read(reply))
                is_sound = True
                return found
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
            limit = f"takes more than the {most} bytes of memory that one of its size gets"
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
            target="kindler.serve.body_readers:load",
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


def _refusal(reply: Reply) -> Problem:
    status, message = reply.fields["status"], reply.fields.get("message")
    if type(status) is not int or not 400 <= status < 600 or type(message) is not str:
        raise ValueError("no refusal of a body")
    return Problem(status, message)


def _as_request(reply: Reply) -> InferRequest:
    return InferRequest(inputs=reply.outputs, **reply.fields)


def _as_table(reply: Reply) -> tuple[pa.Table, str | None]:
    return received.arrow_table(reply.outputs["content"]), reply.fields["mode"]
