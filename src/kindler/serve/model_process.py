"""One process that runs a model, seen from the event loop: started, called, watched and ended.

One call at a time. Whatever happens to the process, the call that it was in comes to an end: with outputs,
with the model's own exception, or with `ProcessLost`. What it says is checked like what a client says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import orjson

from kindler import jail
from kindler.data.received import check_json
from kindler.engine import fork_server
from kindler.models.signature import Arrays
from kindler.serve.model_messages import (
    CALL,
    NEEDS_ROOM,
    REPLY,
    REPLY_IN_ROOM,
    ROOM,
    WORD,
    DescribedModel,
    described,
    raised,
)
from kindler.serve.tensor_area import Area, Layout, Parts, layout, read_arrays, write_header

_log = logging.getLogger("kindler.serve")
_ENTRY = "kindler.serve._model_process_main:main"
_AREA_BYTES = 16 << 20
_HEADER_BYTES = 64 << 10  # of a call, beside its arrays
_MOST_HEADER = 8 << 20
_MOST_TOLD = 1 << 19  # values in a header
_LARGE_BYTES = 1 << 20  # is copied in a thread
_LOOK_S = 0.25  # between two looks at a process
_KEPT_BYTES = 2000  # of what it prints: the first, and the last
_READ_BYTES, _PRINT_PAUSE_S = 1 << 16, 0.01
_EXIT_S = 5.0


class ProcessLost(Exception):
    """The process ended in the middle of a call.

    Attributes:
        reason: Why, in words that follow "the model's process".
        hung: Whether it was ended because the call took too long.
        by_memory: Whether it was ended because it took too much memory.
    """

    def __init__(self, reason: str, *, hung: bool = False, by_memory: bool = False) -> None:
        self.reason = reason
        self.hung = hung
        self.by_memory = by_memory
        super().__init__(f"the model's process {reason}")


@dataclass(frozen=True, slots=True)
class Answered:
    """How a call ended.

    Attributes:
        outputs: The outputs.
        error: What the model raised, or that its process was lost.
        per_row: Of a trial, what it found.
    """

    outputs: Arrays
    error: Exception | None = None
    per_row: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a process is started.

    Attributes:
        recipe: What it is forked from.
        environment: Variables of its own.
        order: What it is told to load, as `_model_process_main.py` has it.
        load_s: Seconds that loading may take.
        call_s: Seconds that a call may take.
        memory_bytes: What it may have in memory.
        output_bytes: The most that the outputs of a call may take.
    """

    recipe: fork_server.Recipe
    environment: Mapping[str, str]
    order: Mapping[str, Any]
    load_s: float
    call_s: float
    memory_bytes: int
    output_bytes: int


Done: TypeAlias = Callable[[Answered], None]


class ModelProcess:
    """A process with a model.

    Args:
        child: The process.
        start: What it was started with.
        executor: Where large copies are made, and the end of the process is waited for.
        lost: Is told once, after the call that it was in, that the process is gone though nobody ended it.

    Attributes:
        pid: Its number.
        busy: Whether it is in a call.
        calls: Calls that it has answered.
        device_bytes: What it had of its GPU's memory once the model was loaded and called.
    """

    def __init__(
        self,
        child: fork_server.Child,
        start: Start,
        *,
        executor: Executor,
        lost: Callable[[ModelProcess, ProcessLost], None],
    ) -> None:
        self.pid = child.pid
        self.calls = self.device_bytes = 0
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
        loads: Executor,
        moves: Executor,
        lost: Callable[[ModelProcess, ProcessLost], None],
    ) -> tuple[ModelProcess, DescribedModel]:
        """Start a process and have it load its model.

        Args:
            start: How.
            loads: Where it is waited for.
            moves: Where large copies are made.
            lost: See the class.

        Raises:
            ProcessLost: It ended, or took too long.
            KindlerError: The model cannot be loaded.
            ModelFailure: Loading it raised something else.
        """
        loop = asyncio.get_running_loop()
        child = await loop.run_in_executor(loads, _forked, start)
        process = cls(child, start, executor=moves, lost=lost)
        try:
            return process, await process._load()
        except BaseException:
            process.end()
            raise

    @property
    def busy(self) -> bool:
        return self._done is not None

    def call(self, parts: Parts, method: str, first: int | None, done: Done) -> None:
        """Begin a call; `done` is told of its end, on the event loop, and never before this returns.

        Args:
            parts: The inputs: arrays of several requests, which become one.
            method: What to call.
            first: Of a trial, how many rows are the first; None for a plain call.
            done: Is told once.
        """
        self._begin(done, self._start.call_s, f"did not answer within {self._start.call_s:g} s")
        header: dict[str, Any] = {"method": method}
        if first is not None:
            header["first"] = first
        try:
            plan = layout(parts)
        except Exception as exc:  # noqa: BLE001 - rows that cannot be sent are the fault of whoever sent them
            failed = Answered({}, exc if isinstance(exc, TypeError) else TypeError(str(exc)))
            self._loop.call_soon(self._finish, failed)
            return
        if plan.size < _LARGE_BYTES:
            self._send(plan, header, self._own, None)
            return
        fits = plan.size + _HEADER_BYTES <= self._own.size
        area = self._own if fits else Area.create(plan.size + _HEADER_BYTES, sealed=False)
        writing = self._loop.run_in_executor(self._executor, plan.write, area.memory)
        writing.add_done_callback(lambda copied: self._send(plan, header, area, copied))

    def own_bytes(self) -> int:
        """What it has in memory and shares with no other process, as far as the system says."""
        try:
            with open(f"/proc/{self.pid}/smaps_rollup", "rb") as file:
                lines = [line.split() for line in file if line.startswith(b"Private_")]
            return sum(int(words[1]) for words in lines) << 10
        except (OSError, IndexError, ValueError):
            return self._resident_bytes()

    def _resident_bytes(self) -> int:
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0

    def lose(self, why: ProcessLost) -> None:
        """End it though it may be in a call, which then ends with `why`."""
        if self._why is None and not self._over:
            self._why = why
            self._child.kill()

    def end(self) -> None:
        """End it; nobody is told."""
        if not self._over:
            self._why = self._why or ProcessLost("was ended")
            self._child.kill()
            self._let_go()
            self._finish(Answered({}, self._why))
            self._reap()

    async def _load(self) -> DescribedModel:
        loaded: asyncio.Future[Any] = self._loop.create_future()

        def done(answered: Answered) -> None:
            if not loaded.done():
                loaded.set_result(answered)

        limit_s = self._start.load_s
        self._begin(done, limit_s, f"had not loaded the model after {limit_s:g} s")
        length = write_header(self._own.memory, dict(self._start.order))
        socket.send_fds(self._sock, [WORD.pack(CALL, self._own.size, length)], [self._own.fd])
        answered: Answered = await loaded
        if answered.error is not None:
            raise answered.error
        model: DescribedModel = answered.outputs["model"]  # type: ignore[assignment]
        self.device_bytes = model.device_bytes
        return model

    def _begin(self, done: Done, limit_s: float, late: str) -> None:
        if self._done is not None:
            raise RuntimeError("the process is in a call already")
        self._gave_room = self._is_reading = False
        self._done = done
        self._timer = self._loop.call_later(limit_s, lambda: self.lose(ProcessLost(late, hung=True)))

    def _send(
        self, plan: Layout, header: dict[str, Any], area: Area, copied: asyncio.Future[None] | None
    ) -> None:
        """Say that the inputs are there."""
        large = area if area is not self._own else None
        try:
            if self._over or self._done is None:
                return
            if copied is None:
                plan.write(area.memory)
            else:
                copied.result()
            length = write_header(area.memory, {**header, "arrays": plan.entries}, plan.size)
            word = WORD.pack(CALL, plan.size, length)
            if large is None:
                self._sock.send(word)
            else:
                socket.send_fds(self._sock, [word], [area.fd])
                self._sent, large = large, None
        except OSError:
            pass  # it is gone; `_hear` notices
        except Exception as exc:  # noqa: BLE001 - values that numpy cannot copy are whoever's sent them
            self._loop.call_soon(self._finish, Answered({}, exc))
        finally:
            if large is not None:
                large.close()

    def _look(self) -> None:
        """Memory and threads that no limit of the kernel counts: while it loads, computes and waits."""
        areas = [area.used_bytes for area in (self._own, self._room) if area is not None]
        found = jail.excess(
            self.pid,
            self._start.memory_bytes,
            threads=jail.MOST_THREADS if self._start.order.get("jailed") else None,
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
                self.lose(ProcessLost(f"answered what cannot be read ({exc})"))
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
        header = orjson.loads(check_json(area.memory[first : first + second], _MOST_TOLD))
        if "error" in header:
            self._finish(Answered({}, raised(header["error"])))
        elif "model" in header:
            self._finish(Answered({"model": described(header["model"])}))  # type: ignore[dict-item]
        elif area is self._room or sum(entry[4] for entry in header["arrays"]) > _LARGE_BYTES:
            self._is_reading = True
            reading = self._loop.run_in_executor(self._executor, _outputs, area, header, area is self._room)
            reading.add_done_callback(self._read)
        else:
            self._finish(_outputs(area, header, False))

    def _read(self, reading: asyncio.Future[Answered]) -> None:
        if reading.cancelled() or self._why is not None:  # what a process said that is being ended
            return
        if (error := reading.exception()) is not None:
            self.lose(ProcessLost(f"answered what cannot be read ({error})"))
        else:
            self._finish(reading.result())

    def _give_room(self, size: int) -> None:
        if self._gave_room:
            raise ValueError("it got room already")
        most = self._start.output_bytes
        if size > most:
            self._sock.send(WORD.pack(ROOM, most, 0))
            return
        self._gave_room = True
        self._room = self._room or Area.create(most)
        socket.send_fds(self._sock, [WORD.pack(ROOM, self._room.size, 0)], [self._room.fd])

    def _finish(self, answered: Answered) -> None:
        done, self._done = self._done, None
        sent, self._sent = self._sent, None
        if sent is not None:
            self._beside(partial(sent.close, empty=bool(self._start.order.get("jailed"))))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if done is not None:
            self.calls += 1
            done(answered)

    def _beside(self, work: Callable[[], None]) -> None:
        try:
            self._executor.submit(work)
        except RuntimeError:
            work()  # the server is stopping

    def _overhear(self) -> None:
        """What it prints is kept, a little of it, to be shown if it crashes."""
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
        why = self._why or ProcessLost(_how(code))
        if not why.hung and not why.by_memory:
            _log.warning("%s\n%s", why, self._said())
        self._finish(Answered({}, why))
        self._reap()
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

    def _reap(self) -> None:
        self._child.close()
        self._own.close()
        if self._room is not None:
            self._room.close()


def _forked(start: Start) -> fork_server.Child:
    return fork_server.start_child(
        start.recipe,
        owner=os.getpid(),
        timeout_s=start.load_s,
        environment=start.environment,
        entry=_ENTRY,
    )


def _outputs(area: Area, header: dict[str, Any], clear: bool) -> Answered:
    per_row = header.get("per_row")
    outputs = read_arrays(area.memory, header["arrays"], copy=True, trusted=False)
    if clear:
        area.clear()
    return Answered(outputs, per_row=None if per_row is None else bool(per_row))


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
