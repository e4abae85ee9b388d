"""The network of a simulated world, and what stands in for the engine's channels and servers there.

Messages of one connection arrive in order, those of several in any. A connection may break, which each end
sees at a time of its own, or only when it has sent something for long. Frames are encoded as they really are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit

from kindler.frame import ChannelClosed, Frame, Piece, encode, encode_again, from_bytes
from tests.unit.simulation.world import Process, Task, World, join, world

GIVES_UP_S = 60.0  # a system's TCP, on data that nobody acknowledges


class Network:
    """Delays of its own for each message; hosts that are cut off from each other; broken connections."""

    def __init__(self, world: World) -> None:
        world.network = self
        self.world = world
        self.servers: dict[int, Server] = {}
        self.ends: list[End] = []
        self.slowness = 1.0
        self._cuts: dict[frozenset[str], int] = {}

    def delay(self) -> float:
        draw = self.world.random.random()
        return self.slowness * (0.0005 + draw**8)  # most come at once, and a few a second later

    def is_cut(self, one: str, other: str) -> bool:
        return one != other and bool(self._cuts.get(frozenset((one, other))))

    def cut(self, one: str, other: str, seconds: float | None) -> None:
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        if seconds is not None:
            self.world.after(seconds, self._heal, pair)

    def _heal(self, pair: frozenset[str]) -> None:
        self._cuts[pair] -= 1
        for end in self.ends:
            if end.held and not self.is_cut(end.host, end.other.host):
                end.flush()

    def pair(self, one: Process, other: Process, *, near: bool = False) -> tuple[End, End]:
        ends = End(self, one, near=near), End(self, other, near=near)
        ends[0].other, ends[1].other = ends[1], ends[0]
        self.ends += ends
        return ends


class End:
    """One end of a connection; what is sent arrives in order, or not at all."""

    other: End

    def __init__(self, network: Network, process: Process, *, near: bool) -> None:
        self.network = network
        self.world = network.world
        self.process = process
        self.host = process.host
        self.near = near
        self.inbox: deque[bytes] = deque()
        self.held: list[bytes | None] = []
        self.closed: str | None = None  # why nothing more will come
        self.is_shut = False  # by its own process
        self.is_broken = False
        self.waiters: list[Task] = []
        self.on_arrival: Callable[[End], None] | None = None
        self._arrives = 0.0
        process.ends.append(self)

    def send(self, data: bytes | None) -> None:
        """`None` says that nothing more will come."""
        if self.is_broken or self.network.is_cut(self.host, self.other.host):
            if not self.held:
                self.world.after(GIVES_UP_S, self._give_up)
            self.held.append(data)
            return
        delay = 0.0001 if self.near else self.network.delay()
        self._arrives = max(self._arrives + 1e-6, self.world.now + delay)
        self.world.at(self._arrives, self.other.arrive, data)

    def flush(self) -> None:
        held, self.held = self.held, []
        for data in held:
            self.send(data)

    def _give_up(self) -> None:
        if self.held:
            self.break_off("timed out")

    def arrive(self, data: bytes | None) -> None:
        if self.is_broken or self.closed is not None:
            return
        if self.is_shut or not self.process.alive:
            if data is not None:
                self.send(None)  # nobody reads it: the other end is told to stop
            return
        if data is None:
            self.break_off("the other end closed the connection")
            return
        self.inbox.append(data)
        self._wake()

    def break_off(self, why: str) -> None:
        """Its process gets to know that the connection is over."""
        if self.closed is None:
            self.closed = why
            self._wake()

    def break_down(self, notices: bool) -> None:
        """The connection is over, which this end may only see when it has sent something for long."""
        self.is_broken = True
        if notices:
            self.break_off("reset by the network")

    def shut(self) -> None:
        """Its own process closes it; what it has sent still arrives."""
        if not self.is_shut:
            self.is_shut = True
            self.inbox.clear()
            self.send(None)
            self.break_off("it was closed")

    def vanish(self, *, silently: bool) -> None:
        """Its process is gone."""
        if not self.is_shut:
            self.is_shut = True
            if not silently:
                self.send(None)

    def _wake(self) -> None:
        if self.on_arrival is not None:
            self.on_arrival(self)
        for task in list(self.waiters):
            task.wake()


class Channel:
    """Stands in for `kindler.engine.wire.Channel`; frames are encoded and read as they are there."""

    def __init__(self, end: End) -> None:
        self.end = end

    def send(self, kind: str, *buffers: Piece, **fields: Any) -> None:
        for pieces in encode(kind, buffers, fields):
            self._put(pieces, kind)

    def pass_on(self, frame: Frame) -> None:
        self._put(encode_again(frame), frame.kind)

    def _put(self, pieces: Sequence[Piece], kind: str) -> None:
        world().perhaps_yield()
        if not self.end.process.alive:
            raise GreenletExit
        if self.end.closed is not None:
            raise ChannelClosed(f"sending {kind!r}: {self.end.closed}")
        self.end.send(b"".join(pieces))

    def receive(self, timeout_s: float | None = None, *, whole: bool = True) -> Frame:
        end, deadline = self.end, None if timeout_s is None else world().now + timeout_s
        while not end.inbox:
            if end.closed is not None:
                raise ChannelClosed(end.closed)
            left = None if deadline is None else deadline - world().now
            if left is not None and left <= 0:
                raise TimeoutError(f"no frame in {timeout_s:g} s")
            world().block(end.waiters, left)
        return from_bytes(end.inbox.popleft())

    @property
    def local_host(self) -> str:
        return self.end.host

    def close(self) -> None:
        self.end.shut()


class Peer:
    """Stands in for `kindler.engine.server.Peer`."""

    def __init__(self, end: End) -> None:
        self.id: Any = None
        self.end = end
        self.since = world().now

    def send(self, kind: str, *buffers: Piece, **fields: Any) -> None:
        for pieces in encode(kind, buffers, fields):
            self.put(pieces)

    def put(self, pieces: Sequence[Piece]) -> None:
        data = b"".join(pieces)
        world().scenario.sends(self, from_bytes(data))
        if self.end.closed is None and self.end.process.alive:
            self.end.send(data)


class Server:
    """Stands in for `kindler.engine.server.Server`: a thread of the process that makes it."""

    tick_s = 0.5
    greeting_s = 10.0

    def __init__(self, listener: Any, secret: bytes, handler: Any, *, name: str, **_: Any) -> None:
        self.port = listener.port
        self.process = world().current.process
        self.peers: list[Peer] = []
        self._handler = handler
        self._name = name
        self._news: deque[End] = deque()
        self._waiters: list[Task] = []
        self._closing = False
        self._task: Task | None = None

    def start(self) -> None:
        world().network.servers[self.port] = self
        self._task = self.process.spawn(self._name, self._serve)

    def close(self, timeout_s: float) -> None:
        self._closing = True
        self._ring(None)
        if self._task is not None and self._task is not world().current:
            join(self._task, timeout_s)

    def admit(self, end: End) -> None:
        """A connection has come, with its greeting."""
        end.inbox.clear()
        end.on_arrival = self._ring
        self._ring(end)

    def _ring(self, end: End | None) -> None:
        if end is not None:
            self._news.append(end)
        for task in list(self._waiters):
            task.wake()

    def _serve(self) -> None:
        checked = world().now
        while not self._closing:
            if not self._news:
                world().block(self._waiters, self.tick_s)
            while self._news and not self._closing:
                self._attend(self._news.popleft())
            if world().now - checked > self.tick_s:
                checked = world().now
                for peer in [peer for peer in self.peers if peer.id is None]:
                    if checked - peer.since > self.greeting_s:
                        self._hang_up(peer, "it did not identify itself")
                self._handler.tick(checked)
        del world().network.servers[self.port]
        for peer in self.peers:
            peer.end.shut()

    def _attend(self, end: End) -> None:
        peer = next((peer for peer in self.peers if peer.end is end), None)
        if peer is None and not end.is_shut:
            peer = Peer(end)
            self.peers.append(peer)
            end.send(b"")  # it has proved itself
        while peer is not None and peer in self.peers and end.inbox:
            data = end.inbox.popleft()
            try:
                self._handler.received(peer, from_bytes(data))
            except (KeyError, ValueError, TypeError, IndexError) as exc:
                self._hang_up(peer, f"it sent an invalid message: {exc!r}")
        if peer is not None and peer in self.peers and end.closed is not None:
            self._hang_up(peer, end.closed)

    def _hang_up(self, peer: Peer, why: str) -> None:
        self.peers.remove(peer)
        peer.end.shut()
        self._handler.closed(peer, why)


def listen(host: str, **_: Any) -> Any:
    port = 1 + len(world().network.servers)
    return SimpleNamespace(port=port, getsockname=lambda: (host, port))


def connect(address: tuple[str, int], secret: bytes, *, timeout_s: float) -> Channel:
    """Stands in for `kindler.engine.wire.connect`."""
    there = world().network.servers.get(address[1])
    if there is None:
        raise ChannelClosed(f"connecting to {address}: refused")
    mine, theirs = world().network.pair(world().current.process, there.process)
    theirs.on_arrival = there.admit
    mine.send(b"")  # a greeting, which its server answers when it runs
    deadline = world().now + timeout_s
    while not mine.inbox:
        if mine.closed is not None or world().now >= deadline or there._closing:
            why = mine.closed or "timed out"
            mine.shut()
            raise ChannelClosed(f"connecting to {address}: {why}")
        world().block(mine.waiters, min(1.0, deadline - world().now))
    mine.inbox.popleft()
    return Channel(mine)
