"""Process groups of torch between hosts: gloo for CPU tensors, NCCL for CUDA ones.

The groups are made directly on a store of their own, so torch's default process group stays free for the
user and nothing global is left after `close`. Who takes part is decided in `allreduce_torch.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from kindler.errors import SyncError
from kindler.sync.waiting import Waiting

__all__ = ["Meeting", "Network", "Work", "backend_errors"]

dist: Any = torch.distributed  # its stubs leave out the classes that are used here


class Meeting(Protocol):
    """The part of a worker that the members of a network need to find each other."""

    @property
    def rank(self) -> int: ...

    @property
    def address(self) -> str: ...

    @property
    def run_id(self) -> str: ...

    def all_gather(self, data: bytes) -> list[bytes]: ...


class Work:
    """An exchange under way."""

    def __init__(self, work: Any, doing: str, waiting: Waiting) -> None:
        self._work = work
        self._doing = doing
        self._waiting = waiting

    def wait(self) -> None:
        """Block until it is done; with NCCL, until the current stream would see that."""
        with backend_errors(self._doing), self._waiting:
            self._work.wait()


class Network:
    """One member's end of a torch process group that belongs to this run alone.

    `connect` is called by every rank of the run, members or not, since they meet in `all_gather`.
    """

    def __init__(self, group: Any, store: Any, waiting: Waiting) -> None:
        self._group = group
        self._waiting = waiting
        self._store = store  # the first member's holds the listening socket

    @classmethod
    def connect(
        cls,
        worker: Meeting,
        members: Sequence[int],
        *,
        device: torch.device,
        timeout_s: float,
        waiting: Waiting | None = None,
    ) -> Network | None:
        """Join the group of the global ranks `members`; None for a rank that is not one of them."""
        address = worker.address
        hosting = worker.rank == members[0]
        timeout = timedelta(seconds=timeout_s)
        store = None
        with backend_errors("opening the meeting point"):
            if hosting:
                # Port 0: taken and held by the store itself, so there is no race for it.
                store = dist.TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
        told = worker.all_gather(json.dumps([address, store.port if store else 0]).encode())
        if worker.rank not in members:
            return None
        host, port = json.loads(told[members[0]])
        with backend_errors(f"meeting at {host}:{port}"):
            if store is None:
                store = dist.TCPStore(host, port, None, False, timeout)
            make = _nccl if device.type == "cuda" else _gloo
            named = dist.PrefixStore(f"kindler/{worker.run_id}", store)
            group = make(named, members.index(worker.rank), len(members), address, timeout)
        return cls(group, store, waiting or Waiting())

    def all_reduce(self, tensor: torch.Tensor, *, doing: str = "all-reduce") -> Work:
        """Start the sum over members, in place; the work's `wait` ends it."""
        with backend_errors(doing):
            return Work(self._group.allreduce([tensor]), doing, self._waiting)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` with that of the member in place `source`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with backend_errors("broadcast"):
            work = Work(self._group.broadcast([tensor], options), "broadcast", self._waiting)
        work.wait()

    def close(self) -> None:
        """Leave the group; the others notice only if they go on using it."""
        group, self._group, self._store = self._group, None, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()


@contextmanager
def backend_errors(doing: str) -> Iterator[None]:
    """Turn what torch raises into a SyncError that says what was being done."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as exc:
        if isinstance(exc, SyncError):
            raise
        raise SyncError(
            f"{doing} between workers failed: {exc}\n"
            "Hint: most often another worker is gone; its log says why. If the network was too slow,"
            " raise RunSettings(sync_timeout_s=...)."
        ) from exc


def _gloo(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # By address: a host name may not resolve, or resolve to an interface that others cannot reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
