"""Sums over all workers of a run, for torch tensors.

Ranks of one host meet in shared memory and the first of them speaks for the host in a ring; CUDA tensors go
through NCCL, or over the CPU where two ranks share one GPU. `Group` holds these routes, and gives flat
`Bucket`s that `gradients_torch.py` fills while backward still runs. It knows nothing of models.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from kindler.sync.arrays_torch import TORCH
from kindler.sync.buckets_torch import Bucket, HostBucket, NetworkBucket, StagedBucket
from kindler.sync.gradients_torch import GradientSync
from kindler.sync.network_torch import Network, Work, connect
from kindler.sync.shared_memory import Channel, HostRanks, Member, channels
from kindler.sync.topology import Topology
from kindler.sync.wait_clock import Waiting

__all__ = ["Bucket", "GradientSync", "Group", "Handle", "Worker"]

_WINDOW_BYTES = 4 << 20


class Worker(Member, Protocol):
    """The part of a worker that a group needs."""

    @property
    def host(self) -> str: ...

    @property
    def address(self) -> str: ...

    def links(self, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]: ...


class Handle:
    """A sum under way; the tensor holds it once `wait` has returned."""

    def __init__(self, group: Group, tensor: torch.Tensor, work: Work | None = None) -> None:
        self._group = group
        self._tensor = tensor
        self._work = work
        self.done = group.size == 1

    def wait(self) -> None:
        """Block until the tensor holds the sum; with NCCL, until the current stream would see it."""
        if not self.done:
            self.done = True
            self._group._complete(self._tensor, self._work)


class Group:
    """One rank's end of the exchange between all workers of a run.

    Every rank makes the same calls in the same order. All ranks get bit-identical results. A rank that does
    not come is named in SyncTimeoutError (shared memory, ring) or makes the others' call fail with SyncError
    (NCCL), both within `timeout_s`.

    Args:
        worker: This rank's worker.
        device: Where the tensors live.
        timeout_s: Seconds to wait for other ranks.
        shared_memory: False makes every rank count as a host of its own.
    """

    def __init__(
        self, worker: Worker, *, device: torch.device, timeout_s: float, shared_memory: bool = True
    ) -> None:
        self.rank, self.size, self.device = worker.rank, worker.size, torch.device(device)
        self._worker = worker
        self._waiting = Waiting(worker)
        self._network: Network | None = None
        self._window: Channel | None = None
        self._open: Handle | None = None
        self._staged = False
        if self.size == 1:
            return
        if self.device.type == "cuda":
            self._staged = _devices_shared(worker, self.device)
            shared_memory = shared_memory and self._staged
        self._where = Topology.of(worker.hosts, self.rank, shared_memory=shared_memory)
        self._host = HostRanks(
            self._where.ranks, self.rank, size=self.size, timeout_s=timeout_s, waiting=self._waiting
        )
        if not self._where.one_host:
            carrier = torch.device("cpu") if self._staged else self.device
            self._network = connect(
                worker, self._where.leaders, device=carrier, timeout_s=timeout_s, waiting=self._waiting
            )
        if self._where.any_shared:
            made = channels(worker, self._host, [_WINDOW_BYTES], TORCH)
            self._window = made[0] if made else None

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return self._waiting.seconds

    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """Start replacing `tensor` by its sum over ranks; ended by the handle's `wait`.

        The network begins at once. Between ranks of one host the exchange happens in `wait`.
        """
        self._finish_open()
        work = self._network.all_reduce(tensor) if self._direct and self._network else None
        handle = Handle(self, tensor, work)
        if not handle.done and work is None:
            self._open = handle
        return handle

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Overwrite `tensor` with that of the rank `src`."""
        self._finish_open()
        if self.size == 1:
            return
        if self._direct and self._network:
            self._network.broadcast(tensor, src)
            return
        for flat in self._pieces(tensor):
            self._broadcast_piece(flat, src)

    def any(self, mine: bool) -> bool:
        """Whether any rank says so; every rank calls it."""
        flag = torch.tensor([float(mine)], device=self.device)
        self.all_reduce(flag).wait()
        return bool(flag.item() > 0)

    def gradients(self, parameters: Iterable[torch.nn.Parameter], **options: int) -> GradientSync:
        """The exchange of these parameters' gradients; every rank calls it."""
        return GradientSync(parameters, self, **options)

    def buckets(self, layouts: Sequence[tuple[int, torch.dtype]]) -> list[Bucket]:
        """Flat buffers of (elements, dtype) to be summed over ranks again and again; every rank calls it."""
        self._finish_open()
        routes: list[Channel | None] = [None] * len(layouts)
        if self.size > 1 and self._where.any_shared:
            sizes = [elements * dtype.itemsize for elements, dtype in layouts]
            made = channels(self._worker, self._host, sizes, TORCH)
            routes = list(made) if made else routes
        return [
            self._bucket(elements, dtype, route)
            for (elements, dtype), route in zip(layouts, routes, strict=True)
        ]

    def close(self) -> None:
        """Leave the group: connections and mappings go. Idempotent."""
        self._open = None
        self._window = None
        if self._network is not None:
            network, self._network = self._network, None
            network.close()

    def _bucket(self, elements: int, dtype: torch.dtype, route: Channel | None) -> Bucket:
        carrier = torch.device("cpu") if self._staged else self.device
        inner: Bucket
        if route is None:
            inner = NetworkBucket(elements, dtype, carrier, self._network)
        else:
            inner = HostBucket(
                elements, dtype, route, self._network, leads=self._where.leads, alone=self._where.one_host
            )
        return StagedBucket(inner, self.device) if self._staged else inner

    @property
    def _direct(self) -> bool:
        """Whether whole tensors go to the network; all ranks agree, also one that is alone on its host."""
        return self.size > 1 and not self._where.any_shared and not self._staged

    def _finish_open(self) -> None:
        """Local exchanges take turns in one window, so an open one ends before the next begins."""
        if self._open is not None:
            self._open.wait()

    def _complete(self, tensor: torch.Tensor, work: Work | None) -> None:
        if work is not None:
            work.wait()
            return
        self._open = None
        for flat in self._pieces(tensor):
            self._sum_piece(flat)

    def _pieces(self, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        """The tensor's elements on the CPU, a window at a time; what becomes of them is written back."""
        whole = tensor.detach().contiguous().view(-1)
        step = max(1, _WINDOW_BYTES // tensor.element_size())
        host = whole.cpu()
        for start in range(0, host.numel(), step):
            yield host[start : start + step]
        if host.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(host.view(tensor.shape))

    def _sum_piece(self, flat: torch.Tensor) -> None:
        window = self._window
        if window is None:
            if self._network:
                self._network.all_reduce(flat).wait()
            return
        window.slot(flat.dtype)[: flat.numel()].copy_(flat)
        window.post()
        if self._where.one_host:
            window.sum_into(flat)
        elif self._network is None:
            window.fetch(flat)
        else:
            window.gather_into(flat)
            self._network.all_reduce(flat).wait()
            window.publish(flat)

    def _broadcast_piece(self, flat: torch.Tensor, src: int) -> None:
        source_here = src in self._host.ranks
        window = self._window
        if window is not None:
            window.slot(flat.dtype)
            window.post()
        if source_here and src != self._host.leader and window is not None:
            self._hand(window, flat, src)
            window.slot(flat.dtype)
            window.post()
        if self._network is not None:
            self._network.broadcast(flat, self._where.leader_of[src])
        if window is not None:
            self._hand(window, flat, self._host.leader)

    def _hand(self, window: Channel, flat: torch.Tensor, source: int) -> None:
        """Bring one rank's values to the others of this host."""
        if self.rank == source:
            window.publish(flat)
        else:
            window.fetch(flat, source=self._host.ranks.index(source))


def _devices_shared(worker: Worker, device: torch.device) -> bool:
    """Whether two ranks use one GPU, which NCCL refuses."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    identity = str(torch.cuda.get_device_properties(index).uuid)
    told = worker.all_gather(f"{worker.host} {identity}".encode())
    return len(set(told)) < len(told)
