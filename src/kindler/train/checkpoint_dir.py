"""A folder of checkpoints: writes them in the background, keeps few, finds the newest complete one.

Their names sort by time, whichever run wrote them: `checkpoint-000007-epoch-00002-step-000000120.kindler`.
The file format is in `checkpoint_file.py`.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike

from kindler.errors import ConfigError
from kindler.files import Folder, folder_at
from kindler.train.checkpoint_file import (
    CheckpointWarning,
    Damaged,
    Header,
    check,
    is_checkpoint,
    pack,
    parse_header,
)
from kindler.train.metric_names import improves
from kindler.train.metric_names import parse as parse_metric

_NAME = re.compile(r"checkpoint-(?P<number>\d+)-epoch-\d+-step-\d+\.kindler")
_HEADER_BYTES = 1 << 16
# The first bytes of model files that callbacks write, by suffix.
_MODEL_FILES = {".keras": b"PK", ".h5": b"\x89HDF", ".pt": b"PK", ".pth": b"PK"}

State = Callable[[], Sequence[bytes | memoryview]]
Matching = Callable[[Header], bool]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint file: its header, its path and its bytes."""

    header: Header
    path: str
    data: bytes = field(repr=False)


class Checkpoints:
    """The checkpoints in a folder; one run at a time writes there.

    A folder on disk is on the machine of the first worker; on a cluster of several machines it must be shared
    by all, or be a URL.

    Args:
        folder: A path, or a URL that fsspec knows ("s3://bucket/run").
        keep: How many of the newest to keep; None keeps all. The newest of an epoch's end is always kept.
        best: A metric; the checkpoint of its best epoch is kept too. The prefix "max:" or "min:" gives the
            direction where the name does not tell.
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int | None = 3, best: str | None = None) -> None:
        self._folder = folder_at(folder)
        self._keep = keep
        self._best = None if best is None else parse_metric(best)
        self._known: dict[str, Header] | None = None
        self._number = 0
        self._writing: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        header: Header,
        state: State,
        local_states: Sequence[bytes] = (),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint in the background, after the previous one is written.

        Args:
            header: Its header.
            state: Returns the state's bytes; called on the writing thread.
            local_states: The states of the ranks, in the middle of an epoch.
            then: Called on the writing thread once it is written.

        Raises:
            Exception: The error of the previous write.
        """
        self._check_best(header)
        self.wait()

        def work() -> None:
            try:
                self._write(header, state, local_states)
                then()
            except Exception as exc:  # noqa: BLE001 - raised again by whoever waits
                self._error = exc

        self._writing = threading.Thread(target=work, name="kindler-checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait for the write in progress, and raise its error."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def newest(self, matching: Matching = lambda header: True) -> StoredCheckpoint | None:
        """The newest complete checkpoint whose header matches, or None.

        Damaged ones are skipped with a CheckpointWarning.
        """
        for name, header in self._headers(newest_first=True):
            if isinstance(header, Damaged):
                self._warn(name, header)
            elif matching(header):
                try:
                    data = self._folder.read(name)
                    return StoredCheckpoint(check(data)[0], self._folder.path(name), data)
                except (Damaged, OSError) as exc:
                    self._warn(name, exc)
        return None

    def to_go_on_from(self, matching: Matching = lambda header: True) -> list[StoredCheckpoint]:
        """The newest match; if it is from within an epoch, also the newest from the end of one.

        The former is usable only by workers that have the same rows as those that wrote it.
        """
        newest = self.newest(matching)
        if newest is None or newest.header.ends_epoch:
            return [newest] if newest else []
        end = self.newest(lambda header: header.ends_epoch and matching(header))
        return [newest, *([end] if end else [])]

    def _write(self, header: Header, state: State, local_states: Sequence[bytes]) -> None:
        if self._known is None:
            self._folder.sweep()
            self._known = {n: h for n, h in self._headers() if isinstance(h, Header)}
            self._number = max((number for number, _ in self._names()), default=0)
        self._number += 1
        name = f"checkpoint-{self._number:06d}-epoch-{header.epoch:05d}-step-{header.step:09d}.kindler"
        self._folder.write(name, pack(header, state(), local_states))
        self._known[name] = header
        for old in self._known.keys() - kept(self._known, keep=self._keep, best=self._best):
            self._folder.remove(old)
            del self._known[old]

    def _names(self) -> list[tuple[int, str]]:
        matches = [(_NAME.fullmatch(name), name) for name in self._folder.names()]
        return sorted((int(match["number"]), name) for match, name in matches if match)

    def _headers(self, *, newest_first: bool = False) -> Iterator[tuple[str, Header | Damaged]]:
        """The header of each file, or why it is damaged; oldest first by default."""
        for _, name in sorted(self._names(), reverse=newest_first):
            try:
                yield name, self._header(name)
            except Damaged as exc:
                yield name, exc
            except OSError as exc:
                yield name, Damaged(f"unreadable ({exc})")

    def _header(self, name: str) -> Header:
        limit = _HEADER_BYTES
        while True:
            data = self._folder.read(name, limit)
            try:
                return parse_header(data)[0]
            except IndexError:
                if len(data) < limit:
                    raise Damaged(f"truncated in its header, after {len(data)} bytes") from None
                limit *= 16

    def _check_best(self, header: Header) -> None:
        if self._best is None or not header.ends_epoch or self._best[0] in header.figures:
            return
        validated = any(name.startswith("val_") for name in header.figures)
        if validated or not self._best[0].startswith("val_"):  # epochs without validation are not compared
            metrics = [n for n, v in header.figures.items() if isinstance(v, float)]
            raise ConfigError(
                f"best_metric={self._best[0]!r} is not a metric of this run; available: {metrics}."
            )

    def _warn(self, name: str, problem: Exception) -> None:
        warnings.warn(
            f"skipping the checkpoint {self._folder.path(name)}: {problem}",
            CheckpointWarning,
            stacklevel=3,
        )


def latest(folder: str | PathLike[str]) -> str | None:
    """The newest complete checkpoint in a folder: a run's own, or one that a callback wrote."""
    place, own = folder_at(folder), Checkpoints(folder).newest()
    names = [name for name in place.names() if not _NAME.fullmatch(name) and not name.startswith(".")]
    if own is not None:
        written = place.modified(own.path.rpartition("/")[2])
        names = [name for name in names if place.modified(name) > written]
    for name in sorted(names, key=place.modified, reverse=True):
        if _is_whole(name, place):
            return place.path(name)
    return None if own is None else own.path


def is_model_file(name: str) -> bool:
    """Whether this is the name of a model file, as callbacks write them beside checkpoints."""
    return name.endswith(tuple(_MODEL_FILES))


def _is_whole(name: str, folder: Folder) -> bool:
    begins = next((begins for suffix, begins in _MODEL_FILES.items() if name.endswith(suffix)), None)
    try:
        if begins is None or is_checkpoint(folder.read(name, 64)):
            check(folder.read(name))
            return True
        data = folder.read(name)
        return data.startswith(begins) and (begins != b"PK" or zipfile.is_zipfile(io.BytesIO(data)))
    except (Damaged, OSError):
        return False


def kept(known: dict[str, Header], *, keep: int | None, best: tuple[str, str] | None) -> set[str]:
    """The names of those to keep: the last ones, the last at the end of an epoch, and the best."""
    names = sorted(known)
    if keep is None:
        return set(names)
    ends = [name for name in names if known[name].ends_epoch]
    return {*names[-keep:], *ends[-1:], *_best(known, ends, best)}


def _best(known: dict[str, Header], ends: Sequence[str], best: tuple[str, str] | None) -> list[str]:
    if best is None:
        return []
    metric, way = best
    leader: tuple[str, float] | None = None
    for name in ends:
        value = known[name].figures.get(metric)
        if value is not None and improves(value, leader and leader[1], "min" if way == "min" else "max"):
            leader = (name, value)
    return [leader[0]] if leader else []
