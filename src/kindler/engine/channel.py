"""Frames between processes: a JSON header and raw buffers, never pickle.

A channel knows nothing of what its frames mean. Over TCP both ends prove that they hold the run's
secret before the first frame; over a socket pair there is nobody to keep out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["Address", "Channel", "ChannelClosed", "Frame", "accept", "connect"]

Address = tuple[str, int]

_HEADER = struct.Struct("!4sI")
_MAGIC = b"KDL1"
_MAX_HEADER_BYTES = 16 << 20
_NONCE_BYTES = 32
_SEND_TIMEOUT_S = 120.0


class ChannelClosed(ConnectionError):
    """The other end is gone."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: what kind it is, its fields, and the buffers that came with it."""

    kind: str
    fields: dict[str, Any]
    buffers: tuple[bytes, ...] = ()


class Channel:
    """One end of a connection. Any thread may send; one thread at a time receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        sock.settimeout(_SEND_TIMEOUT_S)

    def send(self, kind: str, *buffers: bytes, **fields: Any) -> None:
        """Send one frame.

        Raises:
            ChannelClosed: The other end is gone, or took nothing for two minutes.
        """
        header = json.dumps({"kind": kind, "fields": fields, "sizes": [len(b) for b in buffers]}).encode()
        try:
            with self._sending:
                self._sock.sendall(_HEADER.pack(_MAGIC, len(header)) + header)
                for buffer in buffers:
                    self._sock.sendall(buffer)
        except (OSError, ValueError) as exc:
            raise ChannelClosed(f"sending {kind!r}: {exc}") from exc

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame.

        Raises:
            TimeoutError: Nothing came in time.
            ChannelClosed: The other end is gone or does not speak this protocol.
        """
        if timeout_s is not None and not self._readable(timeout_s):
            raise TimeoutError(f"no frame in {timeout_s:g} s")
        magic, length = _HEADER.unpack(self._read(_HEADER.size, first=timeout_s is None))
        if magic != _MAGIC or length > _MAX_HEADER_BYTES:
            raise ChannelClosed("the other end sent something that is not a frame")
        header = json.loads(self._read(length))
        buffers = tuple(bytes(self._read(size)) for size in header["sizes"])
        return Frame(header["kind"], header["fields"], buffers)

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
        self._sock.close()

    def _readable(self, timeout_s: float | None) -> bool:
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
        except (OSError, ValueError) as exc:
            raise ChannelClosed(str(exc)) from exc

    def _read(self, size: int, *, first: bool = False) -> bytearray:
        if first:
            self._readable(None)  # waiting for a frame to begin has no limit; the rest of it must follow
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


def connect(address: Address, secret: bytes, *, timeout_s: float) -> Channel:
    """Connect to `accept` at the other side and prove to each other that both know `secret`."""
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as exc:
        raise ChannelClosed(f"connecting to {address[0]}:{address[1]}: {exc}") from exc
    try:
        theirs = _exactly(sock, _NONCE_BYTES)
        mine = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(mine + _proof(secret, b"client", theirs, mine))
        _expect(sock, _proof(secret, b"server", mine, theirs))
    except OSError as exc:
        sock.close()
        raise ChannelClosed(f"greeting {address[0]}:{address[1]}: {exc}") from exc
    return _tuned(sock)


def accept(sock: socket.socket, secret: bytes, *, timeout_s: float) -> Channel:
    """Greet a fresh connection; a stranger who does not know `secret` is closed on."""
    sock.settimeout(timeout_s)
    try:
        mine = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(mine)
        theirs = _exactly(sock, _NONCE_BYTES)
        _expect(sock, _proof(secret, b"client", mine, theirs))
        sock.sendall(_proof(secret, b"server", theirs, mine))
    except OSError as exc:
        sock.close()
        raise ChannelClosed(f"greeting a connection: {exc}") from exc
    return _tuned(sock)


def _tuned(sock: socket.socket) -> Channel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Channel(sock)


def _proof(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.new(secret, side + b"".join(nonces), hashlib.sha256).digest()


def _expect(sock: socket.socket, proof: bytes) -> None:
    if not hmac.compare_digest(_exactly(sock, len(proof)), proof):
        raise ConnectionError("the other end does not know this run's secret")


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while (missing := size - sum(map(len, parts))) > 0:
        part = sock.recv(missing)
        if not part:
            raise ConnectionError("the other end closed the connection")
        parts.append(part)
    return b"".join(parts)
