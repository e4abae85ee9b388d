"""What ranks that can be replaced have been told so far, for the process that takes the place of a dead one.

A new process calls what the first one called, in the same order. It is answered from here up to the point
where the other one died, and meets the rest of the gang after that. So that it need not begin with the first
step, each rank keeps its state here now and then, and answers from before that are forgotten.

Large pieces lie in files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kindler.engine.frames import Piece
from kindler.temporary import Folder

_IN_MEMORY_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank has kept.

    Attributes:
        turn: The gather that comes next.
        data: Its bytes.
    """

    turn: int
    data: bytes


class Transcript:
    """The answers to the gathers of one gang, and what its ranks keep; a context manager.

    Args:
        size: How many ranks gather.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: dict[int, dict[int, _Stored]] = {}
        self._opened: dict[int, int] = {}
        self._kept: dict[int, tuple[int, _Stored]] = {}
        self._folder: Folder | None = None
        self._files = 0

    def __enter__(self) -> Transcript:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.remove()

    def answered(self, turn: int, answers: Mapping[int, Sequence[Piece]]) -> None:
        """Remember the frames that were sent to each rank; those that are the same object are stored once."""
        stored: dict[int, _Stored] = {}
        for pieces in answers.values():
            if id(pieces) not in stored:
                stored[id(pieces)] = self._store(b"".join(pieces))
        self._answers[turn] = {rank: stored[id(pieces)] for rank, pieces in answers.items()}

    def answer(self, turn: int, rank: int) -> bytes | None:
        """What a rank was told; None where the gather is not over yet."""
        answers = self._answers.get(turn)
        return None if answers is None else answers[rank].read()

    def opens(self, rank: int, turn: int) -> Kept:
        """What a rank goes on from, once it is prepared; for that it needed the gathers before `turn`."""
        self._opened[rank] = turn
        if rank not in self._kept:
            return Kept(turn, b"")
        next_turn, stored = self._kept[rank]
        return Kept(next_turn, stored.read())

    def keep(self, rank: int, turn: int, data: bytes) -> None:
        """Replace what a rank has kept, and forget what no process will ask for any more."""
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
    """Bytes, or the file that they are in."""

    place: bytes | Path

    def read(self) -> bytes:
        return self.place if isinstance(self.place, bytes) else self.place.read_bytes()

    def remove(self) -> None:
        if isinstance(self.place, Path):
            self.place.unlink(missing_ok=True)
