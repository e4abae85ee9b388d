"""Clients that ask a server as fast as it answers: one connection each, the next request after the answer.

    python _serve_load.py HOST PORT METHOD PATH BODY_FILE CLIENTS SECONDS [HEADER ...]

Prints JSON: requests a second, latencies, failures. Written on sockets, so that the client costs little and
the same for every server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path


async def main() -> None:
    """Ask, and print what was measured."""
    host, port, method, path, body, clients, seconds, *headers = sys.argv[1:]
    content = Path(body).read_bytes()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(content)}\r\n"
        + "".join(f"{header}\r\n" for header in headers)
        + "\r\n"
    )
    request = head.encode() + content
    warm = time.perf_counter() + min(2.0, float(seconds) / 2)
    end = warm + float(seconds)
    answered: list[tuple[float, float]] = []  # when, and after how long
    failures = 0

    async def client() -> None:
        nonlocal failures
        reader, writer = await asyncio.open_connection(host, int(port))
        while (started := time.perf_counter()) < end:
            writer.write(request)
            told = await reader.readuntil(b"\r\n\r\n")
            length = int(told.lower().partition(b"content-length:")[2].split(None, 1)[0])
            await reader.readexactly(length)
            now = time.perf_counter()
            answered.append((now, now - started))
            failures += b" 200 " not in told.partition(b"\r\n")[0]
        writer.close()

    await asyncio.gather(*(client() for _ in range(int(clients))))
    # A server so slow that it answered nothing in time is judged by its last answer.
    latencies = sorted([took for when, took in answered if warm <= when <= end] or [answered[-1][1]])

    def percentile(share: float) -> float:
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3

    rate = len(latencies) / float(seconds)
    shown = {"rate": rate, "p50_ms": percentile(0.5), "p99_ms": percentile(0.99), "failures": failures}
    shown["asked"] = len(answered)
    print(json.dumps(shown))


asyncio.run(main())
