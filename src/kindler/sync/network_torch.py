"""Sums of torch tensors between hosts: a ring for CPU tensors, NCCL for CUDA ones.

The ring runs over connections that prove themselves with the run's secret (`ring.py`,
`engine/peer_sockets.py`), so nothing of torch's own listens. NCCL needs a store of torch's to meet at; it
is bound to the address that workers use, and to the loopback where they are all on one machine. Who takes
part is decided in `allreduce_torch.py`.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from kindler.errors import SyncError, fresh
from kindler.sync.arrays_torch import TORCH
from kindler.sync.ring import Ring, neighbours
from kindler.sync.wait_clock import Waiting

dist: Any = torch.distributed  # its stubs leave out the classes that are used here


class Meeting(Protocol):
    """The part of a worker that the members of a network need to find each other."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def address(self) -> str: ...

    @property
    def run_id(self) -> str: ...

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]: ...

    def links(self, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]: ...


class Work(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Block until it is done; with NCCL, until the current stream would see that."""


class Network(Protocol):
    """One member's end of the exchange; every member makes the same calls in the same order."""

    def all_reduce(self, tensor: torch.Tensor, *, doing: str = "all-reduce") -> Work:
        """Start the sum over members, in place; the work's `wait` ends it."""

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Work:
        """Start the sum of each member's part, which ends there; `bounds` is where parts begin and end."""

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Work:
        """Start to bring each member's part to all members."""

    def close(self) -> None:
        """Leave; the others notice if they go on."""


def connect(
    worker: Meeting,
    members: Sequence[int],
    *,
    device: torch.device,
    timeout_s: float,
    waiting: Waiting | None = None,
) -> Network | None:
    """Join the global ranks `members`; None for a rank that is not one of them.

    Every rank of the run calls it, members or not, since they meet to find each other.
    """
    waiting = waiting or Waiting()
    if device.type == "cuda":
        return _connect_nccl(worker, members, timeout_s, waiting)
    peers = set(neighbours(members, worker.rank)) if worker.rank in members else set()
    with waiting:
        links = worker.links(sorted(peers), timeout_s)
    if not links:
        return None
    ring = Ring(members, worker.rank, links, size=worker.size, timeout_s=timeout_s, arrays=TORCH)
    return _RingNetwork(ring, waiting)


class _Job:
    """A call of the ring, made on its thread."""

    def __init__(self, call: Callable[[], None], waiting: Waiting) -> None:
        self._call = call
        self._waiting = waiting
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self, broken: BaseException | None) -> BaseException | None:
        """Make the call, unless an earlier one has failed; how it failed."""
        try:
            if broken is not None:
                raise fresh(broken, traces=True)
            self._call()
        except BaseException as exc:  # noqa: BLE001 - raised again where it is waited for
            self._error = exc
        self._over.set()
        return self._error

    def wait(self) -> None:
        if not self._over.is_set():
            with self._waiting:
                self._over.wait()  # every hop of the ring has a limit of its own
        if self._error is not None:
            raise fresh(self._error, traces=True)


class _RingNetwork:
    """A ring whose sums go on while the caller computes."""

    def __init__(self, ring: Ring, waiting: Waiting) -> None:
        self._ring = ring
        self._waiting = waiting
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve, name="kindler-ring", daemon=True
        )
        self._thread.start()

    def all_reduce(self, tensor: torch.Tensor, *, doing: str = "all-reduce") -> Work:
        whole = tensor.detach()
        flat = whole.contiguous().view(-1)

        def made() -> None:
            self._ring.all_reduce(flat)
            if flat.data_ptr() != whole.data_ptr():
                whole.copy_(flat.view(whole.shape))

        return self._job(made)

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Work:
        return self._job(lambda: self._ring.reduce_scatter(flat, bounds))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Work:
        return self._job(lambda: self._ring.all_gather(flat, bounds))

    def _job(self, call: Callable[[], None]) -> Work:
        job = _Job(call, self._waiting)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ring.close()  # a call under way fails now
            self._jobs.put(None)
            thread.join()

    def _serve(self) -> None:
        broken: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            broken = job.run(broken)


def _connect_nccl(
    worker: Meeting, members: Sequence[int], timeout_s: float, waiting: Waiting
) -> Network | None:
    hosting, timeout = worker.rank == members[0], timedelta(seconds=timeout_s)
    listener = meeting_point(worker.address) if hosting else None
    port = listener.getsockname()[1] if listener is not None else 0
    told = worker.gather(json.dumps([worker.address, port]).encode(), members[:1])
    if worker.rank not in members:
        return None
    host, port = json.loads(told[members[0]])
    with _backend_errors(f"meeting at {host}:{port}"):
        store = bound_store(host, port, timeout, listener)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        named = dist.PrefixStore(f"kindler/{worker.run_id}", store)
        group = dist.ProcessGroupNCCL(named, members.index(worker.rank), len(members), options)
    return _NcclNetwork(group, store, waiting, members.index(worker.rank))


def meeting_point(address: str) -> socket.socket:
    """A socket that listens at this address, which is the one that workers use."""
    with _backend_errors("opening the meeting point"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family)


def bound_store(host: str, port: int, timeout: timedelta, listener: socket.socket | None) -> Any:
    """torch's store at `host`; whoever has the listener serves it.

    Left to itself it would listen on every address of the machine.
    """
    if listener is None:
        return dist.TCPStore(host, port, None, False, timeout)
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class _NcclWork:
    def __init__(self, work: Any, doing: str, waiting: Waiting) -> None:
        self._work = work
        self._doing = doing
        self._waiting = waiting

    def wait(self) -> None:
        with _backend_errors(self._doing), self._waiting:
            self._work.wait()


class _NcclNetwork:
    """A process group of torch that belongs to this run alone: the default one stays free for the user."""

    def __init__(self, group: Any, store: Any, waiting: Waiting, place: int) -> None:
        self._group = group
        self._place = place
        self._waiting = waiting
        self._store = store  # the first member's holds the listening socket

    def all_reduce(self, tensor: torch.Tensor, *, doing: str = "all-reduce") -> Work:
        with _backend_errors(doing):
            return _NcclWork(self._group.allreduce([tensor]), doing, self._waiting)

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Work:
        return self.all_reduce(flat, doing="sum of gradients")

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Work:
        place = self._place
        flat[: bounds[place]].zero_()
        flat[bounds[place + 1] :].zero_()
        return self.all_reduce(flat, doing="exchange of slices")

    def close(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()


@contextmanager
def _backend_errors(doing: str) -> Iterator[None]:
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
