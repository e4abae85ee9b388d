"""Sharded: each rank owns a slice of the parameters, and has the optimizer's state of that slice alone.

At every step a rank adds up all ranks' gradients of its slice, moves it with the optimizer, and all ranks
take over each other's slices. The result is that of all-reduce; each rank does 1/N of the optimizer's work
and keeps 1/N of its memory. How gradients and slices travel is in `sliced_torch.py`; how the optimizer is
divided is the business of the replica.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.sync.allreduce import AllReduce

DIVISIONS = ("elements", "parameters")


class Sharded(AllReduce):
    """The sync "sharded".

    A replica that cannot divide its optimizer steps as with all-reduce.

    Args:
        settings: Time limits, and whether workers of one machine exchange through shared memory.
        divide: What the optimizer can be divided into: "elements", if it moves each element of a parameter by
            itself; "parameters", if it moves each parameter by itself. None for optimizers of torch, of which
            it is known.
        one_copy: Whether workers that are all on one machine share one copy of the parameters. That is faster
            and saves memory, but callbacks and the model must not write weights.
    """

    def __init__(self, settings: RunSettings, *, divide: str | None = None, one_copy: bool = False) -> None:
        super().__init__(settings)
        if divide is not None and divide not in DIVISIONS:
            raise ConfigError(
                f"sync='sharded': divide is one of {', '.join(map(repr, DIVISIONS))}, or None; received"
                f" {divide!r}."
            )
        if not isinstance(one_copy, bool):
            raise ConfigError(f"sync='sharded': one_copy is True or False; received {one_copy!r}.")
        self._divide, self._one_copy = divide, one_copy
        self._optimizer_bytes = 0

    def catch_up(self, replica: Any) -> None:
        """All ranks have the same parameters; how much memory their optimizers take is told."""
        if self._exchange is None:
            return
        mine = np.zeros(self.collective.size, np.int64)
        mine[self.collective.rank] = replica.optimizer_bytes()
        self._optimizer_bytes = int(self.collective.sum([mine])[0].max())

    def figures(self) -> dict[str, Any]:
        """The bytes of the largest share of the optimizer's state."""
        return {"optimizer_bytes": self._optimizer_bytes} if self._exchange is not None else {}

    def whole(self, replica: Any) -> Any:
        """The replica; the first rank knows the whole of the optimizer's state until the next step."""
        if self._exchange is not None:
            replica.gather_state()
        return replica

    def _fuse(self, replica: Any, worker: Any) -> None:
        from kindler.sync.sliced_torch import SliceExchange

        if self._one_copy and replica.device.type != "cpu":
            raise ConfigError(
                f"sync='sharded': one_copy=True, but the parameters are on {replica.device}, and only those"
                " in the memory of the machine can be shared.\nHint: leave one_copy out of sync_options; or"
                " device='cpu'."
            )
        exchange = SliceExchange(
            worker,
            device=replica.device,
            timeout_s=self.settings.sync_timeout_s,
            shared_memory=self.settings.shared_memory,
        )
        self._exchange = exchange
        replica.divide(exchange, self._divide, one_copy=self._one_copy)
