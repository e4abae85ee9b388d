"""Where the code that asks is running: `kindler.worker()`."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker of a run, as its own program sees it.

    Attributes:
        rank: Its number among all workers, from 0.
        size: How many workers there are.
        local_rank: Its number among those of its machine.
        local_size: How many are on its machine.
        host: Its machine.
        device: What it computes on: "cpu" or "cuda". Its own GPU is the only one that it sees, unless several
            were given to it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    device: str = "cpu"


_here: WorkerInfo | None = None


def worker() -> WorkerInfo:
    """Which worker this code runs in. Outside of a run: the only one, on this machine's CPU.

    In workers that train or evaluate the variables RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say the
    same to libraries that look for them.

    >>> worker().rank, worker().size, worker().device
    (0, 1, 'cpu')
    """
    return _here or WorkerInfo(host=socket.gethostname())


def be(info: WorkerInfo) -> None:
    """Say who this process is, in `worker` and in the usual variables."""
    global _here
    _here = info
    os.environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_size),
    )
