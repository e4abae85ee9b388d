"""The meeting point of one run: all supervisors connect here.

It gathers bytes from all ranks, passes on what they say, hands out the job's buffers, takes the results, and
tells everybody to stop as soon as one has failed. What a failure means for the run is decided by
`outcome.py`; connections are served by `connections.py`, all by one thread.
"""

from __future__ import annotations

import json
import queue
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kindler.config import RunSettings
from kindler.engine.channel import Address, Frame
from kindler.engine.connections import Owner, Peer, Switchboard
from kindler.engine.frames import Piece, encode
from kindler.engine.gather import Gathering
from kindler.engine.job_buffers import parent_of
from kindler.engine.listener import listen
from kindler.engine.stall import Motion, beat_interval
from kindler.errors import ConfigError

__all__ = ["Event", "Hub"]

_ROOT_CAUSE_GRACE_S = 1.0  # a broken exchange is news from the neighbour of the one that failed
_SPARE_FILES = 1024
_LAST_WORDS = ("done", "error", "lost", "aborted")


@dataclass(frozen=True, slots=True)
class Event:
    """Something a rank said: `log`, `report`, `error`, `lost`, `done`."""

    rank: int
    kind: str
    fields: dict[str, Any]


@dataclass(slots=True)
class _Member:
    peer: Peer
    host: str
    heard: float
    cargo: Sequence[Any] | None
    finished: bool = False


class Hub:
    """Serve one run while the block runs; `address` is where supervisors connect.

    Args:
        size: How many ranks there are.
        secret: What members prove themselves with.
        settings: Time limits, and the ports that may be taken.
        host: The address to listen on.
        advertised: The address under which others reach it, where that is another one.
        cargo: Buffers for every worker, handed to the first supervisor, which passes them on.
    """

    def __init__(
        self,
        *,
        size: int,
        secret: bytes,
        settings: RunSettings,
        host: str = "127.0.0.1",
        advertised: str | None = None,
        cargo: Sequence[Piece] = (),
    ) -> None:
        self._size = size
        self._secret = secret
        self._settings = settings
        self._host = host
        self._advertised = advertised
        self._cargo = cargo
        self._members: dict[int, _Member] = {}
        self._gatherings: dict[int, Gathering] = {}
        self._results: dict[int, tuple[bytes, ...]] = {}
        self._events: queue.Queue[Event] = queue.Queue()
        self._lock = threading.RLock()
        self._aborted = threading.Event()
        self._abort_at: float | None = None
        beat_s = beat_interval(settings.heartbeat_s, settings.stall_timeout_s)
        # What a rank did just now is known a beat later.
        self._motion = Motion(size, settings.stall_timeout_s + beat_s, beat_s=beat_s)
        self._stacks: dict[int, str] = {}
        self._told = threading.Condition(self._lock)
        self._board: Switchboard | None = None

    def __enter__(self) -> Hub:
        _allow_files(self._size + _SPARE_FILES)
        try:
            listener = listen(self._host, backlog=self._size + 16, ports=self._settings.port_range)
        except OSError as exc:
            raise ConfigError(
                f"the meeting point of the workers cannot listen on {self._host}: {exc}.\n"
                "Hint: it must be an address of this machine. Behind NAT or in a container, set"
                " spark.driver.bindAddress to the machine's own address and spark.driver.host to the one that"
                " others reach; RunSettings(port_range=(first, last)) names the ports that may be taken."
            ) from exc
        self._port: int = listener.getsockname()[1]
        self._board = Switchboard(listener, self._secret, _Ears(self), size=self._size, name="kindler-hub")
        self._board.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        if self._board is not None:
            self._board.close(self._settings.stop_timeout_s)

    @property
    def address(self) -> Address:
        assert self._board is not None, "the hub is not open"
        return (self._advertised or self._host, self._port)

    @property
    def joined(self) -> int:
        return len(self._members)

    @property
    def finished(self) -> bool:
        """Whether all have come and all are done, well or badly."""
        with self._lock:
            return len(self._members) == self._size and all(m.finished for m in self._members.values())

    @property
    def results(self) -> dict[int, tuple[bytes, ...]]:
        """What ranks that are done have sent here, by rank."""
        with self._lock:
            return dict(self._results)

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
            member.peer.send("abort")

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
            member.peer.send("stacks")
        with self._told:
            self._told.wait_for(lambda: asked.keys() <= self._stacks.keys(), timeout_s)
            return missing, hosts, dict(self._stacks)

    def _heard(self, peer: Peer, frame: Frame) -> None:
        if peer.name is not None:
            self._handle(peer.name, frame)
        elif frame.kind == "hello":
            self._join(peer, frame)
        elif frame.kind == "fetch":
            peer.name = int(frame.fields["rank"])
            peer.send("cargo", *self._cargo)

    def _join(self, peer: Peer, frame: Frame) -> None:
        rank, host = int(frame.fields["rank"]), str(frame.fields["host"])
        if not 0 <= rank < self._size or rank in self._members:
            raise ValueError(f"there is no place for rank {rank}")
        with self._lock:
            self._members[rank] = _Member(peer, host, time.monotonic(), frame.fields.get("cargo"))
            everyone = len(self._members) == self._size
        peer.name = rank
        if self._aborted.is_set():
            peer.send("abort")
        elif everyone:
            self._welcome()

    def _welcome(self) -> None:
        """Tell everybody who is where, and from whom to fetch the job's buffers."""
        hosts = json.dumps([self._members[rank].host for rank in range(self._size)]).encode()
        same = [piece for frame in encode("welcome", [hosts], {}) for piece in frame]
        for rank, member in self._members.items():
            parent = parent_of(rank)
            if self._cargo and parent is not None:
                member.peer.send("welcome", hosts, cargo=self._members[parent].cargo)
            else:
                member.peer.put(same)

    def _gone(self, peer: Peer, why: str) -> None:
        rank = peer.name
        member = None if rank is None else self._members.get(rank)
        if rank is None or member is None or member.peer is not peer:
            return  # a stranger, or a worker that died while greeting; its supervisor tells of the latter
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
            self._gather(rank, frame)
            return
        if frame.kind == "result":
            with self._lock:
                self._results[rank] = frame.buffers
            member.peer.send("kept")
            return
        if frame.kind in _LAST_WORDS:
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
            elif frame.kind in ("gather", "report", "result"):
                self._motion.moved(now)
            elif frame.kind == "done":
                self._motion.moved(now)
                self._motion.ended(rank)
            elif frame.kind in ("error", "lost", "aborted"):
                self._motion.ended(rank)
        return frame.kind == "pulse"

    def _stop_the_others(self, *, at_once: bool) -> None:
        if at_once:
            self.abort()
        elif self._abort_at is None:
            self._abort_at = time.monotonic() + _ROOT_CAUSE_GRACE_S

    def _tick(self, now: float) -> None:
        if self._abort_at is not None and now > self._abort_at:
            self.abort()

    def _gather(self, rank: int, frame: Frame) -> None:
        turn = frame.fields["turn"]
        gathering = self._gatherings.setdefault(turn, Gathering(turn, self._size))
        gathering.bring(rank, frame.buffers[0], frame.fields["wants"])
        if gathering.complete:
            del self._gatherings[turn]
            for other, pieces in enumerate(gathering.answers()):
                self._members[other].peer.put(pieces)


class _Ears(Owner):
    """Passes on to the hub what its switchboard says, on the board's thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def heard(self, peer: Peer, frame: Frame) -> None:
        self._hub._heard(peer, frame)

    def gone(self, peer: Peer, why: str) -> None:
        self._hub._gone(peer, why)

    def tick(self, now: float) -> None:
        self._hub._tick(now)


def _allow_files(wanted: int) -> None:
    """Let this process open so many files: each member is a socket, and 1,024 is a usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
