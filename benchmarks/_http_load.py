"""Clients that ask a server over HTTP with aiohttp as fast as it answers: the next request after the answer.

    python _http_load.py HOST PORT PATH BODY_FILE CLIENTS SECONDS

Prints JSON: requests a second, how many were answered in all, failures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp


async def main() -> None:
    """Ask, and print what was measured."""
    host, port, path, body, clients, seconds = sys.argv[1:]
    content = Path(body).read_bytes()
    warm = time.perf_counter() + min(2.0, float(seconds) / 2)
    end = warm + float(seconds)
    answered = asked = failures = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal answered, asked, failures
        while time.perf_counter() < end:
            async with session.post(
                path, data=content, headers={"content-type": "application/json"}
            ) as reply:
                await reply.read()
            asked += 1
            failures += reply.status != 200
            answered += warm < time.perf_counter() < end

    connector = aiohttp.TCPConnector(limit=int(clients))
    async with aiohttp.ClientSession(f"http://{host}:{port}", connector=connector) as session:
        await asyncio.gather(*(client(session) for _ in range(int(clients))))
    print(json.dumps({"rate": answered / float(seconds), "asked": asked, "failures": failures}))


if __name__ == "__main__":
    asyncio.run(main())
