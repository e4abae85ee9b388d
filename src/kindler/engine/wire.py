"""Frames over blocking sockets, and the greeting that proves that both ends hold the run's secret.

A socket pair needs no greeting. The format of frames is in `kindler.frame`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kindler import limits
from kindler.frame import ChannelClosed, Frame, Joiner, Piece, encode, encode_again, reading

Address = tuple[str, int]  # of a socket in a folder, its path and 0

NONCE_BYTES = 32
GREETING_BYTES = NONCE_BYTES + hashlib.sha256().digest_size


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        # Both are reentrant: a signal's handler may close a channel that its own thread uses.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._joiner = Joiner()
        self._header_bytes: tuple[int, ...] = ()
        sock.settimeout(limits.SEND_S)

    def limit(self, *, header_bytes: int, message_bytes: int) -> None:
        self._header_bytes = (header_bytes,)
        self._joiner.max_bytes = message_bytes

    def send(self, kind: str, *buffers: Piece, **fields: Any) -> None:
        """Send one message, in as many frames as it takes; raise ChannelClosed if the peer is gone."""
        for frame in encode(kind, buffers, fields):
            self._put(frame, kind)

    def pass_on(self, frame: Frame) -> None:
        self._put(encode_again(frame), frame.kind)

    def receive(self, timeout_s: float | None = None, *, whole: bool = True) -> Frame:
        """Return the next message, or with `whole=False` the next frame, which may be a part of one."""
        with self._receiving:
            while True:
                if timeout_s is not None and not self._readable(timeout_s):
                    raise TimeoutError(f"no frame in {timeout_s:g} s")
                frame = self._frame(wait=timeout_s is None)
                message = self._joiner.take(frame) if whole else frame
                if message is not None:
                    return message

    @property
    def local_host(self) -> str:
        return str(self.socket.getsockname()[0])

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Close both directions; a thread that waits in `receive` gets ChannelClosed."""
        shut_down(self.socket)
        # The descriptor is given back once nobody uses it: the next file that is opened gets the same
        # number, and a thread that is just about to wait for this socket would wait for that file instead.
        with _acquired(self._receiving), _acquired(self._sending):
            self.socket.close()

    def _put(self, pieces: list[Piece], kind: str) -> None:
        try:
            with self._sending:
                for piece in pieces:
                    self.socket.sendall(piece)
        except (OSError, ValueError) as exc:
            raise ChannelClosed(f"sending {kind!r}: {exc}") from exc

    def _frame(self, *, wait: bool) -> Frame:
        parser = reading(*self._header_bytes)
        wanted = next(parser)
        if wait:
            self._readable(None)  # waiting for a frame to begin has no limit; the rest of it must follow
        try:
            while True:
                wanted = parser.send(self._read(wanted))
        except StopIteration as done:
            frame: Frame = done.value
            return frame

    def _readable(self, timeout_s: float | None) -> bool:
        try:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
            return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
        except (OSError, ValueError) as exc:
            raise ChannelClosed(str(exc)) from exc

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                received = self.socket.recv_into(view)
            except (OSError, ValueError) as exc:
                raise ChannelClosed(str(exc)) from exc
            if not received:
                raise ChannelClosed("the other end closed the connection")
            view = view[received:]
        return bytes(data)


@contextmanager
def _acquired(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock that others release in a moment; go on without it if they do not."""
    acquired = lock.acquire(timeout=limits.CLOSE_S)
    try:
        yield
    finally:
        if acquired:
            lock.release()


def shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was faster


def connect(address: Address, secret: bytes, *, timeout_s: float) -> Channel:
    """Connect to a `Listener`; both sides prove that they know `secret`."""
    try:
        sock = _connected(address, timeout_s)
    except OSError as exc:
        raise ChannelClosed(f"connecting to {address[0]}:{address[1]}: {exc}") from exc
    deadline = time.monotonic() + timeout_s
    try:
        reply, expected = introduction(secret, _exactly(sock, NONCE_BYTES, deadline))
        sock.sendall(reply)
        if not hmac.compare_digest(_exactly(sock, len(expected), deadline), expected):
            raise ConnectionError("the other end does not know this run's secret")
    except OSError as exc:
        sock.close()
        raise ChannelClosed(f"greeting {address[0]}:{address[1]}: {exc}") from exc
    return Channel(tuned(sock))


def accept(sock: socket.socket, secret: bytes, *, timeout_s: float) -> Channel:
    deadline = time.monotonic() + timeout_s
    hello, answer = greeting(secret)
    try:
        sock.sendall(hello)
        sock.sendall(answer(_exactly(sock, GREETING_BYTES, deadline)))
    except OSError as exc:
        sock.close()
        raise ChannelClosed(f"greeting a connection: {exc}") from exc
    return Channel(tuned(sock))


def introduction(secret: bytes, theirs: bytes) -> tuple[bytes, bytes]:
    """The client's part of a greeting: its reply to the server's nonce, and the answer to expect."""
    mine = secrets.token_bytes(NONCE_BYTES)
    return mine + _proof(secret, b"client", theirs, mine), _proof(secret, b"server", mine, theirs)


def greeting(secret: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The server's part: its nonce, and what answers the client's `GREETING_BYTES` (or raises)."""
    mine = secrets.token_bytes(NONCE_BYTES)

    def answer(reply: bytes) -> bytes:
        theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"client", mine, theirs)):
            raise ConnectionError("the other end does not know this run's secret")
        return _proof(secret, b"server", theirs, mine)

    return mine, answer


def tuned(sock: socket.socket) -> socket.socket:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _connected(address: Address, timeout_s: float) -> socket.socket:
    if not address[0].startswith("/"):
        return socket.create_connection(address, timeout=timeout_s)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address[0])
    except BaseException:
        sock.close()
        raise
    return sock


def _proof(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.new(secret, side + b"".join(nonces), hashlib.sha256).digest()


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return data
