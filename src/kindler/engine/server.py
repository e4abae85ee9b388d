"""The one server: a thread that authenticates and serves all connections of a listening socket."""

from __future__ import annotations

import logging
import random
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from kindler import limits
from kindler.engine.wire import GREETING_BYTES, greeting, shut_down, tuned
from kindler.frame import ChannelClosed, Frame, Joiner, Piece, encode, reading

_SPARE_PENDING = 512
_ACCEPTS_PER_TURN = 64
_READS_PER_TURN = 16
_READ_BYTES = 64 << 10
_HELLO_HEADER_BYTES = 64 << 10
_MAX_PIECES = 64  # of one system call
_log = logging.getLogger(__name__)


def listen(host: str, *, backlog: int, ports: tuple[int, int] | None = None) -> socket.socket:
    """Listen on `host`, an address or name of either family, on a free port or one of the range `ports`."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    if ports is None:
        # Port 0: taken and held, so there is no race for it.
        return socket.create_server((place[0], 0), family=family, backlog=backlog)
    problem: OSError | None = None
    # Not always from the first one on: several processes of a machine look at the same time.
    for port in random.sample(range(ports[0], ports[1] + 1), ports[1] - ports[0] + 1):
        try:
            return socket.create_server((place[0], port), family=family, backlog=backlog)
        except OSError as exc:
            problem = exc
    raise OSError(f"no port from {ports[0]} to {ports[1]} can be used on {host}: {problem}")


def listen_on(address: str, port: int, *, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


@dataclass(slots=True)
class _Pending:
    sock: socket.socket
    answer: Callable[[bytes], bytes]
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class Listener:
    """Accept connections and hand over those that prove that they know the run's secret.

    They are authenticated side by side; unproven ones time out, and beyond a limit the oldest is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        admit: Callable[[socket.socket], None],
        *,
        expected: int,  # how many may come at the same time
        timeout_s: float,
    ) -> None:
        self.selector = selectors.DefaultSelector()  # of keys whose data is called with the events
        self._listener = listener  # is closed with this
        self._secret = secret  # what those who may come in know
        self._admit = admit  # takes over the socket of one who has proved itself. It must not block
        self._timeout_s = timeout_s  # how long a greeting may take
        self._max_pending = expected + _SPARE_PENDING
        self._pending: dict[int, _Pending] = {}
        self._paused_until: float | None = None
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def poll(self, timeout_s: float) -> None:
        for key, events in self.selector.select(timeout_s):
            key.data(events)
        now = time.monotonic()
        while self._pending and (oldest := next(iter(self._pending.values()))).deadline < now:
            self._drop(oldest)
        if self._paused_until is not None and self._paused_until < now:
            self._paused_until = None
            self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._listener.close()
        self.selector.close()

    def _accept(self, events: int) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # too many open files: make room, and try again in a moment
                self._drop_oldest()
                if self._paused_until is None:
                    self.selector.unregister(self._listener)
                self._paused_until = time.monotonic() + limits.ACCEPT_PAUSE_S
                return
            if len(self._pending) >= self._max_pending:
                self._drop_oldest()
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        hello, answer = greeting(self._secret)
        sock.setblocking(False)
        try:
            sock.send(hello)  # a fresh connection has room for it
        except OSError:
            sock.close()
            return
        pending = _Pending(sock, answer, time.monotonic() + self._timeout_s)
        self._pending[sock.fileno()] = pending
        self.selector.register(sock, selectors.EVENT_READ, partial(self._read, pending))

    def _read(self, pending: _Pending, events: int) -> None:
        try:
            received = pending.sock.recv(GREETING_BYTES - len(pending.received))
            if not received:
                raise ConnectionError("it disconnected")
            pending.received += received
            if len(pending.received) < GREETING_BYTES:
                return
            pending.sock.send(pending.answer(bytes(pending.received)))
        except BlockingIOError:
            return
        except OSError:  # it does not know the secret, or is gone
            self._drop(pending)
            return
        self._forget(pending)
        self._admit(tuned(pending.sock))

    def _drop_oldest(self) -> None:
        if self._pending:
            self._drop(next(iter(self._pending.values())))

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.sock.close()

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.sock.fileno()]
        self.selector.unregister(pending.sock)


class Peer:
    """One connection of a server. Any thread may send; nothing here blocks."""

    def __init__(self, sock: socket.socket, server: Server) -> None:
        # Who it is, once the handler has set it; until then it has the time of a greeting to say so.
        self.id: Any = None
        self.sock = sock  # for the server alone
        self.blocked = False  # whether it takes no more for now
        self._server = server
        self._since = time.monotonic()
        self._joiner = Joiner()
        self._parser = reading(_HELLO_HEADER_BYTES)
        self._room = bytearray(next(self._parser))
        self._view = memoryview(self._room)
        self._out: deque[memoryview] = deque()
        self._moved = 0.0
        self._open = True  # for sending

    def send(self, kind: str, *buffers: Piece, **fields: Any) -> None:
        """Send what can be sent at once and queue the rest; dropped if the peer is gone."""
        for frame in encode(kind, buffers, fields):
            self.put(frame)

    def put(self, pieces: Iterable[Piece]) -> None:
        with self._server.lock:
            if not self._open:
                return
            if not self._out:
                self._moved = time.monotonic()
            self._out.extend(memoryview(piece) for piece in pieces)
            sent = self.flush()
        if not sent:
            self._server.flush_soon(self)

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)

    def close(self) -> None:
        """Send what can be sent at once, and hang up. Called once, by the server's thread only."""
        with self._server.lock:
            self._open = False
            self.flush()
        shut_down(self.sock)
        self.sock.close()

    def overdue(self, now: float) -> str:
        if self.id is None and now - self._since > self._server.greeting_s:
            return "it did not identify itself"
        if self._out and now - self._moved > self._server.send_s:
            return f"it accepted nothing for {self._server.send_s:g} s"
        return ""

    def read(self) -> Iterator[Frame]:
        for _ in range(_READS_PER_TURN):  # others have a turn too
            try:
                # Many small frames in one go; the bytes of a large one straight to their place.
                if len(self._view) < _READ_BYTES:
                    received = memoryview(self.sock.recv(_READ_BYTES))
                else:
                    received = self._view[: self.sock.recv_into(self._view)]
            except BlockingIOError:
                return
            except OSError as exc:
                raise ChannelClosed(str(exc)) from exc
            if not received:
                raise ChannelClosed("the other end closed the connection")
            yield from self._messages(received)
            if len(received) < _READ_BYTES:
                return

    def flush(self) -> bool:
        """Send what it takes now; return whether that was all. `read` notices a broken peer."""
        with self._server.lock:
            while self._out:
                pieces = [self._out[place] for place in range(min(len(self._out), _MAX_PIECES))]
                try:
                    sent = self.sock.sendmsg(pieces)
                except BlockingIOError:
                    return False
                except OSError:
                    self._open = False
                    self._out.clear()
                    return True
                self._moved = time.monotonic()
                while sent:
                    piece = self._out.popleft()
                    if sent < len(piece):
                        self._out.appendleft(piece[sent:])
                    sent = max(sent - len(piece), 0)
        return True

    def _messages(self, received: memoryview) -> Iterator[Frame]:
        while received:
            size = min(len(received), len(self._view))
            if received.obj is not self._room:
                self._view[:size] = received[:size]
            received, self._view = received[size:], self._view[size:]
            if not self._view and (frame := self._advance()) is not None:
                message = self._joiner.take(frame)
                if message is not None:
                    yield message

    def _advance(self) -> Frame | None:
        frame: Frame | None = None
        large = self._server.leaves_large and len(self._room) >= _READ_BYTES
        try:
            wanted = self._parser.send(cast(bytes, self._room) if large else bytes(self._room))
        except StopIteration as done:
            frame = done.value
            self._parser = reading()
            wanted = next(self._parser)
        self._room = bytearray(wanted)
        self._view = memoryview(self._room)
        return frame


class Handler:
    def received(self, peer: Peer, frame: Frame) -> None:
        """A message has arrived."""

    def closed(self, peer: Peer, why: str) -> None:
        """The connection broke, or was closed by the server."""

    def tick(self, now: float) -> None:
        """Called several times a second."""


class Server:
    """One thread for all connections; it never waits for one, and queues what a peer does not take yet."""

    def __init__(
        self,
        listener: socket.socket,  # is closed with the server
        secret: bytes,  # what those who may come in know
        handler: Handler,
        *,
        expected: int,  # how many may connect at the same time
        name: str,  # of the thread
        timeout_s: float | None = None,  # how long a greeting may take; by default `limits.GREETING_S`
        send_s: float = limits.SEND_S,  # how long a peer may take nothing of what is sent to it
        leaves_large: bool = False,
    ) -> None:
        self.lock = threading.RLock()  # of what is queued for peers
        # Whether large buffers of frames are left where they were received, as bytearrays: copying them is a
        # quarter of what reading a megabyte costs.
        self.leaves_large = leaves_large
        self.greeting_s = timeout_s or limits.GREETING_S
        self.send_s = send_s
        self._handler = handler  # is called for everything that happens
        self._listener = Listener(listener, secret, self._admit, expected=expected, timeout_s=self.greeting_s)
        self._selector = self._listener.selector
        self._peers: set[Peer] = set()
        self._unsent: set[Peer] = set()
        self._closing = False
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_wakes)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(peer.has_unsent for peer in list(self._peers)) and time.monotonic() < deadline:
            time.sleep(limits.LAST_TICK_S)

    def close(self, timeout_s: float) -> None:
        self._closing = True
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def flush_soon(self, peer: Peer) -> None:
        if threading.current_thread() is self._thread:
            self._flush(peer)
            return
        with self.lock:
            self._unsent.add(peer)
        self._ring()

    def _serve(self) -> None:
        checked = 0.0
        try:
            while not self._closing:
                self._listener.poll(limits.TICK_S)
                self._flush_unsent()
                if (now := time.monotonic()) - checked > limits.TICK_S:
                    checked = now
                    for peer in [peer for peer in self._peers if peer.overdue(now)]:
                        self._hang_up(peer, peer.overdue(now))
                    self._handler.tick(now)
        except Exception:  # noqa: BLE001 - the edge of the thread; peers notice that it is gone
            _log.exception("the server %s failed", self._thread.name)
        finally:
            self._flush_unsent()
            for peer in list(self._peers):
                peer.close()
            self._listener.close()
            self._wake.close()
            self._woken.close()

    def _admit(self, sock: socket.socket) -> None:
        peer = Peer(sock, self)
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._attend, peer))

    def _attend(self, peer: Peer, events: int) -> None:
        if peer not in self._peers:
            return
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if events & selectors.EVENT_READ:
            try:
                for frame in peer.read():
                    self._handler.received(peer, frame)
            except ChannelClosed as exc:
                self._hang_up(peer, str(exc))
            except (KeyError, ValueError, TypeError, IndexError) as exc:
                self._hang_up(peer, f"it sent an invalid message: {exc!r}")
            except Exception as exc:  # noqa: BLE001 - others are served all the same
                _log.exception("a message from a peer of %s could not be handled", self._thread.name)
                self._hang_up(peer, f"its message could not be handled: {exc}")

    def _flush(self, peer: Peer) -> None:
        done = peer.flush()
        if peer in self._peers and peer.blocked == done:
            peer.blocked = not done
            wanted = selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE)
            self._selector.modify(peer.sock, wanted, partial(self._attend, peer))

    def _flush_unsent(self) -> None:
        with self.lock:
            unsent, self._unsent = self._unsent, set()
        for peer in unsent:
            self._flush(peer)

    def _hang_up(self, peer: Peer, why: str) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._selector.unregister(peer.sock)
            peer.close()
            self._handler.closed(peer, why)

    def _ring(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # it is awake already, or closed

    def _drain_wakes(self, events: int) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass


def allow_files(wanted: int) -> None:
    """Raise the open-file limit: each member is a socket, and 1,024 is a common limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
