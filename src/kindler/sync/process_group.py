"""torch's default process group between the workers of a run, for models that call `torch.distributed`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from kindler.sync.network_torch import bound_store, meeting_point


class Meeting(Protocol):
    """The part of a worker that the group needs."""

    rank: int
    size: int
    address: str
    run_id: str

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]: ...


dist: Any = torch.distributed


@contextmanager
def process_group(worker: Meeting, *, shared_gpus: bool, timeout_s: float) -> Iterator[None]:
    """Join all workers, by NCCL between GPUs of their own and by gloo otherwise; leave at the end.

    Args:
        worker: This worker.
        shared_gpus: Whether several workers use one GPU, which NCCL refuses.
        timeout_s: Seconds to wait for the others, here and in each operation of the model's.

    Raises:
        SyncError: They did not meet.
    """
    timeout = timedelta(seconds=timeout_s)
    listener = meeting_point(worker.address) if worker.rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else 0
    host, port = json.loads(worker.gather(json.dumps([worker.address, port]).encode(), [0])[0])
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    nccl = torch.cuda.is_available() and dist.is_nccl_available() and not shared_gpus
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=dist.PrefixStore(f"kindler/{worker.run_id}", bound_store(host, port, timeout, listener)),
        rank=worker.rank,
        world_size=worker.size,
        timeout=timeout,
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
