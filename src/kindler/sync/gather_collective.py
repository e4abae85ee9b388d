"""A collective over the workers' own meeting point, for exchanges that are few and small.

It goes on without ranks that have died, where the engine does: they count for nothing then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import SyncError
from kindler.sync.flat_buffer import FlatLayout
from kindler.sync.wait_clock import Waiting

_WEIGHT = struct.Struct("<d")


class GatherCollective:
    """See `Collective` for what the methods promise.

    Args:
        worker: One of those that meet.
    """

    def __init__(self, worker: Any) -> None:
        self.rank, self.size = worker.rank, worker.size
        self._worker = worker
        self._waiting = Waiting()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return self._waiting.seconds

    def sum(self, arrays: Sequence[Array]) -> list[Array]:
        """The sum over ranks."""
        return self._added(arrays, [1.0] * self.size)

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        """The mean over ranks, each counting by its weight."""
        with self._waiting:
            told = self._worker.all_gather(_WEIGHT.pack(weight))
        weights = [_WEIGHT.unpack(part)[0] if part else 0.0 for part in told]
        whole = sum(weights)
        return self._added(arrays, [part / whole if whole else 0.0 for part in weights])

    def broadcast(self, arrays: Sequence[Array], src: int = 0) -> list[Array]:
        """The arrays of the rank `src`."""
        layout = FlatLayout(arrays)
        data = _packed(layout, arrays) if self.rank == src else b""
        with self._waiting:
            whole = self._worker.gather(data, [src])[src]
        if not whole and layout.nbytes:
            raise SyncError(f"worker {src} died while the others waited for what it has.")
        return [view.copy() for view in layout.views(whole)] if layout.nbytes else list(arrays)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self._waiting:
            self._worker.barrier()

    def close(self) -> None:
        """Nothing is open."""

    def _added(self, arrays: Sequence[Array], shares: Sequence[float]) -> list[Array]:
        layout = FlatLayout(arrays)
        with self._waiting:
            told = self._worker.all_gather(_packed(layout, arrays))
        totals = [np.zeros_like(array) for array in arrays]
        for part, share in zip(told, shares, strict=True):
            if not share or not part:
                continue
            for total, view in zip(totals, layout.views(part), strict=True):
                if share == 1.0:
                    total += view
                else:
                    total += (view * share).astype(total.dtype, copy=False)
        return totals


class MeanAtHub(GatherCollective):
    """One whose means are made where ranks meet, so that each rank sends its arrays once and gets one answer.

    Another process can take the place of a rank that dies: nothing is exchanged between ranks themselves.
    """

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        """The mean over ranks, each counting by its weight."""
        kinds = [np.asarray(array) for array in arrays]
        with self._waiting:
            means = self._worker.mean([_wide(array) for array in kinds], weight)
        return [
            mean.astype(array.dtype).reshape(array.shape)  # also where it was widened
            for mean, array in zip(means, kinds, strict=True)
        ]


def _wide(array: Array) -> Array:
    """Flat, and in float32 where its own type is smaller, or not one of numpy's."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat if flat.dtype.kind in "fc" and flat.dtype.itemsize >= 4 else flat.astype(np.float32)


def _packed(layout: FlatLayout, arrays: Sequence[Array]) -> bytes:
    buffer = np.zeros(layout.nbytes, np.uint8)
    for view, array in zip(layout.views(buffer), arrays, strict=True):
        np.copyto(view, array)
    return buffer.tobytes()
