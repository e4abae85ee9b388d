"""Real processes that meet: a small worker to test what ranks do together, without an engine.

`run_ranks(3, function, *args)` calls `function(worker, *args)` in three processes and returns what each
returned, by rank; DIED for one that ended without a result.
"""

from __future__ import annotations

import multiprocessing
import pkgutil
import socket
import tempfile
import traceback
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from kindler.engine.links import connect_links
from kindler.engine.placement import Placement, own_address
from kindler.errors import SyncTimeoutError
from kindler.group import Group

DIED = "died"

_DEADLINE_S = 300.0  # only a gang that is stuck comes near it
# Every rank would import these itself; pytest is its main module, as that of the process that starts it.
_ALWAYS_PRELOADED = ("cloudpickle", "pytest", "kindler.testing.ranks", "kindler.sync.allreduce")


@dataclass
class GangWorker(Group):
    """What ranks see of the run; `gather` passes through the parent, which knows who is gone."""

    rank: int
    size: int
    hosts: tuple[str, ...]
    scratch: Path
    run_id: str
    pipe: Connection
    secret: bytes = b"secret"
    port_range: tuple[int, int] | None = None
    reports: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = self.hosts[self.rank]
        self.address = own_address(self.hosts, seen="127.0.0.1")
        self.local_rank = self.hosts[: self.rank].count(self.host)
        self.local_size = self.hosts.count(self.host)

    def place(self, device: str, *, share: bool) -> Placement:
        return Placement(device, index=self.local_rank)

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        self.pipe.send(("gather", data))
        if not self.pipe.poll(_DEADLINE_S):
            raise TimeoutError(f"rank {self.rank} waited for the others")
        gathered: list[bytes] | tuple[int, ...] = self.pipe.recv()
        if isinstance(gathered, tuple):
            raise SyncTimeoutError(op="all_gather", missing=gathered, size=self.size, waited_s=0.0)
        return {rank: gathered[rank] for rank in ranks}

    def links(self, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
        return connect_links(self, peers, timeout_s=timeout_s)

    def report(self, kind: str, **fields: Any) -> None:
        self.reports.append((kind, fields))


class RankFailedError(Exception):
    """A rank raised; the message is its traceback."""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    hosts: Sequence[str] | None = None,
    preload: Sequence[str] = ("numpy",),
    prepare: str = "",
) -> list[Any]:
    """Run `function(worker, *args)` on `size` processes and return what each returned.

    Args:
        size: The number of processes.
        function: What each of them runs.
        *args: Its arguments after the worker.
        hosts: A host name for each rank; one host for all otherwise.
        preload: Modules that are imported once and inherited by all.
        prepare: A function, as "module:function", that is called first in each process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload, *_ALWAYS_PRELOADED])
    machines, run_id = tuple(hosts or ["host"] * size), uuid.uuid4().hex[:8]
    job = cloudpickle.dumps((function, args))
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for rank in range(size):
            here, there = context.Pipe()
            worker = GangWorker(rank, size, machines, Path(scratch), run_id, there)
            processes.append(context.Process(target=_main, args=(worker, job, prepare), daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        try:
            return _serve(pipes)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _serve(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    gathered: dict[int, bytes] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], _DEADLINE_S)
        if not ready:
            raise TimeoutError("no rank said anything")
        for rank in [rank for rank, pipe in enumerate(pipes) if pipe in ready]:
            try:
                kind, data = pipes[rank].recv()
            except EOFError:
                results[rank] = DIED
                continue
            if kind == "error":
                raise RankFailedError(f"rank {rank}:\n{data}")
            if kind == "gather":
                gathered[rank] = data
            else:
                results[rank] = cloudpickle.loads(data)
        if gathered and len(gathered) + len(results) >= len(pipes):
            missing = tuple(sorted(results))
            everything = missing or [gathered[rank] for rank in range(len(pipes))]
            for rank in gathered:
                pipes[rank].send(everything)
            gathered.clear()
    return [results[rank] for rank in range(len(pipes))]


def _main(worker: GangWorker, job: bytes, prepare: str) -> None:
    try:
        if prepare:
            pkgutil.resolve_name(prepare)()
        function, args = cloudpickle.loads(job)
        worker.pipe.send(("result", cloudpickle.dumps(function(worker, *args))))
    except BaseException:  # noqa: BLE001 - the edge of the process: the parent raises it
        worker.pipe.send(("error", traceback.format_exc()))
