"""Which rank looks after which elements of the parameters: no data, no torch.

Parameters that travel together lie one after the other. They are cut into as many slices as there are ranks:
anywhere, where an optimizer moves each element by itself, or between parameters, where it needs the whole of
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Elements `start` to `stop` of the parameter in the place `place`."""

    place: int
    start: int
    stop: int


def by_elements(sizes: Sequence[int], ranks: int) -> list[list[Share]]:
    """For each rank its shares of parameters of these sizes: slices that differ by one element at most.

    >>> by_elements([5, 1, 2], 2)
    [[Share(place=0, start=0, stop=4)], [Share(place=0, start=4, stop=5), Share(place=1, start=0, stop=1), \
Share(place=2, start=0, stop=2)]]
    """
    total = sum(sizes)
    bounds = [rank * total // ranks for rank in range(ranks + 1)]
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    begin = 0
    for place, size in enumerate(sizes):
        for rank in range(ranks):
            start, stop = max(bounds[rank], begin), min(bounds[rank + 1], begin + size)
            if start < stop:
                shares[rank].append(Share(place, start - begin, stop - begin))
        begin += size
    return shares


def by_parameters(sizes: Sequence[int], loads: list[int]) -> list[list[Share]]:
    """For each rank the parameters that it has as a whole; large ones first, to whoever has least.

    Args:
        sizes: Of the parameters.
        loads: What each rank has so far; these are added.

    >>> by_parameters([3, 9, 4], loads := [0, 0])
    [[Share(place=1, start=0, stop=9)], [Share(place=0, start=0, stop=3), Share(place=2, start=0, stop=4)]]
    >>> loads
    [9, 7]
    """
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner = owners[place] = loads.index(min(loads))
        loads[owner] += sizes[place]
    return [
        [Share(place, 0, size) for place, size in enumerate(sizes) if size and owners[place] == rank]
        for rank in range(len(loads))
    ]
