"""Workers that have as many rows as a test likes, and the batches that one process makes of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler.data.batches import Batches, BatchOptions
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import ColumnPlan
from kindler.data.sources import arrow_source
from kindler.data.spool import Spool
from kindler.estimator.inputs.contract import SourceRequest
from kindler.estimator.inputs.local import MemoryInput


@dataclass(frozen=True)
class Uneven:
    """A source that gives rank r so many rows, one block after the other."""

    folder: str
    columns: ColumnPlan
    cuts: tuple[int, ...]

    def open(self, worker: Any, dealing: Any = None, *, in_order: bool = False) -> Spool:
        return self.of_rank(worker.rank)

    def of_rank(self, rank: int) -> Spool:
        whole = Spool.open(self.folder)
        start = sum(self.cuts[:rank])
        part = slice(start, start + self.cuts[rank])
        return Spool(rows=self.cuts[rank], arrays={name: a[part] for name, a in whole.arrays.items()})


def deal(monkeypatch: pytest.MonkeyPatch, cuts: Sequence[int]) -> None:
    """Let workers have so many rows of what the next fits are given."""

    def source(self: MemoryInput, request: SourceRequest) -> tuple[Uneven, None]:
        whole = arrow_source(self.data, request.columns, scratch=request.scratch)
        return Uneven(whole.folder, whole.columns, tuple(cuts)), None

    monkeypatch.setattr(MemoryInput, "source", source)


def global_batches(
    data: Mapping[str, np.ndarray],
    cuts: Sequence[int],
    *,
    batch_size: int,
    epochs: int,
    options: ColumnOptions,
    folder: Path,
    seed: int = 0,
    shuffle: bool = True,
) -> list[list[tuple[Any, Any]]]:
    """For each epoch, the rows of all ranks together, step by step."""
    source = arrow_source(dict(data), options, scratch=folder)
    uneven = Uneven(source.folder, source.columns, tuple(cuts))
    ranks = [
        Batches(
            uneven.of_rank(rank),
            source.columns,
            BatchOptions(counts=cuts, rank=rank, batch_size=batch_size, seed=seed, shuffle=shuffle),
        )
        for rank in range(len(cuts))
    ]
    return [
        [
            tuple(
                tuple(
                    np.concatenate(arrays) for arrays in zip(*(getattr(b, kind) for b in parts), strict=True)
                )
                for kind in ("features", "labels")
            )
            for parts in zip(*(batches.stretch(epoch + 1) for batches in ranks), strict=True)
        ]
        for epoch in range(epochs)
    ]
