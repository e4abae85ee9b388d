"""How the ranks of a gang agree: gathers, where to halt, and what a replaced rank is told again."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from kindler.errors import TrainingError
from kindler.frame import Frame, Piece, encode, from_bytes, to_bytes
from kindler.temporary import Folder

Wants: TypeAlias = Sequence[int] | Literal["all", "sum", "mean"]

_INT64 = np.dtype("<i8")
_IN_MEMORY_BYTES = 256 << 10


class Gathering:
    """One gather: each of `size` ranks brings bytes, and gets those of others, a sum or a mean."""

    def __init__(self, turn: int, size: int) -> None:
        self._turn = turn
        self._size = size
        self._brought: dict[int, bytes] = {}
        self._wants: dict[int, Wants] = {}

    def bring(self, rank: int, data: bytes, wants: Wants) -> None:
        """ "sum" adds up arrays of 64-bit integers, "mean" averages `weighted_arrays`."""
        self._brought[rank] = data
        self._wants[rank] = wants if isinstance(wants, str) else tuple(wants)

    def lacks(self, ranks: Collection[int]) -> bool:
        return not set(ranks) <= self._brought.keys()

    @property
    def brought(self) -> list[int]:
        return sorted(self._brought)

    def complete(self, lost: Collection[int] = ()) -> bool:
        return len(self._brought.keys() | set(lost)) == self._size

    def answers(self, lost: Collection[int] = ()) -> dict[int, list[Piece]]:
        """The pieces to send to each remaining rank; ranks that want the same get the same object."""
        for rank in lost:
            self._brought.pop(rank, None)
        answers: dict[Wants, list[Piece]] = {}
        fields = {"turn": self._turn, **({"lost": sorted(lost)} if lost else {})}
        for wants in {self._wants[rank] for rank in self._brought}:
            answers[wants] = encode_parts(self._parts(wants), **fields)
        return {rank: answers[self._wants[rank]] for rank in sorted(self._brought)}

    def _parts(self, wants: Wants) -> list[bytes]:
        in_order = [data for _, data in sorted(self._brought.items())]
        if wants == "sum":
            arrays = [np.frombuffer(data, _INT64) for data in in_order]
            return [np.sum(arrays, axis=0, dtype=_INT64).tobytes()]
        if wants == "mean":
            return [_mean(in_order)]
        ranks = range(self._size) if wants == "all" else wants
        return [self._brought.get(int(rank), b"") for rank in ranks]


def encode_parts(parts: Sequence[bytes], **fields: Any) -> list[Piece]:
    """Encode the frames "gathered". Equal parts travel once: most of what ranks say is the same."""
    distinct: dict[bytes, int] = {}
    which = [distinct.setdefault(part, len(distinct)) for part in parts]
    if len(distinct) == len(parts):
        which = []
    fields["counts"] = len(distinct), len(which)
    # In one buffer, as each costs the reader a system call, and not in the header, which all parse.
    numbers = write_numbers([*map(len, distinct), *which])
    frames = encode("gathered", [b"".join([numbers, *distinct])], fields)
    return [piece for frame in frames for piece in frame]


def decode_parts(gathered: Frame) -> list[bytes]:
    data, (count, repeated) = gathered.buffers[0], gathered.fields["counts"]
    start = _INT64.itemsize * (count + repeated)
    numbers, distinct = read_numbers(data[:start]), []
    for length in numbers[:count]:
        distinct.append(data[start : start + length])
        start += length
    return [distinct[number] for number in numbers[count:]] if repeated else distinct


def write_numbers(values: Sequence[int]) -> bytes:
    return np.asarray(values, _INT64).tobytes()


def read_numbers(data: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(data, _INT64).tolist()
    return numbers


def weighted_arrays(arrays: Sequence[np.ndarray[Any, Any]], weight: float) -> bytes:
    dtypes = [array.dtype.str for array in arrays]
    return to_bytes("arrays", *(array.tobytes() for array in arrays), weight=weight, dtypes=dtypes)


def read_arrays(data: bytes) -> list[np.ndarray[Any, Any]]:
    return list(_arrays(from_bytes(data)))


def _arrays(frame: Frame) -> Iterator[np.ndarray[Any, Any]]:
    for dtype, buffer in zip(frame.fields["dtypes"], frame.buffers, strict=True):
        yield np.frombuffer(buffer, dtype)


def _mean(parts: Sequence[bytes]) -> bytes:
    """Average in double precision. A rank of weight 0 is ignored, whatever its arrays hold."""
    frames = list(map(from_bytes, parts))
    weights = [float(frame.fields["weight"]) for frame in frames]
    whole, counting = sum(weights), [place for place, weight in enumerate(weights) if weight]
    means = []
    for arrays in zip(*map(_arrays, frames), strict=True):
        total = np.zeros(arrays[0].shape, np.promote_types(arrays[0].dtype, np.float64))
        for place in counting:
            total += arrays[place] * (weights[place] / whole)
        means.append(total.astype(arrays[0].dtype))
    return weighted_arrays(means, whole)


class Halting:
    """One rank's side of the agreement to end after the newest step that any of them has begun.

    A rank that ended alone would leave the others waiting in an exchange. When the driver asks, each says
    which step it began last and begins no other until it hears the largest of these numbers. Until then this
    costs a step nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._asked = False
        self._answered = threading.Event()
        self._last = 0

    def asked(self) -> int:
        with self._lock:
            self._asked = True
            return self._begun

    def answer(self, last: int) -> None:
        self._last = last
        self._answered.set()

    def go_on(self, number: int, *, whole: bool = True, timeout_s: float) -> bool:
        with self._lock:
            if not self._asked:
                self._begun = number
                return True
        if not self._answered.wait(timeout_s):
            raise TrainingError(f"the other workers did not report within {timeout_s:g} s where to halt.")
        return number <= self._last if whole else number < self._last


class HaltVote:
    """The driver's side: `last` is the largest number begun, once all ranks have voted.

    `moves` is whether other processes go on from there.
    """

    def __init__(self, ranks: Collection[int], *, moves: bool = False) -> None:
        self.moves = moves
        self._missing = set(ranks)
        self._largest = 0
        self._known = threading.Event()
        self.last: int | None = None

    def says(self, rank: int, begun: int) -> bool:
        self._largest = max(self._largest, begun)
        return self.left(rank)

    def left(self, rank: int) -> bool:
        self._missing.discard(rank)
        if self._missing or self.last is not None:
            return False
        self.last = self._largest
        self._known.set()
        return True

    def wait(self, timeout_s: float) -> int | None:
        self._known.wait(timeout_s)
        return self.last


class Regrouping:
    """When ranks meet again, some of which have died: once those that live and all replacements have come.

    Until then, gathers are void that lack the part of one that has died or that waits for the meeting. `most`
    losses are survived, the first of them not before all ranks are prepared.
    """

    def __init__(self, size: int, most: int) -> None:
        self._size = size
        self._left = most
        self._prepared: set[int] = set()
        self._there: set[int] = set()
        self.absent: dict[int, dict[str, Any]] = {}  # and what is known of their end
        self._replaced: list[dict[str, Any]] = []  # those who died since all went on last

    @property
    def all_prepared(self) -> bool:
        return len(self._prepared) == self._size

    @property
    def away(self) -> set[int]:
        """Ranks that bring nothing to a gather before all meet."""
        return self.absent.keys() | self._there

    def lose(self, rank: int, fields: Mapping[str, Any]) -> bool:
        """Return whether the others go on; not if none is left."""
        if not self._left or not self.all_prepared or self.absent.keys() | {rank} == self._prepared:
            return False
        self._left -= 1
        self._there.discard(rank)
        self.absent[rank] = dict(fields)
        return True

    def prepare(self, rank: int) -> bool:
        """Whether this is a rank's first process, which waits for nobody."""
        self._prepared.add(rank)
        return rank not in self.absent

    def come(self, rank: int) -> bool:
        """Return whether all are there."""
        self._there.add(rank)
        return len(self._there) == self._size

    def part(self) -> None:
        """All have come, and see whether they can go on."""
        self._replaced += [{"worker": rank, **fields} for rank, fields in self.absent.items()]
        self.absent, self._there = {}, set()

    def resume(self, now: float) -> list[dict[str, Any]]:
        """They can; returns who has died since they last did, and the seconds since then."""
        replaced, self._replaced = self._replaced, []
        return [{"seconds": now - fields.pop("died"), **fields} for fields in replaced]


class Transcript:
    """Answers to the gathers of `size` replaceable ranks, and the state that those ranks keep.

    A replacement repeats the calls of the dead process and is answered from here up to where that one died.
    Ranks keep their state now and then, and older answers are forgotten. Large pieces lie in files.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: dict[int, dict[int, _Stored]] = {}
        self._opened: dict[int, int] = {}
        self._kept: dict[int, tuple[int, _Stored]] = {}
        self._folder: Folder | None = None
        self._files = 0

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def answered(self, turn: int, answers: Mapping[int, Sequence[Piece]]) -> None:
        stored: dict[int, _Stored] = {}
        for pieces in answers.values():
            if id(pieces) not in stored:
                stored[id(pieces)] = self._store(b"".join(pieces))
        self._answers[turn] = {rank: stored[id(pieces)] for rank, pieces in answers.items()}

    def answer(self, turn: int, rank: int) -> bytes | None:
        answers = self._answers.get(turn)
        return None if answers is None else answers[rank].read()

    def opens(self, rank: int, turn: int) -> tuple[int, bytes]:
        """The turn and data that a rank continues from; turns before `turn` are needed to prepare."""
        self._opened[rank] = turn
        if rank not in self._kept:
            return turn, b""
        next_turn, stored = self._kept[rank]
        return next_turn, stored.read()

    def keep(self, rank: int, turn: int, data: bytes) -> None:
        if rank in self._kept:
            self._kept[rank][1].remove()
        self._kept[rank] = (turn, self._store(data))
        if len(self._kept) < self._size or len(self._opened) < self._size:
            return
        first, oldest = max(self._opened.values()), min(kept for kept, _ in self._kept.values())
        for past in [number for number in self._answers if first <= number < oldest]:
            for stored in set(self._answers.pop(past).values()):
                stored.remove()

    def _store(self, data: bytes) -> _Stored:
        if len(data) <= _IN_MEMORY_BYTES:
            return _Stored(data)
        if self._folder is None:
            self._folder = Folder("kindler-transcript-")
        path = self._folder.path / str(self._files)
        self._files += 1
        path.write_bytes(data)
        return _Stored(path)


@dataclass(frozen=True, eq=False, slots=True)
class _Stored:
    place: bytes | Path

    def read(self) -> bytes:
        return self.place if isinstance(self.place, bytes) else self.place.read_bytes()

    def remove(self) -> None:
        if isinstance(self.place, Path):
            self.place.unlink(missing_ok=True)
