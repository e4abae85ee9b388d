"""Sums of torch's gradients over all workers of a run, while backward still runs.

Ranks of one host meet in shared memory and the first of them speaks for the host in a ring; CUDA tensors go
through NCCL, or over the CPU where two ranks share one GPU. `TorchExchange` holds these routes, and makes the
flat `Bucket`s that `gradients_torch.py` fills. It knows nothing of models. All else that ranks share goes
through the collective of `allreduce_host.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from kindler.sync.arrays_torch import TORCH
from kindler.sync.buckets_torch import Bucket, HostBucket, NetworkBucket, StagedBucket
from kindler.sync.gradients_torch import GradientSync
from kindler.sync.network_torch import Network, connect
from kindler.sync.shared_memory import Channel, HostRanks, Member, channels
from kindler.sync.topology import Topology
from kindler.sync.wait_clock import Waiting

__all__ = ["Bucket", "GradientSync", "TorchExchange", "Worker"]


class Worker(Member, Protocol):
    """The part of a worker that a group needs."""

    @property
    def host(self) -> str: ...

    @property
    def address(self) -> str: ...

    def links(self, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]: ...


class TorchExchange:
    """One rank's end of the exchange of gradients between all workers of a run.

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

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return self._waiting.seconds

    def gradients(self, parameters: Iterable[torch.nn.Parameter], **options: int) -> GradientSync:
        """The exchange of these parameters' gradients; every rank calls it."""
        return GradientSync(parameters, self, **options)

    def buckets(self, layouts: Sequence[tuple[int, torch.dtype]]) -> list[Bucket]:
        """Flat buffers of (elements, dtype) to be summed over ranks again and again; every rank calls it."""
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


def _devices_shared(worker: Worker, device: torch.device) -> bool:
    """Whether two ranks use one GPU, which NCCL refuses."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    identity = str(torch.cuda.get_device_properties(index).uuid)
    told = worker.all_gather(f"{worker.host} {identity}".encode())
    return len(set(told)) < len(told)
