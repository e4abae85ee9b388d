"""Frames between processes, over sockets that wait. The format of frames is in `frames.py`.

A channel knows nothing of what its frames mean. Over TCP both ends prove that they hold the run's
secret before the first frame; over a socket pair there is nobody to keep out.
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

from kindler.engine.frames import ChannelClosed, Frame, Joiner, Piece, encode, encode_again, reading

__all__ = [
    "GREETING_BYTES",
    "NONCE_BYTES",
    "Address",
    "Channel",
    "ChannelClosed",
    "Frame",
    "accept",
    "connect",
    "greeting",
    "introduction",
    "tuned",
]

Address = tuple[str, int]  # of a socket in a folder, its path and 0

NONCE_BYTES = 32
GREETING_BYTES = NONCE_BYTES + hashlib.sha256().digest_size
_SEND_TIMEOUT_S = 120.0
_LET_GO_S = 5.0


class Channel:
    """One end of a connection. Any thread may send; one thread at a time receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Both are reentrant: a signal's handler may close a channel that its own thread uses.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._joiner = Joiner()
        self._header_bytes: tuple[int, ...] = ()
        sock.settimeout(_SEND_TIMEOUT_S)

    def limit(self, *, header_bytes: int, message_bytes: int) -> None:
        """Take no larger headers and messages from now on: the other end is not trusted."""
        self._header_bytes = (header_bytes,)
        self._joiner.most_bytes = message_bytes

    def send(self, kind: str, *buffers: Piece, **fields: Any) -> None:
        """Send one message, in as many frames as it takes.

        Raises:
            ChannelClosed: The other end is gone, or took nothing for two minutes.
        """
        for frame in encode(kind, buffers, fields):
            self._put(frame, kind)

    def pass_on(self, frame: Frame) -> None:
        """Send a frame as it came from another channel's `receive(whole=False)`."""
        self._put(encode_again(frame), frame.kind)

    def receive(self, timeout_s: float | None = None, *, whole: bool = True) -> Frame:
        """The next message; with `whole=False` the next frame, which may be a part of one.

        Raises:
            TimeoutError: Nothing came in time.
            ChannelClosed: The other end is gone or does not speak this protocol.
        """
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
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    def fileno(self) -> int:
        return self._sock.fileno()

    def detach(self) -> socket.socket:
        """The socket itself, for bytes that are not frames; the channel is not used any more."""
        return self._sock

    def close(self) -> None:
        """Close both directions; a thread that waits in `receive` wakes with ChannelClosed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was faster
        # The descriptor is given back once nobody uses it: the next file that is opened gets the same
        # number, and a thread that is just about to wait for this socket would wait for that file instead.
        with _held(self._receiving), _held(self._sending):
            self._sock.close()

    def _put(self, pieces: list[Piece], kind: str) -> None:
        try:
            with self._sending:
                for piece in pieces:
                    self._sock.sendall(piece)
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
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
        except (OSError, ValueError) as exc:
            raise ChannelClosed(str(exc)) from exc

    def _read(self, size: int) -> bytes:
        return bytes(self._fill(size))

    def _fill(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                got = self._sock.recv_into(view[done:])
            except (OSError, ValueError) as exc:
                raise ChannelClosed(str(exc)) from exc
            if not got:
                raise ChannelClosed("the other end closed the connection")
            done += got
        return data


@contextmanager
def _held(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock that others let go of in a moment; without it, should they not."""
    got = lock.acquire(timeout=_LET_GO_S)
    try:
        yield
    finally:
        if got:
            lock.release()


def connect(address: Address, secret: bytes, *, timeout_s: float) -> Channel:
    """Connect to a `Door` at the other side and prove to each other that both know `secret`."""
    try:
        sock = _dialled(address, timeout_s)
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
    """Greet one fresh connection; a stranger who does not know `secret` is closed on. See also `Door`."""
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
    """The connecting side's part of a greeting: the reply to the first words, and the answer to expect."""
    mine = secrets.token_bytes(NONCE_BYTES)
    return mine + _proof(secret, b"client", theirs, mine), _proof(secret, b"server", mine, theirs)


def greeting(secret: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The accepting side's part of a greeting: what to say first, and the answer to the reply.

    The reply has `GREETING_BYTES` bytes; the function raises ConnectionError for one that proves nothing.
    """
    mine = secrets.token_bytes(NONCE_BYTES)

    def answer(reply: bytes) -> bytes:
        theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"client", mine, theirs)):
            raise ConnectionError("the other end does not know this run's secret")
        return _proof(secret, b"server", theirs, mine)

    return mine, answer


def tuned(sock: socket.socket) -> socket.socket:
    """The socket, set for small messages and to notice a machine that went away."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _dialled(address: Address, timeout_s: float) -> socket.socket:
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
    parts: list[bytes] = []
    while (missing := size - sum(map(len, parts))) > 0:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(missing)
        if not part:
            raise ConnectionError("the other end closed the connection")
        parts.append(part)
    return b"".join(parts)
