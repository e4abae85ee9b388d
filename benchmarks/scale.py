"""How long do 1,000 workers take to meet, and to gather?

One process has the hub, as the driver of a run has; another plays the supervisors, as coroutines that speak
the real protocol. So the figures hold the work of both ends, of which a real run has only one on the driver's
machine. Strangers who connect and say nothing are there all the time.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from _bench import Report, arguments

SECRET = b"s" * 32
STRANGERS = 200
LOCAL_STATE = 5_000


def main() -> None:
    given = arguments(__doc__, repeats=5)
    size = 100 if given.quick else 1_000
    report = Report("scale", f"seconds to meet and to gather, {size:,} workers", quick=given.quick)
    rounds = [_round(size) for _ in range(given.repeats)]
    for name in rounds[0]:
        unit = "MB" if name.startswith("memory") else "" if name.startswith("threads") else "s"
        report.figure(name, [seen[name] for seen in rounds], unit)
    report.finish(workers=size, strangers=STRANGERS)


def _round(size: int) -> dict[str, float]:
    """One run, in processes of their own."""
    done = subprocess.run(
        [sys.executable, __file__, "--hub", str(size)], stdout=subprocess.PIPE, text=True, check=True
    )
    seen: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seen


def serve(size: int) -> None:
    """The hub's side: print what the members saw, and what the hub took."""
    from kindler.engine.hub import Hub
    from kindler.engine.job import Job, equal_ranks

    before = time.process_time()
    with Hub(Job(ranks=equal_ranks("", size), secret=SECRET)) as hub:
        strangers = [socket.create_connection(hub.address) for _ in range(STRANGERS)]
        host, port = hub.address
        members = subprocess.Popen(
            [sys.executable, __file__, "--members", str(size), host, str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        seen = json.loads(members.communicate(timeout=300)[0].splitlines()[-1])
        seen["threads of the hub's process"] = threading.active_count()
        for stranger in strangers:
            stranger.close()
    seen["CPU time of the hub for all of it"] = time.process_time() - before
    seen["memory of the hub's process, peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(seen))


def take_part(size: int, host: str, port: int) -> None:
    """The members' side: print the seconds that each thing took."""
    from kindler.engine.hub import _allow_files

    _allow_files(size + 100)
    print(json.dumps(asyncio.run(_take_part(size, (host, port)))))


async def _take_part(size: int, address: tuple[str, int]) -> dict[str, float]:
    from _members import each, join_all

    from kindler.engine.meeting import write_numbers

    seen: dict[str, float] = {}

    async def timed(name: str, do: Callable[[Any], Awaitable[Any]]) -> None:
        began = time.perf_counter()
        await each(members, do)
        seen[name] = time.perf_counter() - began

    began = time.perf_counter()
    members = await join_all(address, SECRET, size)
    seen["all connected, proved and welcomed"] = time.perf_counter() - began
    await timed(
        "a gather of 60 bytes of each, to all", lambda m: m.gather(b"%060d" % m.rank, read=m.rank < 10)
    )
    await timed("the same bytes of each, to all", lambda m: m.gather(b"layout" * 100))
    await timed("a sum", lambda m: m.gather(write_numbers([m.rank] * 9), "sum"))
    state = bytes(LOCAL_STATE)
    everyone = range(size)
    await timed("5 kB of each, to the first", lambda m: m.gather(state, () if m.rank else everyone))
    await timed("a sign of life of each", lambda m: m.send("pulse", ticks=1, waiting=False))
    await each(members, lambda m: m.send("done"))
    for member in members:
        member.close()
    return seen


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hub"]:
        serve(int(sys.argv[2]))
    elif sys.argv[1:2] == ["--members"]:
        take_part(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
