"""A child process for what is not trusted: started, called, watched and killed by its parent.

One call at a time, or a few if its target can begin one while it computes another. Whatever happens to the
child, the calls that it was in come to an end: with an answer, with the child's own exception, or with
`ProcessLost`. What it says is checked like what a stranger says. This module knows arrays, limits and the
name of a target to load; what the target does is its user's business.
`SandboxProcess` lives on an event loop, `BlockingProcess` is the same for code that has none.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import orjson

from kindler import sandbox
from kindler.data.received import MOST_VALUES, check_json
from kindler.engine import fork_server
from kindler.sandbox.child import CALL, INPUT_BYTES, REPLY, WORD, decoded_error
from kindler.sandbox.memory import Area, Layout, Parts, layout, read_arrays

_log = logging.getLogger("kindler.sandbox")
_ENTRY = "kindler.sandbox.child:main"
_MAX_HEADER_BYTES = 8 << 20
_MAX_HEADER_VALUES = 1 << 19
_LARGE_BYTES = 1 << 20  # is copied in a thread
_WATCH_S = 0.25  # between two looks at a process
_KEPT_BYTES = 2000  # of what it prints: the first, and the last
_READ_BYTES, _PRINT_PAUSE_S = 1 << 16, 0.01
_EXIT_S = 5.0
_T = TypeVar("_T")


class ProcessLost(Exception):
    """The process ended in the middle of a call.

    `reason` follows "the model's process". It was killed if the call took too long (`hung`), if it took too
    much memory (`by_memory`) or if its answer makes no sense (`malformed`). `exit_code` is negative for a
    signal.
    """

    def __init__(
        self, reason: str, *, hung: bool = False, by_memory: bool = False, malformed: bool = False
    ) -> None:
        self.reason = reason
        self.hung = hung
        self.by_memory = by_memory
        self.malformed = malformed
        self.exit_code = -signal.SIGKILL
        super().__init__(f"the model's process {reason}")


@dataclass(frozen=True, slots=True)
class Reply:
    """How a call ended: with outputs and fields, or with what was raised, or with the loss of the process."""

    outputs: dict[str, Any]
    error: Exception | None = None
    fields: dict[str, Any] = field(default_factory=dict)


Done: TypeAlias = Callable[[Reply], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a process is started, and what it may take.

    Attributes:
        recipe: What it is forked from; the target is imported there, too.
        target: The function that it loads, as "module:function": see `child.Target`.
        options: What the target gets; JSON.
        sandboxed: Whether it is sandboxed; None: where the system can.
        readable: What it may read, besides libraries.
        call_s: Seconds that a call may take; None for any.
        output_bytes: The most that the outputs of a call may take.
        calls: How many may be under way at a time.
        printed: Gets what it prints; otherwise a little of that is kept, and logged if it crashes.
    """

    recipe: fork_server.Recipe
    target: str
    options: Mapping[str, Any]
    sandboxed: bool | None = True
    readable: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    load_s: float
    call_s: float | None
    memory_bytes: int
    output_bytes: int
    calls: int = 1
    printed: Callable[[bytes], None] | None = None


@dataclass(slots=True)
class _Call:
    """A call that is under way, in the area of its number."""

    number: int
    done: Done
    timer: asyncio.TimerHandle | None = None
    inputs: Area | None = None  # large ones, while it computes
    arrow: bool = False
    most_values: int = MOST_VALUES
    most_output: int = 0
    is_reading: bool = False


class SandboxProcess:
    """A process, seen from an event loop.

    Large copies are made, and its end is waited for, in threads of `executor`. `lost` is told once, after the
    call that the process was in, that it is gone though nobody ended it.
    """

    def __init__(
        self,
        child: fork_server.Child,
        start: Start,
        *,
        executor: Executor | None,
        lost: Callable[[SandboxProcess, ProcessLost], None] = lambda process, why: None,
    ) -> None:
        self.pid = child.pid
        self._child = child
        self._start = start
        self._executor = executor
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._sock = child.channel.socket
        self._sock.setblocking(False)
        # What is not written takes no memory.
        self._areas = [Area.create(INPUT_BYTES + start.output_bytes) for _ in range(start.calls)]
        self._calls: list[_Call | None] = [None] * start.calls
        self._received = b""
        self._printed_first = self._printed_last = b""
        self._why: ProcessLost | None = None  # once it is being ended
        self._over = False
        os.set_blocking(child.output.fileno(), False)
        self._loop.add_reader(self._sock.fileno(), self._receive)
        self._listen_to_output()
        self._watcher = self._loop.call_later(_WATCH_S, self._watch)

    @classmethod
    async def started(
        cls,
        start: Start,
        *,
        loads: Executor | None,
        moves: Executor | None,
        lost: Callable[[SandboxProcess, ProcessLost], None] = lambda process, why: None,
    ) -> tuple[SandboxProcess, Any]:
        """Start a process and have it load its target; returns what the target says of itself, unchecked.

        It is waited for in `loads`, and large copies are made in `moves`.

        Raises:
            ProcessLost: It ended, or took too long.
            KindlerError: The target cannot be loaded.
            RemoteError: Loading it raised something else.
        """
        # What is imported after the fork may start threads, and only a process with one can be sandboxed.
        imports = (_ENTRY.partition(":")[0], start.target.partition(":")[0], *start.recipe.preload)
        fork = functools.partial(
            fork_server.start_child,
            replace(start.recipe, preload=imports),
            owner=os.getpid(),
            timeout_s=start.load_s,
            environment=start.environment,
            entry=_ENTRY,
        )
        child = await asyncio.get_running_loop().run_in_executor(loads, fork)
        process = cls(child, start, executor=moves, lost=lost)
        try:
            reply = await process._reply(process._load)
            if "loaded" not in reply.fields:
                raise ProcessLost("sent a malformed reply", malformed=True)
            return process, reply.fields["loaded"]
        except BaseException:
            process.end()
            raise

    def call(
        self,
        fields: Mapping[str, Any],
        parts: Parts,
        done: Done,
        *,
        growth_bytes: int | None = None,
        arrow: bool = False,
        most_values: int = MOST_VALUES,
    ) -> None:
        """Begin a call; `done` is told of its end, on the event loop, and never before this returns.

        Args:
            fields: What the target's handler gets; JSON.
            parts: Arrays that it gets, of several requests, which become one; or bytes.
            done: Is told once.
            growth_bytes: How many bytes of memory it may take more than it has; None for its own limit alone.
            arrow: Whether objects may come back in Arrow's form.
            most_values: The values that objects that come back may be together.
        """
        limit_s = self._start.call_s
        call = self._begin(done, limit_s, f"did not answer within {limit_s or 0:g} s")
        call.arrow, call.most_values = arrow, most_values
        call.most_output = min(self._start.output_bytes, growth_bytes or self._start.output_bytes)
        limits = {"arrow": arrow, "output_bytes": call.most_output}
        try:
            plan = layout(parts)
            header = orjson.dumps({**fields, **limits, "arrays": plan.entries})
        except Exception as exc:  # noqa: BLE001 - rows that cannot be sent are the fault of whoever sent them
            failed = Reply({}, exc if isinstance(exc, TypeError) else TypeError(str(exc)))
            self._loop.call_soon(self._finish, call, failed)
            return
        if self._over:
            if self._why is not None:  # otherwise `_ended` ends the call, too
                self._loop.call_soon(self._finish, call, Reply({}, self._why))
            return
        if growth_bytes is not None:
            self._limit_growth(growth_bytes)
        size = plan.size + len(header)
        area = self._areas[call.number] if size <= INPUT_BYTES else Area.create(size, sealed=False)
        if plan.size < _LARGE_BYTES:
            self._send(call, plan, header, area, None)
            return
        writing = self._loop.run_in_executor(self._executor, plan.write, area.memory)
        writing.add_done_callback(lambda copied: self._send(call, plan, header, area, copied))

    async def ask(self, fields: Mapping[str, Any], parts: Parts, **limits: Any) -> Reply:
        """`call`, awaited: an error is raised."""
        return await self._reply(lambda done: self.call(fields, parts, done, **limits))

    def own_bytes(self) -> int:
        """What it has in memory and shares with no other process, as far as the system says."""
        try:
            with open(f"/proc/{self.pid}/smaps_rollup", "rb") as file:
                lines = [line.split() for line in file if line.startswith(b"Private_")]
            return sum(int(words[1]) for words in lines) << 10
        except (OSError, IndexError, ValueError):
            return self._pages(1)

    def lose(self, why: ProcessLost) -> None:
        """Kill it though it may be in a call, which then ends with `why`."""
        if self._why is None and not self._over:
            self._why = why
            self._child.kill()

    def end(self) -> None:
        """Kill it; `lost` is not called."""
        if not self._over:
            self._why = self._why or ProcessLost("was ended")
            self._child.kill()
            self._stop_listening()
            self._finish_all(self._why)
            self._close()

    def _pages(self, column: int) -> int:
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[column]) * resource.getpagesize()
        except (OSError, IndexError, ValueError):
            return 0

    def _limit_growth(self, growth_bytes: int) -> None:
        """From outside, as a sandboxed process cannot change its own limits."""
        if data := self._pages(5):
            with suppress(OSError, AttributeError):
                _, hard = resource.prlimit(self.pid, resource.RLIMIT_DATA)
                soft = data + growth_bytes
                soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
                resource.prlimit(self.pid, resource.RLIMIT_DATA, (soft, hard))

    def _load(self, done: Done) -> None:
        start = self._start
        order = {
            "target": start.target,
            "options": dict(start.options),
            "sandboxed": start.sandboxed,
            "readable": start.readable,
            "memory_bytes": start.memory_bytes,
        }
        self._begin(done, start.load_s, f"did not load the model within {start.load_s:g} s")
        first = self._areas[0]
        _, length = first.write(orjson.dumps(order))
        word = WORD.pack(CALL, 0, first.size, length)
        socket.send_fds(self._sock, [word], [area.fd for area in self._areas])

    async def _reply(self, begin: Callable[[Done], None]) -> Reply:
        future: asyncio.Future[Reply] = self._loop.create_future()

        def done(reply: Reply) -> None:
            if not future.done():
                future.set_result(reply)

        begin(done)
        reply = await future
        if reply.error is not None:
            raise reply.error
        return reply

    def _begin(self, done: Done, limit_s: float | None, late: str) -> _Call:
        if None not in self._calls:
            raise RuntimeError("the process is in as many calls as it may be")
        number = self._calls.index(None)
        call = self._calls[number] = _Call(number, done)
        if limit_s is not None:
            call.timer = self._loop.call_later(limit_s, lambda: self.lose(ProcessLost(late, hung=True)))
        return call

    def _send(
        self, call: _Call, plan: Layout, header: bytes, area: Area, copied: asyncio.Future[None] | None
    ) -> None:
        large = area if area is not self._areas[call.number] else None
        try:
            if self._over or self._calls[call.number] is not call:
                return
            if copied is None:
                plan.write(area.memory)
            else:
                copied.result()
            word = WORD.pack(CALL, call.number, *area.write(header, plan.size))
            if large is None:
                self._sock.send(word)
            else:
                socket.send_fds(self._sock, [word], [area.fd])
                call.inputs, large = large, None
        except OSError:
            pass  # it is gone; `_receive` notices
        except Exception as exc:  # noqa: BLE001 - values that numpy cannot copy are whoever's sent them
            self._loop.call_soon(self._finish, call, Reply({}, exc))
        finally:
            if large is not None:
                large.close()

    def _watch(self) -> None:
        """Memory and threads that no limit of the kernel counts: while it loads, computes and waits."""
        excess = sandbox.excess(
            self.pid,
            self._start.memory_bytes,
            threads=None if self._start.sandboxed is False else sandbox.MAX_THREADS,
            shared_bytes=sum(area.used_bytes for area in self._areas),
        )
        if excess is not None:
            self.lose(ProcessLost(excess, by_memory="memory" in excess))
        self._watcher = self._loop.call_later(_WATCH_S, self._watch)

    def _receive(self) -> None:
        try:
            data = self._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._find_out_why()
            return
        self._received += data
        while len(self._received) >= WORD.size and not self._over:
            word, self._received = self._received[: WORD.size], self._received[WORD.size :]
            try:
                self._handle(*WORD.unpack(word))
            except Exception as exc:  # noqa: BLE001 - it may say anything
                self._reject(exc)
                return

    def _handle(self, kind: bytes, number: int, first: int, second: int) -> None:
        call = self._calls[number] if number < len(self._calls) else None
        if call is None or call.is_reading:
            raise ValueError("it was not asked")
        area, end = self._areas[number], first + second
        if kind != REPLY or second > _MAX_HEADER_BYTES or end > area.size:
            raise ValueError("no such message")
        header = orjson.loads(check_json(area.memory[first:end], _MAX_HEADER_VALUES))
        if "error" in header:
            self._finish(call, Reply({}, decoded_error(header["error"])))
            return
        size = sum(entry[4] for entry in header["arrays"])
        if size > call.most_output:
            raise ValueError(f"outputs of {size} bytes; at most {call.most_output} are allowed")
        if size > _LARGE_BYTES or end > INPUT_BYTES:
            call.is_reading = True
            reading = self._loop.run_in_executor(self._executor, self._outputs, call, header, end)
            reading.add_done_callback(lambda read: self._read(call, read))
        else:
            self._finish(call, self._outputs(call, header, end))

    def _outputs(self, call: _Call, header: dict[str, Any], end: int) -> Reply:
        entries, area = header.pop("arrays"), self._areas[call.number]
        outputs = read_arrays(
            area.memory, entries, trusted=False, arrow=call.arrow, most_values=call.most_values
        )
        if end > INPUT_BYTES:
            area.clear(INPUT_BYTES)
        return Reply(outputs, fields=header)

    def _read(self, call: _Call, reading: asyncio.Future[Reply]) -> None:
        if reading.cancelled() or self._why is not None:  # what a process said that is being ended
            return
        if (error := reading.exception()) is not None:
            self._reject(error)
        else:
            self._finish(call, reading.result())

    def _reject(self, error: BaseException) -> None:
        self.lose(ProcessLost(f"sent a malformed reply ({error})", malformed=True))

    def _finish_all(self, why: ProcessLost) -> None:
        for call in self._calls:
            if call is not None:
                self._finish(call, Reply({}, why))

    def _finish(self, call: _Call, reply: Reply) -> None:
        if self._calls[call.number] is not call:
            return
        self._calls[call.number] = None
        if call.inputs is not None:
            close = functools.partial(call.inputs.close, empty=self._start.sandboxed is not False)
            try:
                self._loop.run_in_executor(self._executor, close)
            except RuntimeError:
                close()  # the parent is stopping
        if call.timer is not None:
            call.timer.cancel()
        if self._start.printed is not None and not self._over:
            self._read_output()  # what it printed before it answered
        call.done(reply)

    def _read_output(self) -> None:
        """What it prints is passed on, or a little of it is kept, to be shown if it crashes."""
        output = self._child.output.fileno()
        try:
            printed = os.read(output, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            printed = b""
        if len(printed) in (0, _READ_BYTES):
            self._loop.remove_reader(output)
        if len(printed) == _READ_BYTES:  # who prints without end has to wait for us, and not we for it
            self._loop.call_later(_PRINT_PAUSE_S, self._listen_to_output)
        if self._start.printed is not None:
            self._start.printed(printed)
        self._printed_first += printed[: _KEPT_BYTES - len(self._printed_first)]
        self._printed_last = (self._printed_last + printed)[-_KEPT_BYTES:]

    def _listen_to_output(self) -> None:
        if not self._over:
            self._loop.add_reader(self._child.output.fileno(), self._read_output)

    def _find_out_why(self) -> None:
        """Its socket is closed."""
        if self._over:
            return
        self._read_output()
        self._stop_listening()
        asking = self._loop.run_in_executor(self._executor, self._exit_code)
        asking.add_done_callback(self._ended)

    def _exit_code(self) -> int:
        try:
            return self._child.wait(_EXIT_S)[0]
        except TimeoutError:
            self._child.kill()
            return -signal.SIGKILL

    def _ended(self, asking: asyncio.Future[int]) -> None:
        code = 0 if asking.cancelled() or asking.exception() is not None else asking.result()
        self._why = why = self._why or ProcessLost(_exit_reason(code))
        why.exit_code = code
        if not why.hung and not why.by_memory and self._start.printed is None:
            first, last = (
                part.decode("utf-8", "replace") for part in (self._printed_first, self._printed_last)
            )
            first, found, _ = first.partition("\nExtension modules: ")  # pages of names, which end a report
            _log.warning("%s\n%s", why, first if found or first == last else f"{first}\n...\n{last}")
        self._finish_all(why)
        self._close()
        self._lost(self, why)

    def _stop_listening(self) -> None:
        self._over = True
        self._watcher.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_reader(self._child.output.fileno())
        self._sock.close()

    def _close(self) -> None:
        self._child.close()
        for area in self._areas:
            area.close()


class BlockingProcess:
    """The same process for code without an event loop; one thread of this program runs one for all of them.
    Raises what `SandboxProcess.started` raises."""

    def __init__(self, start: Start) -> None:
        self._process, _ = self._awaited(SandboxProcess.started(start, loads=None, moves=None))

    def call(self, fields: Mapping[str, Any], parts: Parts) -> Reply:
        """Raises what the call ended with, if not with an answer."""
        return self._awaited(self._process.ask(fields, parts))

    def close(self) -> None:
        _blocking_loop(os.getpid()).call_soon_threadsafe(self._process.end)

    @staticmethod
    def _awaited(work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, _blocking_loop(os.getpid())).result()


@functools.cache
def _blocking_loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sandbox-processes", daemon=True).start()
    return loop


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
