"""How many publishes and look-ups of the newest version does a store do in a second?

One process publishes small values (JSON of 1 kB, each with its own blob) one after the other under one name,
then asks for the newest version of it; on SQLite with files, and on PostgreSQL with files where that is
installed. Disks differ most in how long they take to say that bytes are safe: that is shown beside.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from _bench import Report, arguments, rounds, workplace

PUBLISHES = 300
LOOKUPS = 3000


def main() -> None:
    given = arguments(__doc__, repeats=3)
    publishes, lookups = (10, 50) if given.quick else (PUBLISHES, LOOKUPS)
    report = Report("store", "publishes/s and newest-version look-ups/s of one process", quick=given.quick)
    with workplace() as folder, _postgres() as server:
        stores = {"SQLite": str(folder / "sqlite")}
        if server:
            stores["PostgreSQL"] = f"{server}/postgres?blobs=file://{folder}/postgres"
        work: dict[str, Callable[[], float]] = {"fsync": lambda: _syncs(folder, 50)}
        for name, url in stores.items():
            work[f"{name}, publishes"] = lambda url=url: _publishes(url, publishes)  # type: ignore[misc]
            work[f"{name}, look-ups"] = lambda url=url: _lookups(url, lookups)  # type: ignore[misc]
        for name, values in rounds(work, repeats=given.repeats, warm_up=True).items():
            report.figure(name, values, "/s")
    report.finish(publishes=publishes, lookups=lookups)


def _publishes(url: str, count: int) -> float:
    from kindler import Store

    om = Store(url)
    mark = os.urandom(8).hex()
    om.datasets.put(mark, "net", mode="replace")
    start = time.perf_counter()
    for i in range(count):
        om.datasets.put([mark, i, "x" * 1000], "net", mode="replace")
    spent = time.perf_counter() - start
    om.close()
    return count / spent


def _lookups(url: str, count: int) -> float:
    from kindler import Store

    om = Store(url)
    shelf = om.datasets
    shelf.metadata("net")
    start = time.perf_counter()
    for _ in range(count):
        shelf.metadata("net")
    spent = time.perf_counter() - start
    om.close()
    return count / spent


def _syncs(folder: Path, count: int) -> float:
    with (folder / "sync").open("wb") as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        return count / (time.perf_counter() - start)


@contextmanager
def _postgres() -> Iterator[str | None]:
    """A server of our own; None where PostgreSQL is not installed."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        print("  PostgreSQL is not installed and left out", flush=True)
        yield None
        return
    with workplace() as folder:
        user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        if user:
            folder.chmod(0o755)
            shutil.chown(folder, "postgres", "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        data = str(folder / "data")
        control = [*user, str(programs[-1] / "pg_ctl"), "-D", data]
        make = [*user, str(programs[-1] / "initdb"), "-D", data, "-U", "kindler", "-A", "trust"]
        settings = f"-p {port} -h 127.0.0.1 -k {folder}"
        subprocess.run(make, check=True, cwd=folder, capture_output=True)
        start = [*control, "-o", settings, "-l", str(folder / "log"), "-w", "start"]
        subprocess.run(start, check=True, cwd=folder, capture_output=True)
        try:
            yield f"postgresql://kindler@127.0.0.1:{port}"
        finally:
            subprocess.run([*control, "-m", "fast", "-w", "stop"], check=True, cwd="/", capture_output=True)


if __name__ == "__main__":
    main()
