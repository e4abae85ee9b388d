"""FSDP: torch divides the parameters themselves between ranks, with gradients and the optimizer's state.

A forward pass gathers parameters, a backward pass adds up gradients so that each rank gets its part. Torch's
own process group carries all of it: gloo between CPUs, NCCL between GPUs. It is the default group of the
process while the run lasts, and its connections are torch's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from kindler.collective import Collective
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.sync.allreduce_host import HostGroup
from kindler.sync.contract import Lockstep

__all__ = ["Fsdp"]


class Fsdp(Lockstep):
    """The sync "fsdp". A replica that cannot divide its parameters steps as with all-reduce.

    Args:
        settings: Time limits.
        modules: Names of the model's modules that are gathered by themselves, so that not all of the model's
            parameters are whole at the same time.
    """

    _divided = False
    _optimizer_bytes = 0

    def __init__(self, settings: RunSettings, *, modules: Sequence[str] = ()) -> None:
        super().__init__(settings)
        if isinstance(modules, str) or not all(isinstance(name, str) for name in modules):
            raise ConfigError(f"sync='fsdp': modules is a list of names of modules; received {modules!r}.")
        self._modules = tuple(modules)

    def connect(self, worker: Any) -> Collective:
        """Shared memory between ranks of one host, a ring between hosts."""
        settings = self.settings
        return HostGroup(worker, timeout_s=settings.sync_timeout_s, shared_memory=settings.shared_memory)

    def attach(self, replica: Any, worker: Any) -> None:
        """Join the other ranks, from rank 0's state on, of which each keeps its part."""
        super().attach(replica, worker)
        if worker.size > 1 and replica.fuses == "torch":
            mesh = _mesh(worker, replica.device.type, self.settings.sync_timeout_s)
            self._divided = True
            replica.shard_fully(mesh, self._modules)

    def step(self, replica: Any, batch: Any) -> None:
        """One step with the mean over the rows of all ranks."""
        if self._divided or self.collective.size == 1:
            replica.train_step(batch)
        else:
            super().step(replica, batch)

    def catch_up(self, replica: Any) -> None:
        """How much memory optimizers take is told."""
        if self._divided:
            mine = np.zeros(self.collective.size, np.int64)
            mine[self.collective.rank] = replica.optimizer_bytes()
            self._optimizer_bytes = int(self.collective.sum([mine])[0].max())

    def figures(self) -> dict[str, Any]:
        """The bytes of the largest share of the optimizer's state."""
        return {"optimizer_bytes": self._optimizer_bytes} if self._divided else {}

    def whole(self, replica: Any) -> Any:
        """The replica; the first rank knows the whole of its state until the next step."""
        if self._divided:
            replica.gather_state()
        return replica

    def close(self) -> None:
        """Leave the others. Idempotent."""
        if self._divided:
            import torch.distributed as dist

            self._divided = False
            dist.destroy_process_group()
        super().close()


def _mesh(worker: Any, device: str, timeout_s: float) -> Any:
    """All ranks as a mesh of torch's, in a process group of their own."""
    import torch.distributed

    from kindler.sync.network_torch import bound_store, opened_listener

    dist: Any = torch.distributed
    if dist.is_initialized():
        raise ConfigError(
            "sync='fsdp' needs torch's default process group, and user code has made it already."
        )
    listener = opened_listener(worker) if worker.rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else 0
    host, port = json.loads(worker.gather(json.dumps([worker.address, port]).encode(), [0])[0])
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore(f"kindler/{worker.run_id}", bound_store(host, port, timeout, listener)),
        rank=worker.rank,
        world_size=worker.size,
        timeout=timeout,
    )
    return dist.device_mesh.init_device_mesh(device, (worker.size,))
