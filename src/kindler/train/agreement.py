"""What all workers come to agree on, at a cost that grows with their number and not with its square."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

__all__ = ["Gathers", "from_first", "merged_by_first", "to_first"]


class Gathers(Protocol):
    """What is needed of a worker."""

    rank: int
    size: int

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]: ...


def to_first(worker: Gathers, data: bytes) -> list[bytes]:
    """What all ranks bring, on the first; nothing on the others. All call it together."""
    told = worker.gather(data, range(worker.size) if worker.rank == 0 else ())
    return [told[rank] for rank in sorted(told)]


def from_first(worker: Gathers, data: bytes) -> bytes:
    """What the first rank brings, on all of them. All call it together."""
    return worker.gather(data if worker.rank == 0 else b"", [0])[0]


def merged_by_first(
    worker: Gathers, mine: bytes, merge: Callable[[Sequence[bytes]], dict[str, Any]]
) -> dict[str, Any]:
    """What `merge` makes of all ranks' bytes, which JSON can carry; all call it together.

    The first rank merges for all of them.
    """
    told = to_first(worker, mine)
    made = json.dumps(merge(told)).encode() if worker.rank == 0 else b""
    figures: dict[str, Any] = json.loads(from_first(worker, made))
    return figures
