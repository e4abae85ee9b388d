"""FSDP: torch divides the parameters themselves between ranks, with gradients and the optimizer's state.

A forward pass gathers parameters, a backward pass adds up gradients so that each rank gets its part. Torch's
own process group carries all of it: gloo between CPUs, NCCL between GPUs. It is the default group of the
process while the run lasts, and its connections are torch's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from kindler.collective import Collective
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.sync.allreduce_host import HostGroup
from kindler.sync.contract import Lockstep


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
        self._group = ExitStack()

    def connect(self, worker: Any) -> Collective:
        """Shared memory between ranks of one host, a ring between hosts."""
        settings = self.settings
        return HostGroup(worker, timeout_s=settings.sync_timeout_s, shared_memory=settings.shared_memory)

    def attach(self, replica: Any, worker: Any) -> None:
        """Join the other ranks, from rank 0's state on, of which each keeps its part."""
        super().attach(replica, worker)
        if worker.size > 1 and replica.fuses == "torch":
            if replica.device.type == "cuda":
                _refuse_shared(worker, str(replica.device))
            self._join(worker, replica.device.type)
            self._divided = True
            replica.shard_fully(_mesh(worker, replica.device.type), self._modules)

    def _join(self, worker: Any, device: str) -> None:
        import torch.distributed

        from kindler.sync.process_group import process_group

        if not torch.distributed.is_initialized():  # it is, with process_group=True
            limit = self.settings.sync_timeout_s
            self._group.enter_context(process_group(worker, shared_gpus=device != "cuda", timeout_s=limit))

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
        self._divided = False
        self._group.close()
        super().close()


def _refuse_shared(worker: Any, device: str) -> None:
    """Complain about workers that share a GPU: NCCL wants one for each, and gloo cannot do without it."""
    mine = json.dumps([worker.host, os.environ.get("CUDA_VISIBLE_DEVICES"), device]).encode()
    told = worker.all_gather(mine)
    if len(set(told)) < len(told):
        raise ConfigError(
            f"sync='fsdp': {len(told)} workers share {len(set(told))} GPUs, and each needs one of its own.\n"
            "Hint: sync='sharded' lets workers share a GPU."
        )


def _mesh(worker: Any, device: str) -> Any:
    """All ranks as a mesh of torch's."""
    import torch.distributed

    dist: Any = torch.distributed
    return dist.device_mesh.init_device_mesh(device, (worker.size,))
