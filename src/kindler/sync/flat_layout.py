"""Where arrays lie in the flat buffers that carry them, and how these are cut: no data, no ranks.

Arrays of one carrier dtype lie one after the other in a `Section`. A section is cut into `Window`s, each
small enough for one slot of shared memory; a `Piece` is the part of one array that lies in one window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGN_BYTES = 64  # so that frameworks can take the results without a copy


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of the array number `array`, at element `at` of the window."""

    array: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Window:
    """Elements `start` to `stop` of the section number `section`."""

    section: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A flat buffer of `count` elements."""

    dtype: np.dtype[Any]
    count: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one array lies: elements `start` to `stop` of the section number `section`."""

    section: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How the arrays of one layout travel."""

    sections: tuple[Section, ...]
    windows: tuple[Window, ...]
    places: tuple[Place, ...]


def plan(
    layout: Sequence[tuple[int, np.dtype[Any]]],
    carrier: Callable[[np.dtype[Any]], np.dtype[Any]],
    *,
    window_bytes: int,
    lead_bytes: int = 0,
) -> Plan:
    """Lay out arrays of these (elements, dtype).

    Args:
        layout: Each array's number of elements and its dtype.
        carrier: The dtype in which arrays of a dtype travel.
        window_bytes: No window is larger.
        lead_bytes: Room at the start of each section, for what travels along.
    """
    carriers = [carrier(dtype) for _, dtype in layout]
    sections: list[Section] = []
    windows: list[Window] = []
    places: dict[int, Place] = {}
    for number, dtype in enumerate(dict.fromkeys(carriers)):
        step = max(ALIGN_BYTES // dtype.itemsize, 1)
        end = lead_bytes // dtype.itemsize
        members = [index for index, own in enumerate(carriers) if own == dtype]
        for index in members:
            start = -(-end // step) * step
            end = start + layout[index][0]
            places[index] = Place(number, start, end)
        sections.append(Section(dtype, end))
        windows += _cut(number, end, window_bytes // dtype.itemsize, {i: places[i] for i in members})
    return Plan(tuple(sections), tuple(windows), tuple(places[index] for index in range(len(layout))))


def _cut(section: int, count: int, step: int, places: dict[int, Place]) -> list[Window]:
    pieces: list[list[Piece]] = [[] for _ in range(0, count, step)]
    for index, place in places.items():
        start = place.start
        while start < place.stop:
            number = start // step
            stop = min(place.stop, (number + 1) * step)
            pieces[number].append(
                Piece(index, start - place.start, stop - place.start, start - number * step)
            )
            start = stop
    return [
        Window(section, number * step, min((number + 1) * step, count), tuple(inside))
        for number, inside in enumerate(pieces)
    ]
