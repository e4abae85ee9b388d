"""One thread that serves all connections of a meeting point. What frames mean is left to its owner.

Nothing in it waits for a single connection: reading goes on frame by frame, a bounded piece at a time, and
what a connection does not take yet is queued for it.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from kindler.engine.frames import ChannelClosed, Frame, Joiner, Piece, encode, reading
from kindler.engine.listener import Door

_TICK_S = 0.2
_GREETING_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 120.0
_READS_PER_TURN = 16
_READ_BYTES = 64 << 10
_HELLO_HEADER_BYTES = 64 << 10
_MOST_PIECES = 64  # of one system call
_log = logging.getLogger(__name__)


class Peer:
    """One connection. Any thread may send; nothing here blocks.

    Attributes:
        name: Who it is, once its owner knows; until then it has the time of a greeting to say so.
        sock: The connection, for the board alone.
        blocked: Whether it takes no more for now.
    """

    def __init__(self, sock: socket.socket, board: Switchboard) -> None:
        self.name: int | None = None
        self.sock = sock
        self.blocked = False
        self._board = board
        self._since = time.monotonic()
        self._joiner = Joiner()
        self._parser = reading(_HELLO_HEADER_BYTES)
        self._room = bytearray(next(self._parser))
        self._view = memoryview(self._room)
        self._out: deque[memoryview] = deque()
        self._moved = 0.0
        self._open = True  # for sending

    def send(self, kind: str, *buffers: Piece, **fields: Any) -> None:
        """Queue a message; one for a connection that is gone is dropped."""
        for frame in encode(kind, buffers, fields):
            self.put(frame)

    def put(self, pieces: Iterable[Piece]) -> None:
        """Queue a frame that is encoded already."""
        with self._board.lock:
            if not self._open:
                return
            if not self._out:
                self._moved = time.monotonic()
            self._out.extend(memoryview(piece) for piece in pieces)
        self._board.flush_soon(self)

    def close(self) -> None:
        """Send what can be sent at once, and hang up. Only the board's own thread calls it, once."""
        with self._board.lock:
            self._open = False
        self.flush()
        self._board.forget(self.sock)
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was faster
        self.sock.close()

    def overdue(self, now: float) -> str:
        """Why to hang up on it, if it has taken too long."""
        if self.name is None and now - self._since > _GREETING_TIMEOUT_S:
            return "it did not say who it is"
        if self._out and now - self._moved > _SEND_TIMEOUT_S:
            return f"it took nothing for {_SEND_TIMEOUT_S:g} s"
        return ""

    def read(self) -> Iterator[Frame]:
        """The messages that are complete by now."""
        for _ in range(_READS_PER_TURN):  # others have a turn too
            try:
                # Many small frames in one go; the bytes of a large one straight to their place.
                if len(self._view) < _READ_BYTES:
                    came = memoryview(self.sock.recv(_READ_BYTES))
                else:
                    came = self._view[: self.sock.recv_into(self._view)]
            except BlockingIOError:
                return
            except OSError as exc:
                raise ChannelClosed(str(exc)) from exc
            if not came:
                raise ChannelClosed("the other end closed the connection")
            yield from self._messages(came)
            if len(came) < _READ_BYTES:
                return

    def flush(self) -> bool:
        """Send what it takes now; whether that was all.

        A connection that takes nothing any more is left to `read`: its last words may still be on this side.
        """
        with self._board.lock:
            while self._out:
                pieces = [self._out[place] for place in range(min(len(self._out), _MOST_PIECES))]
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

    def _messages(self, came: memoryview) -> Iterator[Frame]:
        """Read what came, which may be in its place already; the messages that it completes."""
        while came:
            taken = min(len(came), len(self._view))
            if came.obj is not self._room:
                self._view[:taken] = came[:taken]
            came, self._view = came[taken:], self._view[taken:]
            if not self._view and (frame := self._advance()) is not None:
                message = self._joiner.take(frame)
                if message is not None:
                    yield message

    def _advance(self) -> Frame | None:
        """Give the parser what it asked for; the frame, if that was the last of it."""
        frame: Frame | None = None
        try:
            wanted = self._parser.send(bytes(self._room))
        except StopIteration as done:
            frame = done.value
            self._parser = reading()
            wanted = next(self._parser)
        self._room = bytearray(wanted)
        self._view = memoryview(self._room)
        return frame


class Owner:
    """What a switchboard calls, on its own thread; none of these methods may block."""

    def heard(self, peer: Peer, frame: Frame) -> None:
        """A message came."""

    def gone(self, peer: Peer, why: str) -> None:
        """The connection broke, or was hung up on."""

    def tick(self, now: float) -> None:
        """Several times a second."""


class Switchboard:
    """Serves a listener from `start` to `close`.

    Args:
        listener: Is closed with the board.
        secret: What those who may come in know.
        owner: Is called for everything that happens.
        size: How many are expected.
        name: Of the thread.
    """

    def __init__(self, listener: socket.socket, secret: bytes, owner: Owner, *, size: int, name: str) -> None:
        self.lock = threading.RLock()  # of what is queued for peers
        self._owner = owner
        self._selector = selectors.DefaultSelector()
        self._peers: set[Peer] = set()
        self._unsent: set[Peer] = set()
        self._closing = False
        self._door = Door(
            listener, secret, self._selector, self._let_in, expected=size, timeout_s=_GREETING_TIMEOUT_S
        )
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Send what can be sent at once, hang up on everybody and end the thread."""
        self._closing = True
        self._ring()
        self._thread.join(timeout_s)

    def flush_soon(self, peer: Peer) -> None:
        """Something was queued for `peer`."""
        if threading.current_thread() is self._thread:
            self._flush(peer)
            return
        with self.lock:
            self._unsent.add(peer)
        self._ring()

    def forget(self, sock: socket.socket) -> None:
        """A peer is closing its socket."""
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            pass  # never registered, or already gone

    def _serve(self) -> None:
        checked = 0.0
        try:
            while not self._closing:
                for key, events in self._selector.select(_TICK_S):
                    if isinstance(key.data, Peer):
                        self._attend(key.data, events)
                    else:
                        key.data()
                self._flush_unsent()
                if (now := time.monotonic()) - checked > _TICK_S:
                    checked = now
                    self._look_around(now)
        except Exception:  # noqa: BLE001 - the edge of the thread; members notice that it is gone
            _log.exception("the meeting point of a run failed")
        finally:
            self._flush_unsent()
            for peer in list(self._peers):
                peer.close()
            self._door.close()
            self._wake.close()
            self._woken.close()
            self._selector.close()

    def _look_around(self, now: float) -> None:
        self._door.expire(now)
        for peer in [peer for peer in self._peers if peer.overdue(now)]:
            self._hang_up(peer, peer.overdue(now))
        self._owner.tick(now)

    def _let_in(self, sock: socket.socket) -> None:
        peer = Peer(sock, self)
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _attend(self, peer: Peer, events: int) -> None:
        if peer not in self._peers:
            return
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if events & selectors.EVENT_READ:
            try:
                for frame in peer.read():
                    self._owner.heard(peer, frame)
            except ChannelClosed as exc:
                self._hang_up(peer, str(exc))
            except (KeyError, ValueError, TypeError, IndexError) as exc:
                self._hang_up(peer, f"it sent what cannot be understood: {exc!r}")

    def _flush(self, peer: Peer) -> None:
        done = peer.flush()
        if peer in self._peers and peer.blocked == done:
            peer.blocked = not done
            wanted = selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE)
            self._selector.modify(peer.sock, wanted, peer)

    def _flush_unsent(self) -> None:
        with self.lock:
            unsent, self._unsent = self._unsent, set()
        for peer in unsent:
            self._flush(peer)

    def _hang_up(self, peer: Peer, why: str) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            peer.close()
            self._owner.gone(peer, why)

    def _ring(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # it is awake already, or closed

    def _drain(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
