"""All-reduce: at every step each rank applies the mean of all ranks' gradients, so all stay equal bit by bit.

Gradients are exchanged as numpy arrays (`allreduce_host.py`). A replica of torch has them exchanged while its
backward pass still runs (`allreduce_torch.py`), which needs torch and is imported only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kindler.collective import Collective
from kindler.sync.allreduce_host import HostGroup
from kindler.sync.contract import Lockstep, Replica

if TYPE_CHECKING:
    from kindler.sync.allreduce_torch import TorchExchange


class AllReduce(Lockstep):
    """The sync "allreduce"."""

    _exchange: TorchExchange | None = None

    def connect(self, worker: Any) -> Collective:
        """Shared memory between ranks of one host, a ring between hosts."""
        settings = self.settings
        return HostGroup(worker, timeout_s=settings.sync_timeout_s, shared_memory=settings.shared_memory)

    def attach(self, replica: Replica, worker: Any) -> None:
        """Join the other ranks; a replica of torch exchanges within its own step from now on."""
        super().attach(replica, worker)
        if worker.size > 1 and replica.fuses == "torch":
            self._fuse(replica, worker)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return super().waited_s + (self._exchange.waited_s if self._exchange is not None else 0.0)

    def step(self, replica: Replica, batch: Any) -> None:
        """One step with the mean over the rows of all ranks; one rank alone has nothing to exchange."""
        if self._exchange is not None or self.collective.size == 1:
            replica.train_step(batch)
        else:
            super().step(replica, batch)

    def close(self) -> None:
        """Leave the others. Idempotent."""
        if self._exchange is not None:
            self._exchange.close()
        super().close()

    def _fuse(self, replica: Any, worker: Any) -> None:
        from kindler.sync.allreduce_torch import TorchExchange

        self._exchange = TorchExchange(
            worker,
            device=replica.device,
            timeout_s=self.settings.sync_timeout_s,
            shared_memory=self.settings.shared_memory,
        )
        replica.fuse(self._exchange)
