"""When a gang counts as stalled, and who is to blame; also makes the fault handler's output readable."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BEATS_PER_STALL = 4
_SILENT_BEATS = 3
_PACKAGE = str(Path(__file__).resolve().parents[1])
_MAIN = re.compile(r"^main (?P<thread>0x[0-9a-f]+)$", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<thread>0x[0-9a-f]+).*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_ENTRY = "run_child"  # above it is how the process came to be
_MACHINERY = ("threading.py", "runpy.py", "<frozen runpy>", "<frozen importlib._bootstrap>")


def beat_interval(heartbeat_s: float, stall_timeout_s: float) -> float:
    """Seconds between heartbeats that carry progress: several within the stall timeout."""
    return min(heartbeat_s, stall_timeout_s / _BEATS_PER_STALL)


@dataclass(slots=True)
class _Rank:
    ticks: int
    waiting: bool
    received: float


class Motion:
    def __init__(self, size: int, limit_s: float, *, beat_s: float) -> None:
        self._size = size  # how many ranks there are
        # Seconds without any movement that make a stall. They count from when all have their job.
        self._limit_s = limit_s
        self._beat_s = beat_s  # seconds between a rank's pulses
        self._ranks: dict[int, _Rank] = {}
        self._done: set[int] = set()
        self._moved = 0.0

    def pulse(self, rank: int, ticks: int, waiting: bool, now: float) -> None:
        known = self._ranks.get(rank)
        if known is None or known.ticks != ticks:
            self._moved = now
        self._ranks[rank] = _Rank(ticks, waiting, now)

    def moved(self, now: float) -> None:
        self._moved = now

    def replaced(self, rank: int) -> None:
        """A rank begins again: until it has its job, nothing counts as a stall."""
        self._ranks.pop(rank, None)
        self._done.discard(rank)

    def ended(self, rank: int) -> None:
        self._done.add(rank)

    def idle_s(self, now: float) -> float:
        """Seconds since anything moved; 0 until all ranks have their job, and when all have ended."""
        if len(self._ranks.keys() | self._done) < self._size or len(self._done) == self._size:
            return 0.0
        return now - self._moved

    def stalled(self, now: float) -> bool:
        return self.idle_s(now) > self._limit_s

    def missing(self, now: float) -> list[int]:
        """The ranks that the others wait for; all unfinished ones if none waits."""
        left = [rank for rank in range(self._size) if rank not in self._done]
        return [rank for rank in left if not self._waits(rank, now)] or left

    def _waits(self, rank: int, now: float) -> bool:
        known = self._ranks.get(rank)
        # One that is silent is stuck where it cannot even say so; its last word is out of date.
        return known is not None and known.waiting and now - known.received < _SILENT_BEATS * self._beat_s


def readable(dump: str, *, source: Callable[[str, int], str] = linecache.getline) -> str:
    """Turn the fault handler's output into a traceback, the main thread and the user's frames first."""
    main = _MAIN.search(dump)
    threads = _threads(dump)
    if main is not None:
        threads.sort(key=lambda thread: thread[0] != main["thread"])
    shown = []
    for name, frames in threads:
        is_main = main is not None and name == main["thread"]
        kept = _users_part(frames) or (_own_part(frames) if is_main else [])
        if kept:
            label = "main thread" if is_main else f"thread {name}"
            shown.append(f"  {label} (most recent call last):\n" + "\n".join(_lines(kept, source)))
    return "\n".join(shown) if shown else _MAIN.sub("", dump).strip()


def _threads(dump: str) -> list[tuple[str, list[tuple[str, int, str]]]]:
    threads: dict[str, list[tuple[str, int, str]]] = {}
    frames: list[tuple[str, int, str]] = []
    for line in dump.splitlines():
        if thread := _THREAD.match(line):
            frames = threads[thread["thread"]] = []
        elif frame := _FRAME.match(line):
            frames.insert(0, (frame["file"], int(frame["line"]), frame["function"]))
    return list(threads.items())


def _users_part(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    inside = [index for index, (file, _, _) in enumerate(frames) if not file.endswith(_MACHINERY)]
    users = [index for index in inside if not frames[index][0].startswith(_PACKAGE)]
    return frames[users[0] : inside[-1] + 1] if users else []


def _own_part(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    functions = [function for _, _, function in frames]
    return frames[functions.index(_ENTRY) + 1 :] if _ENTRY in functions else frames


def _lines(frames: list[tuple[str, int, str]], source: Callable[[str, int], str]) -> list[str]:
    lines = []
    for file, number, function in frames:
        lines.append(f'    File "{file}", line {number}, in {function}')
        if text := source(file, number).strip():
            lines.append(f"      {text}")
    return lines
