"""The workers of a gang as threads of this process, for tests of what workers open together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kindler.data.row_order import RowAssignment
from kindler.data.sources import Source
from kindler.data.spool import Spool
from kindler.group import Group

T = TypeVar("T")


@dataclass
class _Meeting:
    """Where workers exchange bytes."""

    size: int
    barrier: threading.Barrier = field(init=False)
    messages: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.messages = [b""] * self.size

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        self.messages[rank] = data
        self.barrier.wait(60)
        messages = list(self.messages)
        self.barrier.wait(60)
        return messages


@dataclass
class ThreadWorker(Group):
    """One worker.

    Attributes:
        gathers: How often it has exchanged bytes with the others.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    scratch: Path
    meeting: _Meeting
    threads: int = 1
    gathers: int = 0

    def all_gather(self, data: bytes) -> list[bytes]:
        self.gathers += 1
        return self.meeting.gather(self.rank, data)

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        gathered = self.all_gather(data)
        return {rank: gathered[rank] for rank in ranks}


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
    meeting = _Meeting(size)
    workers = [
        ThreadWorker(rank, size, tuple(hosts or ["here"] * size), scratch / f"rank-{rank}", meeting)
        for rank in range(size)
    ]

    def run(worker: ThreadWorker) -> T:
        try:
            return call(worker)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(run, worker) for worker in workers]
    errors = [made.exception() for made in calls]
    for error in sorted(
        filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)
    ):
        raise error
    return [made.result() for made in calls]


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
