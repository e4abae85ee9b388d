"""The meeting point of one run: all supervisors connect here.

It gathers bytes from all ranks, passes on what they say, and tells everybody to stop as soon as
one has failed. What a failure means for the run is decided by `outcome.py`.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from kindler.config import RunSettings
from kindler.engine.channel import Address, Channel, ChannelClosed, Frame, accept
from kindler.engine.stall import Motion, beat_interval

__all__ = ["Event", "Hub"]

_GREETING_TIMEOUT_S = 10.0
_ROOT_CAUSE_GRACE_S = 1.0  # a broken exchange is news from the neighbour of the one that failed


@dataclass(frozen=True, slots=True)
class Event:
    """Something a rank said: `log`, `report`, `error`, `lost`, `done`."""

    rank: int
    kind: str
    fields: dict[str, Any]


@dataclass(slots=True)
class _Member:
    channel: Channel
    host: str
    heard: float
    finished: bool = False


@dataclass(slots=True)
class _Gathering:
    parts: dict[int, bytes] = field(default_factory=dict)


class Hub:
    """Serve one run while the block runs; `address` is where supervisors connect."""

    def __init__(self, *, size: int, secret: bytes, settings: RunSettings, host: str = "127.0.0.1") -> None:
        self._size = size
        self._secret = secret
        self._settings = settings
        self._host = host
        self._members: dict[int, _Member] = {}
        self._gatherings: dict[int, _Gathering] = {}
        self._events: queue.Queue[Event] = queue.Queue()
        self._lock = threading.RLock()
        self._aborted = threading.Event()
        beat_s = beat_interval(settings.heartbeat_s, settings.stall_timeout_s)
        # What a rank did just now is known a beat later.
        self._motion = Motion(size, settings.stall_timeout_s + beat_s, beat_s=beat_s)
        self._stacks: dict[int, str] = {}
        self._told = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> Hub:
        # Port 0: taken and held, so there is no race for it.
        self._listener = socket.create_server((self._host, 0), backlog=self._size + 16)
        self._listener.settimeout(0.5)
        self._start(self._accept_all, "kindler-hub")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        listener, self._listener = self._listener, None
        if listener is not None:
            _close(listener)
        with self._lock:
            members = list(self._members.values())
        for member in members:
            member.channel.close()
        for thread in self._threads:
            thread.join(self._settings.stop_timeout_s)

    @property
    def address(self) -> Address:
        assert self._listener is not None, "the hub is not open"
        host, port = self._listener.getsockname()[:2]
        return (host, port)

    @property
    def joined(self) -> int:
        return len(self._members)

    @property
    def finished(self) -> bool:
        """Whether all have come and all are done, well or badly."""
        with self._lock:
            return len(self._members) == self._size and all(m.finished for m in self._members.values())

    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank in range(self._size) if rank not in self._members]

    def events(self, timeout_s: float) -> Iterator[Event]:
        """What has been said, waiting at most `timeout_s` for the first of it."""
        try:
            yield self._events.get(timeout=timeout_s)
            while True:
                yield self._events.get_nowait()
        except queue.Empty:
            return

    def abort(self) -> None:
        """Tell every supervisor to end its worker now."""
        with self._lock:
            if self._aborted.is_set():
                return
            self._aborted.set()
            members = [m for m in self._members.values() if not m.finished]
        for member in members:
            _try_send(member.channel, "abort")

    def silent(self) -> list[tuple[int, str]]:
        """Members that have given no sign of life for too long, as (rank, host)."""
        limit = time.monotonic() - self._settings.heartbeat_timeout_s
        with self._lock:
            return [(r, m.host) for r, m in self._members.items() if not m.finished and m.heard < limit]

    @property
    def idle_s(self) -> float:
        """Seconds since any worker got any further."""
        with self._lock:
            return self._motion.idle_s(time.monotonic())

    def stalled(self) -> bool:
        """Whether no worker has got any further for too long."""
        with self._lock:
            return not self._aborted.is_set() and self._motion.stalled(time.monotonic())

    def stall(self, timeout_s: float) -> tuple[list[int], dict[int, str], dict[int, str]]:
        """Ask all workers what they do: those that hold up the others, the hosts, and the stacks, by rank."""
        with self._told:
            self._stacks.clear()
            missing = self._motion.missing(time.monotonic())
            asked = {rank: member for rank, member in self._members.items() if not member.finished}
            hosts = {rank: member.host for rank, member in self._members.items()}
        for member in asked.values():
            _try_send(member.channel, "stacks")
        with self._told:
            self._told.wait_for(lambda: asked.keys() <= self._stacks.keys(), timeout_s)
            return missing, hosts, dict(self._stacks)

    def _accept_all(self) -> None:
        while (listener := self._listener) is not None:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._start(lambda sock=sock: self._serve(sock), "kindler-hub-member")

    def _start(self, run: Any, name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            channel = accept(sock, self._secret, timeout_s=_GREETING_TIMEOUT_S)
            hello = channel.receive(_GREETING_TIMEOUT_S)
            rank = int(hello.fields["rank"])
        except (ChannelClosed, TimeoutError, KeyError, ValueError):
            return  # a stranger, or a worker that died while greeting; its supervisor tells of the latter
        self._join(rank, _Member(channel, hello.fields["host"], time.monotonic()))
        try:
            while True:
                self._handle(rank, channel.receive())
        except ChannelClosed as exc:
            self._left(rank, str(exc))

    def _join(self, rank: int, member: _Member) -> None:
        with self._lock:
            self._members[rank] = member
            everyone = len(self._members) == self._size
            hosts = [self._members[r].host for r in sorted(self._members)] if everyone else []
        if self._aborted.is_set():
            _try_send(member.channel, "abort")
        elif everyone:
            for other in self._members.values():
                _try_send(other.channel, "welcome", hosts=hosts)

    def _left(self, rank: int, why: str) -> None:
        member = self._members[rank]
        if member.finished or self._aborted.is_set():
            return
        member.finished = True
        reason = f"the connection to its machine broke ({why})"
        self._events.put(Event(rank, "lost", {"host": member.host, "reason": reason}))
        self.abort()

    def _handle(self, rank: int, frame: Frame) -> None:
        member = self._members[rank]
        member.heard = time.monotonic()
        if frame.kind == "beat":
            return
        if frame.kind == "stacks":
            with self._told:
                self._stacks[rank] = frame.fields["text"]
                self._told.notify_all()
            return
        if self._moves(rank, frame):
            return
        if frame.kind == "gather":
            self._gather(rank, frame.fields["turn"], frame.buffers[0])
            return
        if frame.kind in ("done", "error", "lost", "aborted"):
            member.finished = True
        self._events.put(Event(rank, frame.kind, frame.fields))
        if frame.kind in ("error", "lost"):
            self._stop_the_others(at_once=not frame.fields.get("sync", False))

    def _moves(self, rank: int, frame: Frame) -> bool:
        """Note what a frame says of how far the rank is; whether that was all it says."""
        now = time.monotonic()
        with self._lock:
            if frame.kind == "pulse":
                self._motion.pulse(rank, frame.fields["ticks"], frame.fields["waiting"], now)
            elif frame.kind in ("gather", "report"):
                self._motion.moved(now)
            elif frame.kind == "done":
                self._motion.moved(now)
                self._motion.ended(rank)
            elif frame.kind in ("error", "lost", "aborted"):
                self._motion.ended(rank)
        return frame.kind == "pulse"

    def _stop_the_others(self, *, at_once: bool) -> None:
        if not at_once:
            self._aborted.wait(_ROOT_CAUSE_GRACE_S)
        self.abort()

    def _gather(self, rank: int, turn: int, data: bytes) -> None:
        with self._lock:
            gathering = self._gatherings.setdefault(turn, _Gathering())
            gathering.parts[rank] = data
            if len(gathering.parts) < self._size:
                return
            del self._gatherings[turn]
            members = list(self._members.values())
        parts = [gathering.parts[r] for r in range(self._size)]
        for member in members:
            _try_send(member.channel, "gathered", *parts, turn=turn)


def _close(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
    except OSError:
        pass  # not every system lets a listener be shut down; the accept has a timeout
    listener.close()


def _try_send(channel: Channel, kind: str, *buffers: bytes, **fields: Any) -> None:
    try:
        channel.send(kind, *buffers, **fields)
    except ChannelClosed:
        pass  # whoever reads from this channel reports that it is gone
