"""Clients that ask a gRPC server as fast as it answers: the next call after the answer.

    python _grpc_load.py KIND HOST PORT BODY_FILE CLIENTS SECONDS

KIND is `sockets` (a connection each), `shared` (one connection for all) or `grpcio` (grpcio's own
asynchronous client, one channel for all). Prints JSON: calls a second, how many were answered in all,
failures. The first two are written on sockets, as `_serve_load.py` is for HTTP, so that the clients cost
about the same for both.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_FRAME = struct.Struct(">BHBBI")
_DATA, _HEADERS, _SETTINGS, _WINDOW = 0, 1, 4, 8
_LARGEST = 16_384
_FINE = b"grpc-status\x010"


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return _FRAME.pack(len(content) >> 16, len(content) & 0xFFFF, kind, flags, stream) + content


class Connection:
    """A connection with calls on it. Does not wait for windows: those of the server are large enough here.

    Args:
        host: The server's address.
        port: The server's port.
        message: What every call sends.
        encoding: How that is compressed.
    """

    def __init__(self, host: str, port: int, message: bytes, encoding: str = "") -> None:
        self._where = host, port
        fields = {":method": "POST", ":scheme": "http", ":path": METHOD, ":authority": f"{host}:{port}"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        fields |= {"grpc-encoding": encoding} if encoding else {}
        self._head = b"".join(
            b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in fields.items()
        )
        content = struct.pack(">BI", bool(encoding), len(message)) + message
        self._parts = [content[at : at + _LARGEST] for at in range(0, len(content), _LARGEST)]
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._next = 1

    async def open(self) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(*self._where)
        window = _frame(_WINDOW, 0, 0, struct.pack(">I", 1 << 30))
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b"") + window)
        self._reading = asyncio.create_task(self._read())

    def close(self) -> None:
        """Hang up."""
        self._reading.cancel()
        self._writer.close()

    async def ask(self) -> bool:
        """One call; whether it was answered."""
        stream, self._next = self._next, self._next + 2
        frames = [_frame(_HEADERS, 0x4, stream, self._head)]
        last = len(self._parts) - 1
        frames += [_frame(_DATA, i == last, stream, part) for i, part in enumerate(self._parts)]
        answer = self._waiting[stream] = asyncio.get_running_loop().create_future()
        self._writer.write(b"".join(frames))
        return await answer

    async def _read(self) -> None:
        rest = b""
        while data := await self._reader.read(1 << 18):
            data, at = rest + data, 0
            while len(data) - at >= 9:
                high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
                end = at + 9 + (high << 16 | low)
                if end > len(data):
                    break
                if kind == _HEADERS and flags & 1:
                    self._waiting.pop(stream).set_result(data.find(_FINE, at, end) > 0)
                elif kind == _SETTINGS and not flags & 1:
                    self._writer.write(_frame(_SETTINGS, 1, 0, b""))
                at = end
            rest = data[at:]
        for answer in self._waiting.values():
            answer.set_result(False)


async def main() -> None:
    """Ask, and print what was measured."""
    kind, host, port, body, clients, seconds = sys.argv[1:]
    message = Path(body).read_bytes()
    warm = time.perf_counter() + min(2.0, float(seconds) / 2)
    end = warm + float(seconds)
    answered = asked = failures = 0

    async def client(ask: Callable[[], Awaitable[bool]]) -> None:
        nonlocal answered, asked, failures
        while time.perf_counter() < end:
            fine = await ask()
            asked += 1
            failures += not fine
            answered += warm < time.perf_counter() < end

    if kind == "grpcio":
        import grpc

        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            call = channel.unary_unary(METHOD)

            async def ask() -> bool:
                return bool(await call(message))

            await asyncio.gather(*(client(ask) for _ in range(int(clients))))
    else:
        connections = [
            Connection(host, int(port), message) for _ in range(1 if kind == "shared" else int(clients))
        ]
        for connection in connections:
            await connection.open()
        asks = [connections[i % len(connections)].ask for i in range(int(clients))]
        await asyncio.gather(*map(client, asks))
    print(json.dumps({"rate": answered / float(seconds), "asked": asked, "failures": failures}))


if __name__ == "__main__":
    asyncio.run(main())
