"""The workers of a gang as threads of this process, for tests of what workers open together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kindler.data.row_order import RowAssignment
from kindler.data.sources import Source
from kindler.data.spool import Spool
from kindler.group import Group

T = TypeVar("T")


@dataclass
class ThreadWorker(Group):
    """One worker; all of a gang have the same barrier and list of messages."""

    rank: int
    size: int
    hosts: tuple[str, ...]
    scratch: Path
    arrivals: threading.Barrier
    messages: list[bytes]
    threads: int = 1

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        self.messages[self.rank] = data
        self.arrivals.wait(60)
        gathered = {rank: self.messages[rank] for rank in ranks}
        self.arrivals.wait(60)
        return gathered


def together(
    size: int, call: Callable[[ThreadWorker], T], scratch: Path, hosts: Sequence[str] | None = None
) -> list[T]:
    """What `call(worker)` returns on each of `size` workers. Raises the first error.

    Args:
        size: The number of workers.
        call: Called in a thread per worker.
        scratch: The folder that holds the scratch folder of each rank.
        hosts: The machine of each rank; None puts all of them on one.
    """
    machines = tuple(hosts or ["here"] * size)
    barrier, messages = threading.Barrier(size), [b""] * size

    def run(rank: int) -> T:
        try:
            return call(ThreadWorker(rank, size, machines, scratch / f"rank-{rank}", barrier, messages))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for done in calls if (error := done.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [done.result() for done in calls]


def opened(
    source: Source,
    size: int,
    scratch: Path,
    *,
    hosts: Sequence[str] | None = None,
    assignment: RowAssignment | None = None,
    in_order: bool = False,
) -> list[Spool]:
    """A source as each of `size` workers opens it."""
    how = assignment or RowAssignment.between(size, seed=0)
    return together(size, lambda worker: source.open(worker, how, in_order=in_order), scratch, hosts)
