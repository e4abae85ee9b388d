"""Two syncs from outside: one gathers all gradients at every step, one averages weights after each epoch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.collective import Array, Collective
from kindler.group import Group
from kindler.registry import Spec
from kindler.sync.contract import Replica, Sync

GATHER = Spec(name="gather", target="toy_sync:GatherSync")
APART = Spec(name="apart", target="toy_sync:ApartSync")


class Gathering:
    """A collective over `worker.all_gather`."""

    waited_s = 0.0

    def __init__(self, worker: Group) -> None:
        self.rank, self.size, self._worker = worker.rank, worker.size, worker

    def sum(self, arrays: Sequence[Array]) -> list[Array]:
        parts = self._all(arrays)
        return [np.sum([part[n] for part in parts], axis=0, dtype=a.dtype) for n, a in enumerate(parts[0])]

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        *parts, weights = zip(*self._all([*arrays, np.array(weight)]), strict=True)
        whole = sum(float(w) for w in weights)
        return [
            sum(
                (a * (float(w) / whole) for a, w in zip(part, weights, strict=True) if w),
                np.zeros_like(part[0]),
            ).astype(part[0].dtype)
            for part in parts
        ]

    def broadcast(self, arrays: Sequence[Array], src: int = 0) -> list[Array]:
        return self._all(arrays)[src]

    def barrier(self) -> None:
        self._worker.all_gather(b"")

    def close(self) -> None:
        """Nothing is open."""

    def _all(self, arrays: Sequence[Array]) -> list[list[Array]]:
        """The arrays of every rank."""
        file = io.BytesIO()
        np.savez(file, *arrays)
        return [_read(data) for data in self._worker.all_gather(file.getvalue())]


def _read(data: bytes) -> list[Array]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return [file[name] for name in file.files]


class GatherSync(Sync):
    """The sync "gather"."""

    def connect(self, worker: Group) -> Collective:
        return Gathering(worker)


class ApartSync(GatherSync):
    """The sync "apart": ranks step by themselves, and average their weights at the end of an epoch."""

    in_step = False

    def step(self, replica: Replica, batch: Any) -> None:
        if batch.rows:
            replica.apply(replica.gradients(batch).arrays)

    def catch_up(self, replica: Replica) -> None:
        replica.write(self.collective.mean(replica.read(), 1.0))
