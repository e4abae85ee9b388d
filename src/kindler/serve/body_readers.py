"""Processes that read large or packed bodies, so that the server neither stands still nor grows meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa

from kindler import jail
from kindler.data import received
from kindler.engine.placement import usable_cores
from kindler.models.signature import Signature
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Codec, Sent
from kindler.serve.protocols.omega import RAW
from kindler.serve.protocols.tables import ARROW, PARQUET, read_table
from kindler.serve.protocols.v2 import LENGTH
from kindler.serve.request_codec import read_frame, signature_told, unpacked_request, write_frame
from kindler.serve.requests import InferRequest, Target

READERS = max(1, min(4, usable_cores() // 2))
_GROWTH, _SPARE_BYTES = 32, 64 << 20  # JSON's smallest values become about 25 times as large
_TEXT_BYTES, _BINARY_BYTES, _CSV_BYTES = 1 << 20, 1 << 18, 8 << 10
_LONGEST_S = 30.0
_NICE = 10
_PIPE_BYTES = 1 << 20
_Read = TypeVar("_Read")
_SOURCE = str(Path(__file__).resolve().parents[2])


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


class Readers:
    """Reads bodies in processes of their own, which start when they are first needed.

    Args:
        executor: Whose threads use a process each. It must have no more than `READERS`.
        timeout_s: Seconds that reading a body may take.
        most_rows: The rows that a request may have.
    """

    def __init__(self, executor: Executor, timeout_s: float, most_rows: int) -> None:
        self._executor = executor
        self._most_rows = most_rows
        self._timeout_s = min(timeout_s, _LONGEST_S)
        self._free: deque[subprocess.Popen[bytes]] = deque()
        self._processes: set[subprocess.Popen[bytes]] = set()

    async def request(self, codec: Codec, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        """What `codec.decode` gives."""
        header = {
            "what": "request",
            "codec": codec.name,
            "headers": dict(sent.headers),
            "query": dict(sent.query),
            "signature": signature_told(signature),
            "target": asdict(target),
            "most_rows": self._most_rows,
        }
        return await self._in_thread(lambda: self._request(header, sent.body))

    async def decompressed(self, body: bytes, coding: str, limit: int) -> bytes:
        """What `request_body.decompressed` gives."""
        header = {"what": "content", "coding": coding, "limit": limit}
        # Twice: zlib puts its pieces together at the end.
        most = 2 * limit + _SPARE_BYTES
        return await self._in_thread(lambda: self._asked(header, body, _only_buffer, most))

    async def message(self, content: bytes) -> InferRequest:
        """The request of a message of gRPC."""
        header = {"what": "message", "most_rows": self._most_rows}
        return await self._in_thread(lambda: self._request(header, content))

    def _request(self, header: Mapping[str, Any], body: bytes) -> InferRequest:
        # Two bytes of a body are a value at most.
        return self._asked(header, body, lambda head, buffers: unpacked_request(head, buffers, len(body)))

    async def table(self, body: bytes, content_type: str) -> tuple[pa.Table, str | None]:
        """What `read_table` gives."""

        def read() -> tuple[pa.Table, str | None]:
            header = {"what": "table", "content_type": content_type}
            return self._asked(
                header, body, lambda head, buffers: (received.arrow_table(*buffers), head["mode"])
            )

        where = where_read(Sent(body, {"content-type": content_type}, {}))
        return await self._in_thread(read if where == "process" else lambda: read_table(body, content_type))

    def close(self) -> None:
        """End the processes."""
        for process in list(self._processes):
            self._ended(process)

    async def _in_thread(self, work: Callable[[], _Read]) -> _Read:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except Problem as exc:
            exc.costly = True
            raise

    def _asked(
        self,
        header: Mapping[str, Any],
        body: bytes,
        read: Callable[[dict[str, Any], list[bytes]], _Read],
        most: int | None = None,
    ) -> _Read:
        """What `read` makes of the answer, which is not believed: the process has read a stranger's body."""
        process = self._process()
        late = threading.Timer(self._timeout_s, process.kill)
        late.daemon = True
        late.start()
        most = _GROWTH * len(body) + _SPARE_BYTES if most is None else most
        try:
            with _at_most(process.pid, len(body) + most):
                write_frame(_pipe(process.stdin), {**header, "most_bytes": most}, [body])
                head, buffers = read_frame(_pipe(process.stdout), most)
            refused = "status" in head
            found: Problem | _Read = _problem(head) if refused else read(head, buffers)
        except (OSError, EOFError) as exc:
            self._ended(process)
            if late.finished.is_set():
                raise Problem(413, f"reading the body took longer than {self._timeout_s:g} s.") from exc
            limit = f"takes more than the {most} bytes of memory that one of its size gets"
            raise Problem(413, f"reading the body of {len(body)} bytes {limit}.") from exc
        except Exception as exc:  # it answers what cannot be: whoever sent the body has taken it over
            self._ended(process)
            raise Problem(400, "the body cannot be read.") from exc
        finally:
            late.cancel()
        self._free.append(process)
        if isinstance(found, Problem):
            raise found
        return found

    def _process(self) -> subprocess.Popen[bytes]:
        """One that has nothing to do, or a new one."""
        with suppress(IndexError):
            while True:
                free = self._free.pop()
                if free.poll() is None:
                    return free
                self._ended(free)
        own = {name: os.environ[name] for name in jail.ENVIRONMENT if name in os.environ}
        path = os.pathsep.join([_SOURCE, *filter(None, [own.get("PYTHONPATH")])])
        # One arena and a pool without reserves: what is asked for is what is counted. And one thread, as only
        # such a process can be locked in.
        alone = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        alone |= {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
        process = subprocess.Popen(
            [sys.executable, "-m", "kindler.serve._body_reader_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**own, **alone, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the server, which ends it
        )
        self._processes.add(process)
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError, AttributeError):  # what it is made with holds 64 KiB: a wait for each
                fcntl.fcntl(_pipe(pipe), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with suppress(OSError):  # it has ended
            # Whoever sends much waits longer than whoever sends little, also for a process to start.
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        try:
            read_frame(_pipe(process.stdout))  # it is ready: what it takes from now on is the body's doing
        except (OSError, EOFError) as exc:
            self._ended(process)
            raise Problem(503, "the body cannot be read now.", {"retry-after": "5"}) from exc
        return process

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        self._processes.discard(process)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # what was not written yet has nowhere to go


@contextmanager
def _at_most(pid: int, most: int) -> Iterator[None]:
    """Let a process grow by so many bytes; where the system counts no pages, there is no bound.

    From here, as a process that is locked in cannot change its own limits.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            data = int(file.read().split()[5]) * resource.getpagesize()
        soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        resource.prlimit(pid, resource.RLIMIT_DATA, (data + most, hard))
    except (OSError, AttributeError, IndexError):
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_DATA, (soft, hard))


def _problem(head: Mapping[str, Any]) -> Problem:
    return Problem(int(head["status"]), str(head["message"]))


def _only_buffer(head: dict[str, Any], buffers: list[bytes]) -> bytes:
    (content,) = buffers
    return content


def _pipe(pipe: Any) -> BinaryIO:
    found: BinaryIO = pipe
    return found
