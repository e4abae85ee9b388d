"""Syncs that apply the mean of all ranks' gradients at every step, so that all stay bit-identical.

Gradients travel as numpy arrays (`host_group.py`), unless the framework exchanges them within its own steps:
torch does so while its backward pass still runs (`frameworks/torch/exchange.py`), and can divide the
optimizer ("zero1") or the parameters as well ("fsdp").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from kindler.collective import Collective, GradientExchange
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.group import Group
from kindler.sync.contract import Sync

DIVISIONS = ("elements", "parameters")


class AllReduce(Sync):
    regroups = True
    _exchange: GradientExchange | None = None
    _strategy = "allreduce"
    _options: Mapping[str, Any] = MappingProxyType({})

    def attach(self, replica: Any, worker: Group) -> None:
        super().attach(replica, worker)
        self._fuse(replica, worker)

    def attach_again(self, replica: Any, worker: Group, join: Callable[[Collective], None]) -> None:
        super().attach_again(replica, worker, join)
        self._fuse(replica, worker)

    def _fuse(self, replica: Any, worker: Group) -> None:
        if worker.size > 1:
            self._exchange = replica.fuse(worker, self.settings, self._strategy, **self._options)

    @property
    def waited_s(self) -> float:
        return super().waited_s + (self._exchange.waited_s if self._exchange is not None else 0.0)

    def step(self, replica: Any, batch: Any) -> None:
        if self._exchange is not None or self.collective.size == 1:
            replica.train_step(batch)
        else:
            super().step(replica, batch)

    def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
        super().close()


class _Divided(AllReduce):
    regroups = False  # a part of the state is on one rank alone
    _optimizer_bytes = 0

    def catch_up(self, replica: Any) -> None:
        if self._exchange is not None:
            mine = np.zeros(self.collective.size, np.int64)
            mine[self.collective.rank] = replica.optimizer_bytes()
            self._optimizer_bytes = int(self.collective.sum([mine])[0].max())

    def figures(self) -> dict[str, Any]:
        return {"optimizer_bytes": self._optimizer_bytes} if self._exchange is not None else {}

    def whole(self, replica: Any) -> Any:
        if self._exchange is not None:
            replica.gather_state()
        return replica


class Zero1(_Divided):
    """Each rank owns a slice of the parameters and the optimizer state for it; see `strategies.Zero1`."""

    _strategy = "zero1"

    def __init__(self, settings: RunSettings, *, divide: str | None = None, one_copy: bool = False) -> None:
        super().__init__(settings)
        if divide is not None and divide not in DIVISIONS:
            raise ConfigError(
                f"strategy='zero1': divide must be one of {', '.join(map(repr, DIVISIONS))}, or None; "
                f"received"
                f" {divide!r}."
            )
        if not isinstance(one_copy, bool):
            raise ConfigError(f"strategy='zero1': one_copy must be True or False; received {one_copy!r}.")
        self._options = {"divide": divide, "one_copy": one_copy}
        self.regroups = not one_copy  # which another rank may have changed


class Fsdp(_Divided):
    """Torch's own process group carries everything: gloo between CPUs, NCCL between GPUs."""

    _strategy = "fsdp"

    def __init__(self, settings: RunSettings, *, modules: Sequence[str] = ()) -> None:
        super().__init__(settings)
        if isinstance(modules, str) or not all(isinstance(name, str) for name in modules):
            raise ConfigError(
                f"strategy='fsdp': modules must be a list of module names; received {modules!r}."
            )
        self._options = {"modules": tuple(modules)}
