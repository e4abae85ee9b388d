"""Sums torch tensors between hosts: a ring for CPU tensors, NCCL for CUDA ones; and torch's default group.

The ring's connections prove themselves with the run's secret, so nothing of torch listens. NCCL and models
that call `torch.distributed` meet at a torch store, bound to the workers' address or the loopback.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed

from kindler.errors import SyncError, fresh
from kindler.group import Group
from kindler.sync.ring import Ring
from kindler.sync.shared_memory import Topology, Waiting

dist: Any = torch.distributed  # its stubs leave out the classes that are used here

Wait: TypeAlias = Callable[
    [], None
]  # blocks until an exchange is done; with NCCL, until the stream sees that


class Network(Protocol):
    """Members make the same calls in the same order; `bounds` are where their parts begin and end."""

    def all_reduce(self, flat: torch.Tensor) -> Wait:
        """Start the sum over members, in place."""

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        """Start the sum of each member's part, which only that member gets."""

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        """Start sending each member's part to all members."""

    def close(self) -> None:
        """Leave; the others notice if they go on."""


class _TorchArrays:
    def view(self, mapping: mmap.mmap, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        whole = nbytes // dtype.itemsize * dtype.itemsize
        return torch.frombuffer(mapping, dtype=torch.uint8)[offset : offset + whole].view(dtype)

    def count(self, array: torch.Tensor) -> int:
        return array.numel()

    def add_up(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(source)

    def empty(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(count, dtype=like.dtype)

    def raw(self, array: torch.Tensor) -> memoryview:
        return memoryview(array.detach().view(torch.uint8).numpy().data)


TORCH = _TorchArrays()


def connect(worker: Group, where: Topology, device: torch.device) -> Network | None:
    """Join the first ranks of all hosts; None for other ranks. Every rank calls it."""
    if device.type == "cuda":
        return _NcclNetwork(worker, where)
    ring = Ring.join(worker, where, TORCH)
    return None if ring is None else _RingNetwork(ring, where.waiting)


class _RingNetwork:
    def __init__(self, ring: Ring, waiting: Waiting) -> None:
        self._ring = ring
        ring.waiting = Waiting()  # of the thread: this rank waits only where it asks for a result
        self._waiting = waiting
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve, name="kindler-ring", daemon=True
        )
        self._thread.start()

    def all_reduce(self, flat: torch.Tensor) -> Wait:
        return self._started(lambda: self._ring.all_reduce(flat))

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        return self._started(lambda: self._ring.reduce_scatter(flat, bounds))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        return self._started(lambda: self._ring.all_gather(flat, bounds))

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ring.close()  # a call under way fails now
            self._calls.put(None)
            thread.join()

    def _started(self, call: Callable[[], None]) -> Wait:
        future: Future[None] = Future()
        self._calls.put((call, future))

        def wait() -> None:
            if not future.done():
                with self._waiting:
                    future.exception()  # every hop of the ring has a limit of its own
            if (error := future.exception()) is not None:
                raise fresh(error, traces=True)

        return wait

    def _serve(self) -> None:
        broken: BaseException | None = None  # after a failure members no longer agree on what comes next
        while (started := self._calls.get()) is not None:
            call, future = started
            try:
                if broken is not None:
                    raise fresh(broken, traces=True)
                call()
                future.set_result(None)
            except BaseException as exc:  # noqa: BLE001 - raised again where it is waited for
                broken = exc
                future.set_exception(exc)


class _NcclNetwork:
    """A private process group: torch's default one stays free for the user."""

    def __init__(self, worker: Group, where: Topology) -> None:
        self._waiting, self._rank = where.waiting, worker.rank
        store, host, port = _store(worker, where.timeout_s)
        with _backend_errors(f"meeting at {host}:{port}"):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=where.timeout_s)
            self._group: Any = dist.ProcessGroupNCCL(store, worker.rank, worker.size, options)

    def all_reduce(self, flat: torch.Tensor) -> Wait:
        return self._started("sum of gradients", lambda: self._group.allreduce([flat]))

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        parts = _cut(flat, bounds)
        own = parts[self._rank]
        return self._started("sum of gradients", lambda: self._group.reduce_scatter([own], [parts]))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        parts = _cut(flat, bounds)
        own = parts[self._rank]
        return self._started("exchange of slices", lambda: self._group.allgather([parts], [own]))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()

    def _started(self, doing: str, start: Callable[[], Any]) -> Wait:
        with _backend_errors(doing):
            work = start()

        def wait() -> None:
            with _backend_errors(doing), self._waiting:
                work.wait()

        return wait


def _cut(flat: torch.Tensor, bounds: Sequence[int]) -> list[torch.Tensor]:
    return [flat[start:stop] for start, stop in pairwise(bounds)]


@contextmanager
def process_group(worker: Group, *, shared_gpus: bool, timeout_s: float) -> Iterator[None]:
    """NCCL if each worker has its own GPU, otherwise gloo; `timeout_s` also limits each operation."""
    store, host, port = _store(worker, timeout_s)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    nccl = torch.cuda.is_available() and dist.is_nccl_available() and not shared_gpus
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=worker.rank,
        world_size=worker.size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(worker: Group, timeout_s: float) -> tuple[Any, str, int]:
    """Served by the first worker; every worker calls it."""
    listener: socket.socket | None = None
    if worker.rank == 0:
        with _backend_errors("opening the meeting point"):
            family = socket.AF_INET6 if ":" in worker.address else socket.AF_INET
            listener = socket.create_server((worker.address, 0), family=family)
    port = 0 if listener is None else listener.getsockname()[1]
    host, port = json.loads(worker.from_first(json.dumps([worker.address, port]).encode()))
    with _backend_errors(f"meeting at {host}:{port}"):
        store = bound_store(host, port, timedelta(seconds=timeout_s), listener)
        return dist.PrefixStore(f"kindler/{worker.run_id}", store), host, port


def bound_store(host: str, port: int, timeout: timedelta, listener: socket.socket | None) -> Any:
    """Served by whoever has the listener; torch itself would listen on every address."""
    if listener is None:
        return dist.TCPStore(host, port, None, False, timeout)
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextmanager
def _backend_errors(doing: str) -> Iterator[None]:
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
