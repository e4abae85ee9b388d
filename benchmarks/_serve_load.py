"""Clients that ask a server as fast as it answers: one connection each, the next request after the answer.

    python _serve_load.py HOST PORT METHOD PATH BODY_FILE CLIENTS SECONDS

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
    host, port, method, path, body, clients, seconds = sys.argv[1:]
    content = Path(body).read_bytes()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    request = head.encode() + content
    warm = time.perf_counter() + min(2.0, float(seconds) / 2)
    end = warm + float(seconds)
    latencies: list[float] = []
    failures = 0

    async def client() -> None:
        nonlocal failures
        reader, writer = await asyncio.open_connection(host, int(port))
        while (started := time.perf_counter()) < end:
            writer.write(request)
            told = await reader.readuntil(b"\r\n\r\n")
            length = int(told.lower().partition(b"content-length:")[2].split(None, 1)[0])
            await reader.readexactly(length)
            if started >= warm:
                latencies.append(time.perf_counter() - started)
                failures += b" 200 " not in told.partition(b"\r\n")[0]
        writer.close()

    await asyncio.gather(*(client() for _ in range(int(clients))))
    latencies.sort()

    def percentile(share: float) -> float:
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3

    rate = len(latencies) / float(seconds)
    shown = {"rate": rate, "p50_ms": percentile(0.5), "p99_ms": percentile(0.99), "failures": failures}
    print(json.dumps(shown))


asyncio.run(main())
