"""The file of a checkpoint: what is in it, and whether it is whole.

    magic | length of the header | header (JSON) | the model's state | ranks' own states | SHA-256 of all that

Ranks have states of their own only in the middle of an epoch. Reading executes no code. Which checkpoints are
kept is in `checkpoint_dir.py`, where the bytes lie in `files.py`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any, TypeAlias

from kindler.errors import ConfigError
from kindler.files import folder_at, split, write_file

__all__ = [
    "Checkpoint",
    "CheckpointWarning",
    "Damaged",
    "Header",
    "check",
    "is_checkpoint",
    "pack",
    "parse",
    "parse_header",
    "read_checkpoint",
    "write_checkpoint",
    "write_file",
]

Piece: TypeAlias = "bytes | memoryview"

_FORMAT = 1
_MAGIC = b"kindler checkpoint\n"
_LENGTH = struct.Struct("<Q")
_START = len(_MAGIC) + _LENGTH.size
_HASH_BYTES = 32


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over because it is not whole."""


class Damaged(Exception):
    """Why bytes are not a whole checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a checkpoint says of itself.

    Attributes:
        framework: The framework whose state it holds.
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
        step_in_epoch: Steps made of the epoch; 0 when the epoch is over.
        run: The run that wrote it.
        first_epoch: Epochs that were over when the run began.
        first_step: Steps that had been made by then.
        counts: Rows of each lane.
        marks: What tells them from other rows.
        lanes: How many lanes rows were dealt to, before small ones were joined; 0 where they were not.
        workers: How many ranks there were when rows were first dealt like that.
        batch_size: Rows of one step over all ranks.
        steps_per_epoch: Steps of an epoch; None is one pass.
        seed: Decides the order of rows, and dropout.
        shuffle: Whether rows are reordered each epoch.
        seconds: How long the unfinished epoch has taken so far.
        rows: The run's rows of the history.
        stopped: Why the run ended before its last epoch, if it did.
        callbacks: For each callback its class's name and its state.
    """

    framework: str
    epoch: int
    step: int
    step_in_epoch: int = 0
    run: str = ""
    first_epoch: int = 0
    first_step: int = 0
    counts: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()
    lanes: int = 0
    workers: int = 0
    batch_size: int = 0
    steps_per_epoch: int | None = None
    seed: int = 0
    shuffle: bool = True
    seconds: float = 0.0
    rows: tuple[Mapping[str, Any], ...] = ()
    stopped: str | None = None
    callbacks: tuple[Mapping[str, Any], ...] = ()

    @property
    def ends_epoch(self) -> bool:
        """Whether it lies between two epochs."""
        return self.step_in_epoch == 0

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures of the last whole epoch."""
        return self.rows[-1] if self.rows else {}


@dataclass(frozen=True)
class Checkpoint:
    """A whole one.

    Attributes:
        header: What it says of itself.
        state: What every replica loads.
        local_states: What each rank loads besides, in the middle of an epoch.
        path: Where it was read.
    """

    header: Header
    state: bytes = field(repr=False)
    local_states: tuple[bytes, ...] = field(default=(), repr=False)
    path: str = ""


def pack(header: Header, state: Sequence[Piece], local_states: Sequence[bytes] = ()) -> list[Piece]:
    """A checkpoint as the pieces of its file; the state is in pieces already."""
    sizes = [sum(memoryview(piece).nbytes for piece in state), *(len(local) for local in local_states)]
    told = json.dumps({"format": _FORMAT, **asdict(header), "sizes": sizes}).encode()
    pieces: list[Piece] = [_MAGIC, _LENGTH.pack(len(told)), told, *state, *local_states]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return [*pieces, digest.digest()]


def is_checkpoint(data: bytes) -> bool:
    """Whether a file that begins so is a checkpoint, perhaps a damaged one."""
    return data.startswith(_MAGIC)


def parse_header(data: bytes) -> tuple[Header, list[int], int]:
    """The header of a file that begins with `data`, the sizes of the buffers after it, and where they begin.

    Raises:
        Damaged: It is no checkpoint, or not one of this version's.
        IndexError: The header is longer than `data`.
    """
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise Damaged("not a checkpoint file")
    if len(data) < _START:
        raise IndexError
    begin = _START + _LENGTH.unpack_from(data, len(_MAGIC))[0]
    if begin > len(data):
        raise IndexError
    try:
        fields = json.loads(data[_START:begin])
        found, sizes = fields.pop("format"), fields.pop("sizes")
        if found != _FORMAT:
            raise Damaged(f"unsupported format {found!r}; this version of Kindler reads {_FORMAT}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        header = Header(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise Damaged(f"invalid header ({exc})") from exc
    return header, sizes, begin


def check(data: bytes, *, verify: bool = True) -> tuple[Header, list[int], int]:
    """As `parse_header`, of a whole file; without `verify` its hash is believed.

    Raises:
        Damaged: It is not one whole checkpoint.
    """
    try:
        header, sizes, begin = parse_header(data)
    except IndexError:
        raise Damaged(f"truncated in its header, after {len(data)} bytes") from None
    expected = begin + sum(sizes) + _HASH_BYTES
    if len(data) != expected:
        raise Damaged(f"its size is {len(data)} bytes, expected {expected}")
    view = memoryview(data)
    if verify and hashlib.sha256(view[:-_HASH_BYTES]).digest() != view[-_HASH_BYTES:]:
        raise Damaged("checksum mismatch")
    return header, sizes, begin


def parse(data: bytes, path: str = "", *, verify: bool = True) -> Checkpoint:
    """The checkpoint in a file's bytes.

    Raises:
        Damaged: They are not one whole checkpoint.
    """
    header, sizes, begin = check(data, verify=verify)
    view, buffers = memoryview(data), []
    for size in sizes:
        buffers.append(bytes(view[begin : begin + size]))
        begin += size
    return Checkpoint(header, buffers[0], tuple(buffers[1:]), path)


def read_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """The checkpoint in a file.

    Raises:
        ConfigError: The file is not a whole checkpoint.
    """
    folder, name = split(path)
    try:
        return parse(folder_at(folder).read(name), str(path))
    except Damaged as exc:
        raise ConfigError(
            f"{path} is not a complete checkpoint: {exc}.\nHint: load weights that save() wrote with load()."
        ) from exc


def write_checkpoint(path: str | PathLike[str], header: Header, state: bytes) -> None:
    """Put a checkpoint at `path`, whole or not at all."""
    folder, name = split(path)
    folder_at(folder).write(name, pack(header, [state]))
