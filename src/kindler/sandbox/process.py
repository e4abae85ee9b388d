"""A child process for what is not trusted: started, called, watched and killed by its parent.

One call at a time. Whatever happens to the child, the call that it was in comes to an end: with an answer,
with the child's own exception, or with `ProcessLost`. What it says is checked like what a stranger says. This
module knows arrays, limits and the name of a target to load; what the target does is its user's business.
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
from kindler.sandbox.child import CALL, NEEDS_ROOM, REPLY, REPLY_IN_ROOM, ROOM, WORD, decoded_error
from kindler.sandbox.memory import Area, Layout, Parts, layout, read_arrays

_log = logging.getLogger("kindler.sandbox")
_ENTRY = "kindler.sandbox.child:main"
_AREA_BYTES = 16 << 20
_MOST_HEADER = 8 << 20
_MOST_FIELDS = 1 << 19  # values in a header
_LARGE_BYTES = 1 << 20  # is copied in a thread
_LOOK_S = 0.25  # between two looks at a process
_KEPT_BYTES = 2000  # of what it prints: the first, and the last
_READ_BYTES, _PRINT_PAUSE_S = 1 << 16, 0.01
_EXIT_S = 5.0
_T = TypeVar("_T")


class ProcessLost(Exception):
    """The process ended in the middle of a call.

    Attributes:
        reason: Why, in words that follow "the model's process".
        hung: Whether it was killed because the call took too long.
        by_memory: Whether it was killed because it took too much memory.
        malformed: Whether it was killed because its answer cannot be.
        exit_code: Of the process; negative for a signal.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a process is started.

    Attributes:
        recipe: What it is forked from; the target is imported there, too.
        target: The function that it loads, as "module:function": see `child.Target`.
        options: What the target gets; JSON.
        sandboxed: Whether it is sandboxed; None: where the system can.
        readable: What it may read, besides libraries.
        environment: Variables of its own.
        load_s: Seconds that loading may take.
        call_s: Seconds that a call may take; None for any.
        memory_bytes: What it may have in memory.
        output_bytes: The most that the outputs of a call may take.
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
    printed: Callable[[bytes], None] | None = None


Done: TypeAlias = Callable[[Reply], None]


class SandboxProcess:
    """A process, seen from an event loop.

    Args:
        child: The process.
        start: What it was started with.
        executor: Where large copies are made, and the end of the process is waited for.
        lost: Is told once, after the call that it was in, that the process is gone though nobody ended it.
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
        self._own = Area.create(_AREA_BYTES)
        self._room: Area | None = None  # for large outputs; made once, or it could have any number of them
        self._gave_room = self._is_reading = False
        self._sent: Area | None = None  # large inputs, while it computes
        self._done: Done | None = None
        self._arrow, self._most_values, self._most_output = False, MOST_VALUES, 0
        self._timer: asyncio.TimerHandle | None = None
        self._heard = b""
        self._head = self._tail = b""
        self._why: ProcessLost | None = None  # once it is being ended
        self._over = False
        os.set_blocking(child.output.fileno(), False)
        self._loop.add_reader(self._sock.fileno(), self._hear)
        self._loop.add_reader(child.output.fileno(), self._overhear)
        self._watch = self._loop.call_later(_LOOK_S, self._look)

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

        Args:
            start: How.
            loads: Where it is waited for.
            moves: Where large copies are made.
            lost: See the class.

        Raises:
            ProcessLost: It ended, or took too long.
            KindlerError: The target cannot be loaded.
            RemoteError: Loading it raised something else.
        """
        loop = asyncio.get_running_loop()
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
        process = cls(await loop.run_in_executor(loads, fork), start, executor=moves, lost=lost)
        try:
            reply = await process._load()
            if reply.error is not None:
                raise reply.error
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
        self._begin(done, limit_s, f"did not answer within {limit_s or 0:g} s")
        self._arrow, self._most_values = arrow, most_values
        self._most_output = min(self._start.output_bytes, growth_bytes or self._start.output_bytes)
        try:
            plan = layout(parts)
            header = orjson.dumps({**fields, "arrays": plan.entries, "arrow": arrow})
        except Exception as exc:  # noqa: BLE001 - rows that cannot be sent are the fault of whoever sent them
            failed = Reply({}, exc if isinstance(exc, TypeError) else TypeError(str(exc)))
            self._loop.call_soon(self._finish, failed)
            return
        if self._over:
            if self._why is not None:  # otherwise `_ended` ends the call, too
                self._loop.call_soon(self._finish, Reply({}, self._why))
            return
        if growth_bytes is not None:
            self._limit_growth(growth_bytes)
        size = plan.size + len(header)
        area = self._own if size <= self._own.size else Area.create(size, sealed=False)
        if plan.size < _LARGE_BYTES:
            self._send(plan, header, area, None)
            return
        writing = self._loop.run_in_executor(self._executor, plan.write, area.memory)
        writing.add_done_callback(lambda copied: self._send(plan, header, area, copied))

    async def ask(self, fields: Mapping[str, Any], parts: Parts, **limits: Any) -> Reply:
        """`call`, awaited: an error is raised."""
        answered, done = self._awaitable()
        self.call(fields, parts, done, **limits)
        reply = await answered
        if reply.error is not None:
            raise reply.error
        return reply

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
        """Kill it; nobody is told."""
        if not self._over:
            self._why = self._why or ProcessLost("was ended")
            self._child.kill()
            self._let_go()
            self._finish(Reply({}, self._why))
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

    async def _load(self) -> Reply:
        loaded, done = self._awaitable()
        start = self._start
        order = {
            "target": start.target,
            "options": dict(start.options),
            "sandboxed": start.sandboxed,
            "readable": start.readable,
            "memory_bytes": start.memory_bytes,
        }
        self._begin(done, start.load_s, f"had not loaded the model after {start.load_s:g} s")
        word = WORD.pack(CALL, self._own.size, self._own.write_header(order))
        socket.send_fds(self._sock, [word], [self._own.fd])
        return await loaded

    def _awaitable(self) -> tuple[asyncio.Future[Reply], Done]:
        future: asyncio.Future[Reply] = self._loop.create_future()

        def done(reply: Reply) -> None:
            if not future.done():
                future.set_result(reply)

        return future, done

    def _begin(self, done: Done, limit_s: float | None, late: str) -> None:
        if self._done is not None:
            raise RuntimeError("the process is in a call already")
        self._gave_room = self._is_reading = False
        self._done = done
        if limit_s is not None:
            self._timer = self._loop.call_later(limit_s, lambda: self.lose(ProcessLost(late, hung=True)))

    def _send(self, plan: Layout, header: bytes, area: Area, copied: asyncio.Future[None] | None) -> None:
        """Say that the inputs are there."""
        large = area if area is not self._own else None
        try:
            if self._over or self._done is None:
                return
            if copied is None:
                plan.write(area.memory)
            else:
                copied.result()
            area.memory[plan.size : plan.size + len(header)] = header
            word = WORD.pack(CALL, plan.size, len(header))
            if large is None:
                self._sock.send(word)
            else:
                socket.send_fds(self._sock, [word], [area.fd])
                self._sent, large = large, None
        except OSError:
            pass  # it is gone; `_hear` notices
        except Exception as exc:  # noqa: BLE001 - values that numpy cannot copy are whoever's sent them
            self._loop.call_soon(self._finish, Reply({}, exc))
        finally:
            if large is not None:
                large.close()

    def _look(self) -> None:
        """Memory and threads that no limit of the kernel counts: while it loads, computes and waits."""
        areas = [area.used_bytes for area in (self._own, self._room) if area is not None]
        found = sandbox.excess(
            self.pid,
            self._start.memory_bytes,
            threads=None if self._start.sandboxed is False else sandbox.MAX_THREADS,
            shared_bytes=sum(areas),
        )
        if found is not None:
            self.lose(ProcessLost(found, by_memory="memory" in found))
        self._watch = self._loop.call_later(_LOOK_S, self._look)

    def _hear(self) -> None:
        try:
            data = self._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
            return
        self._heard += data
        while len(self._heard) >= WORD.size and not self._over:
            word, self._heard = self._heard[: WORD.size], self._heard[WORD.size :]
            kind, first, second = WORD.unpack(word)
            try:
                self._obey(kind, first, second)
            except Exception as exc:  # noqa: BLE001 - it may say anything
                self._lose_for_nonsense(exc)
                return

    def _obey(self, kind: bytes, first: int, second: int) -> None:
        if self._done is None or self._is_reading:
            raise ValueError("it was not asked")
        if kind == NEEDS_ROOM:
            self._give_room(first)
            return
        area = {REPLY: self._own, REPLY_IN_ROOM: self._room if self._gave_room else None}.get(kind)
        if area is None or second > _MOST_HEADER or first + second > area.size:
            raise ValueError("no such message")
        header = orjson.loads(check_json(area.memory[first : first + second], _MOST_FIELDS))
        if "error" in header:
            self._finish(Reply({}, decoded_error(header["error"])))
        elif area is self._room or sum(entry[4] for entry in header["arrays"]) > _LARGE_BYTES:
            self._is_reading = True
            reading = self._loop.run_in_executor(self._executor, self._outputs, area, header)
            reading.add_done_callback(self._read)
        else:
            self._finish(self._outputs(area, header))

    def _outputs(self, area: Area, header: dict[str, Any]) -> Reply:
        entries = header.pop("arrays")
        outputs = read_arrays(
            area.memory, entries, trusted=False, arrow=self._arrow, most_values=self._most_values
        )
        if area is self._room:
            area.clear()
        return Reply(outputs, fields=header)

    def _read(self, reading: asyncio.Future[Reply]) -> None:
        if reading.cancelled() or self._why is not None:  # what a process said that is being ended
            return
        if (error := reading.exception()) is not None:
            self._lose_for_nonsense(error)
        else:
            self._finish(reading.result())

    def _lose_for_nonsense(self, error: BaseException) -> None:
        self.lose(ProcessLost(f"sent a malformed reply ({error})", malformed=True))

    def _give_room(self, size: int) -> None:
        if self._gave_room:
            raise ValueError("it got room already")
        if size > self._most_output:
            self._sock.send(WORD.pack(ROOM, self._most_output, 0))
            return
        self._gave_room = True
        self._room = self._room or Area.create(self._start.output_bytes)
        socket.send_fds(self._sock, [WORD.pack(ROOM, self._room.size, 0)], [self._room.fd])

    def _finish(self, reply: Reply) -> None:
        done, self._done = self._done, None
        sent, self._sent = self._sent, None
        if sent is not None:
            self._beside(functools.partial(sent.close, empty=self._start.sandboxed is not False))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._start.printed is not None and not self._over:
            self._overhear()  # what it printed before it answered
        if done is not None:
            done(reply)

    def _beside(self, work: Callable[[], None]) -> None:
        try:
            self._loop.run_in_executor(self._executor, work)
        except RuntimeError:
            work()  # the parent is stopping

    def _overhear(self) -> None:
        """What it prints is passed on, or kept, a little of it, to be shown if it crashes."""
        try:
            said = os.read(self._child.output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if len(said) in (0, _READ_BYTES):
            self._loop.remove_reader(self._child.output.fileno())
        if len(said) == _READ_BYTES:  # who prints without end has to wait for us, and not we for it
            self._loop.call_later(_PRINT_PAUSE_S, self._listen_again)
        if self._start.printed is not None:
            self._start.printed(said)
        self._head += said[: _KEPT_BYTES - len(self._head)]
        self._tail = (self._tail + said)[-_KEPT_BYTES:]

    def _listen_again(self) -> None:
        if not self._over:
            self._loop.add_reader(self._child.output.fileno(), self._overhear)

    def _said(self) -> str:
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        head, ended, _ = head.partition("\nExtension modules: ")  # pages of names, with which a report ends
        return head if ended or head == tail else f"{head}\n...\n{tail}"

    def _gone(self) -> None:
        """Its socket is closed: find out why."""
        if self._over:
            return
        self._overhear()
        self._let_go()
        asking = self._loop.run_in_executor(self._executor, self._exit_code)
        asking.add_done_callback(self._ended)

    def _ended(self, asking: asyncio.Future[int]) -> None:
        code = 0 if asking.cancelled() or asking.exception() is not None else asking.result()
        self._why = why = self._why or ProcessLost(_how(code))
        why.exit_code = code
        if not why.hung and not why.by_memory and self._start.printed is None:
            _log.warning("%s\n%s", why, self._said())
        self._finish(Reply({}, why))
        self._close()
        self._lost(self, why)

    def _exit_code(self) -> int:
        try:
            return self._child.wait(_EXIT_S)[0]
        except TimeoutError:
            self._child.kill()
            return -signal.SIGKILL

    def _let_go(self) -> None:
        self._over = True
        self._watch.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_reader(self._child.output.fileno())
        self._sock.close()

    def _close(self) -> None:
        self._child.close()
        self._own.close()
        if self._room is not None:
            self._room.close()


class BlockingProcess:
    """The same process for code without an event loop; one thread of this program runs one for all of them.

    Raises:
        ProcessLost, KindlerError, RemoteError: See `SandboxProcess.started`.
    """

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


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
