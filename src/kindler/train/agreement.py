"""Values that all workers agree on, exchanged through the first one: the cost is linear in their number."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol


class Gathers(Protocol):
    """The part of a worker that is used here."""

    rank: int
    size: int
    outlives: bool

    def all_gather(self, data: bytes) -> list[bytes]: ...
    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]: ...


def to_first(worker: Gathers, data: bytes) -> list[bytes]:
    """The bytes of all ranks, on the first; an empty list on the others. All ranks call it together."""
    by_rank = worker.gather(data, range(worker.size) if worker.rank == 0 else ())
    return [by_rank[rank] for rank in sorted(by_rank)]


def from_first(worker: Gathers, data: bytes) -> bytes:
    """The first rank's bytes, on all ranks. All ranks call it together."""
    return worker.gather(data if worker.rank == 0 else b"", [0])[0]


def merged_by_first(
    worker: Gathers, mine: bytes, merge: Callable[[Sequence[bytes]], dict[str, Any]]
) -> dict[str, Any]:
    """All ranks' bytes merged by the first one into a dict of JSON values. All ranks call it together."""
    if worker.outlives:  # the first one may die: everybody merges what came
        return merge([part for part in worker.all_gather(mine) if part])
    parts = to_first(worker, mine)
    merged = json.dumps(merge(parts)).encode() if worker.rank == 0 else b""
    result: dict[str, Any] = json.loads(from_first(worker, merged))
    return result
