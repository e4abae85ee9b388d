"""Checkpoints: the file format, a folder of them, and when a run writes one.

    magic | length of the header | header (JSON) | the model's state | ranks' own states | SHA-256 of all that

Ranks have states of their own only in the middle of an epoch. Reading executes no code. File names sort by
time, whichever run wrote them: `checkpoint-000007-epoch-00002-step-000000120.kindler`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any, TypeAlias

from kindler.errors import ConfigError
from kindler.files import Folder, folder_at, split
from kindler.train.metric_names import Direction, improves
from kindler.train.metric_names import parse as parse_metric

Piece: TypeAlias = "bytes | memoryview"

_FORMAT = 1
_MAGIC = b"kindler checkpoint\n"
_LENGTH = struct.Struct("<Q")
_START = len(_MAGIC) + _LENGTH.size
_HASH_BYTES = 32
_HEADER_BYTES = 1 << 16
_NAME = re.compile(r"checkpoint-(?P<number>\d+)-epoch-\d+-step-\d+\.kindler")
# The first bytes of model files that callbacks write, by suffix.
_MODEL_FILES = {".keras": b"PK", ".h5": b"\x89HDF", ".pt": b"PK", ".pth": b"PK"}


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped."""


class DamagedCheckpointError(Exception):
    """The bytes are not a complete checkpoint; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a checkpoint; epochs and steps count from the creation of the model."""

    framework: str
    epoch: int  # epochs begun
    step: int
    step_in_epoch: int = 0  # 0 between epochs
    run: str = ""  # the id of the run that wrote it
    first_epoch: int = 0  # epochs that had ended when the run began
    first_step: int = 0  # steps made when the run began
    counts: tuple[int, ...] = ()  # rows of each lane
    marks: tuple[str, ...] = ()  # fingerprints of the rows of each lane
    lanes: int = 0  # lanes that rows were dealt to, before small ones were joined; 0 if not dealt
    workers: int = 0  # ranks when rows were first dealt like this
    batch_size: int = 0  # rows per step over all ranks
    steps_per_epoch: int | None = None  # None is one pass over the rows
    seed: int = 0
    shuffle: bool = True
    seconds: float = 0.0  # duration of the unfinished epoch so far
    spent: Mapping[str, float] = field(default_factory=dict)  # by the run so far, for its goodput
    rows: tuple[Mapping[str, Any], ...] = ()
    stopped: str | None = None  # why the run ended before its last epoch
    callbacks: tuple[Mapping[str, Any], ...] = ()  # class name and state of each

    @property
    def ends_epoch(self) -> bool:
        return self.step_in_epoch == 0

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.rows[-1] if self.rows else {}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `local_states` has one state per rank in mid-epoch."""

    header: Header
    state: bytes = field(repr=False)
    local_states: tuple[bytes, ...] = field(default=(), repr=False)


def pack(header: Header, state: Sequence[Piece], local_states: Sequence[bytes] = ()) -> list[Piece]:
    sizes = [sum(memoryview(piece).nbytes for piece in state), *(len(local) for local in local_states)]
    head = json.dumps({"format": _FORMAT, **asdict(header), "sizes": sizes}).encode()
    pieces: list[Piece] = [_MAGIC, _LENGTH.pack(len(head)), head, *state, *local_states]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return [*pieces, digest.digest()]


def is_checkpoint(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def _header_end(data: bytes) -> int:
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise DamagedCheckpointError("not a checkpoint file")
    return _START + (_LENGTH.unpack_from(data, len(_MAGIC))[0] if len(data) >= _START else 0)


def parse_header(data: bytes) -> tuple[Header, list[int], int]:
    """The header, the sizes of the buffers after it, and where they begin; or DamagedCheckpointError."""
    begin = _header_end(data)
    if begin > len(data):
        raise DamagedCheckpointError(f"truncated in its header, after {len(data)} bytes")
    try:
        fields = json.loads(data[_START:begin])
        version, sizes = fields.pop("format"), fields.pop("sizes")
        if version != _FORMAT:
            raise DamagedCheckpointError(
                f"unsupported format {version!r}; this version of Kindler reads {_FORMAT}"
            )
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        header = Header(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DamagedCheckpointError(f"invalid header ({exc})") from exc
    return header, sizes, begin


def check(data: bytes, *, verify: bool = True) -> tuple[Header, list[int], int]:
    """`parse_header` of a complete file; without `verify` the checksum is not computed."""
    header, sizes, begin = parse_header(data)
    expected = begin + sum(sizes) + _HASH_BYTES
    if len(data) != expected:
        raise DamagedCheckpointError(f"its size is {len(data)} bytes, expected {expected}")
    view = memoryview(data)
    if verify and hashlib.sha256(view[:-_HASH_BYTES]).digest() != view[-_HASH_BYTES:]:
        raise DamagedCheckpointError("checksum mismatch")
    return header, sizes, begin


def parse(data: bytes, *, verify: bool = True) -> Checkpoint:
    header, sizes, begin = check(data, verify=verify)
    view, buffers = memoryview(data), []
    for size in sizes:
        buffers.append(bytes(view[begin : begin + size]))
        begin += size
    return Checkpoint(header, buffers[0], tuple(buffers[1:]))


def read_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Raises ConfigError if the file is not a complete checkpoint."""
    folder, name = split(path)
    try:
        return parse(folder_at(folder).read(name))
    except DamagedCheckpointError as exc:
        raise ConfigError(
            f"{path} is not a complete checkpoint: {exc}.\nHint: load weights that save() wrote with load()."
        ) from exc


def write_checkpoint(path: str | PathLike[str], header: Header, state: bytes) -> None:
    folder, name = split(path)
    folder_at(folder).write(name, pack(header, [state]))


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    header: Header
    path: str
    data: bytes = field(repr=False)


class CheckpointFolder:
    """The checkpoints in a folder; one run at a time writes there.

    A local folder is on the first worker's machine; several machines must share it, or use a URL. `keep` is
    how many of the newest to keep (None: all), besides the newest of an epoch's end; `best` is a metric whose
    best epoch is kept too, with the prefix "max:" or "min:" if the name does not tell the direction.
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
        state: Callable[[], Sequence[Piece]],
        local_states: Sequence[bytes] = (),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint in the background, after the previous one, whose error is raised here.

        `state` and `then` are called on the writing thread.
        """
        self._check_best(header)
        self.wait()

        def work() -> None:
            try:
                self._write(header, pack(header, state(), local_states))
                then()
            except Exception as exc:  # noqa: BLE001 - raised again by whoever waits
                self._error = exc

        self._writing = threading.Thread(target=work, name="kindler-checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def newest(self, matching: Callable[[Header], bool] = lambda header: True) -> StoredCheckpoint | None:
        """The newest complete checkpoint whose header matches; damaged ones are skipped with a warning."""
        for name, header in self._headers(newest_first=True):
            if isinstance(header, DamagedCheckpointError):
                self._warn(name, header)
            elif matching(header):
                try:
                    data = self._folder.read(name)
                    return StoredCheckpoint(check(data)[0], self._folder.path(name), data)
                except (DamagedCheckpointError, OSError) as exc:
                    self._warn(name, exc)
        return None

    def resume_candidates(
        self, matching: Callable[[Header], bool] = lambda header: True
    ) -> list[StoredCheckpoint]:
        """The newest match; if it is from within an epoch, also the newest from the end of one.

        The former is usable only by workers that have the same rows as those that wrote it.
        """
        newest = self.newest(matching)
        if newest is None or newest.header.ends_epoch:
            return [newest] if newest else []
        end = self.newest(lambda header: header.ends_epoch and matching(header))
        return [newest, *([end] if end else [])]

    def _write(self, header: Header, file: Sequence[Piece]) -> None:
        if self._known is None:
            self._folder.sweep()
            self._known = {n: h for n, h in self._headers() if isinstance(h, Header)}
            self._number = max((number for number, _ in self._names()), default=0)
        self._number += 1
        name = f"checkpoint-{self._number:06d}-epoch-{header.epoch:05d}-step-{header.step:09d}.kindler"
        self._folder.write(name, file)
        self._known[name] = header
        for old in self._known.keys() - kept(self._known, keep=self._keep, best=self._best):
            self._folder.remove(old)
            del self._known[old]

    def _names(self) -> list[tuple[int, str]]:
        matches = [(_NAME.fullmatch(name), name) for name in self._folder.names()]
        return sorted((int(match["number"]), name) for match, name in matches if match)

    def _headers(
        self, *, newest_first: bool = False
    ) -> Iterator[tuple[str, Header | DamagedCheckpointError]]:
        for _, name in sorted(self._names(), reverse=newest_first):
            try:
                yield name, self._header(name)
            except DamagedCheckpointError as exc:
                yield name, exc
            except OSError as exc:
                yield name, DamagedCheckpointError(f"unreadable ({exc})")

    def _header(self, name: str, limit: int = _HEADER_BYTES) -> Header:
        data = self._folder.read(name, limit)
        if len(data) == limit and _header_end(data) > limit:
            return self._header(name, 16 * limit)
        return parse_header(data)[0]

    def _check_best(self, header: Header) -> None:
        if self._best is None or not header.ends_epoch or self._best[0] in header.metrics:
            return
        validated = any(name.startswith("val_") for name in header.metrics)
        if validated or not self._best[0].startswith("val_"):  # epochs without validation are not compared
            metrics = [n for n, v in header.metrics.items() if isinstance(v, float)]
            raise ConfigError(
                f"Checkpoints(best={self._best[0]!r}): not a metric of this run; available: {metrics}."
            )

    def _warn(self, name: str, problem: Exception) -> None:
        text = f"skipping the checkpoint {self._folder.path(name)}: {problem}"
        warnings.warn(text, CheckpointWarning, stacklevel=3)


def kept(known: dict[str, Header], *, keep: int | None, best: tuple[str, Direction] | None) -> set[str]:
    """The names to keep: the last ones, the last at the end of an epoch, and the best."""
    names = sorted(known)
    if keep is None:
        return set(names)
    ends = [name for name in names if known[name].ends_epoch]
    chosen = {*names[-keep:], *ends[-1:]}
    if best is not None:
        leader, leading = "", None
        for name in ends:
            value = known[name].metrics.get(best[0])
            if value is not None and improves(value, leading, best[1]):
                leader, leading = name, value
        chosen |= {leader} - {""}
    return chosen


def latest(folder: str | PathLike[str]) -> str | None:
    """The newest complete checkpoint in a folder: a run's own, or one that a callback wrote."""
    place, own = folder_at(folder), CheckpointFolder(folder).newest()
    names = [name for name in place.names() if not _NAME.fullmatch(name) and not name.startswith(".")]
    if own is not None:
        written = place.modified(own.path.rpartition("/")[2])
        names = [name for name in names if place.modified(name) > written]
    for name in sorted(names, key=place.modified, reverse=True):
        if _is_complete(name, place):
            return place.path(name)
    return None if own is None else own.path


def is_model_file(name: str) -> bool:
    return name.endswith(tuple(_MODEL_FILES))


def _is_complete(name: str, folder: Folder) -> bool:
    begins = next((begins for suffix, begins in _MODEL_FILES.items() if name.endswith(suffix)), None)
    try:
        if begins is None or is_checkpoint(folder.read(name, 64)):
            check(folder.read(name))
            return True
        data = folder.read(name)
        return data.startswith(begins) and (begins != b"PK" or zipfile.is_zipfile(io.BytesIO(data)))
    except (DamagedCheckpointError, OSError):
        return False


def callback_states(callbacks: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """The class name and state of each callback; raises ConfigError if a state is not JSON."""
    states = []
    for callback in callbacks:
        state = callback.state_dict() if hasattr(callback, "state_dict") else None
        try:
            states.append({"type": type(callback).__name__, "state": json.loads(json.dumps(state))})
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"{type(callback).__name__}.state_dict() returned {state!r}, which is not JSON: {exc}.\n"
                "Hint: return numbers, strings, lists and dicts."
            ) from exc
    return tuple(states)


def restore_callbacks(callbacks: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Restore callbacks' states; one that is new, or of another class than before, stays as it is."""
    for callback, entry in zip(callbacks, states, strict=False):
        if entry["state"] and entry["type"] == type(callback).__name__:
            callback.load_state_dict(entry["state"])
