"""The format of checkpoint files, and the check that one is complete.

    magic | length of the header | header (JSON) | the model's state | ranks' own states | SHA-256 of all that

Ranks have states of their own only in the middle of an epoch. Reading executes no code. `checkpoint_dir.py`
decides which checkpoints to keep, `files.py` reads and writes the bytes.
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
from kindler.files import folder_at, split

Piece: TypeAlias = "bytes | memoryview"

_FORMAT = 1
_MAGIC = b"kindler checkpoint\n"
_LENGTH = struct.Struct("<Q")
_START = len(_MAGIC) + _LENGTH.size
_HASH_BYTES = 32


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped."""


class Damaged(Exception):
    """The bytes are not a complete checkpoint; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a checkpoint.

    Attributes:
        framework: The framework whose state it holds.
        epoch: Epochs begun since the model was created.
        step: Optimizer steps since the model was created.
        step_in_epoch: Steps made in the epoch; 0 between epochs.
        run: The id of the run that wrote it.
        first_epoch: Epochs that had ended when the run began.
        first_step: Steps that had been made when the run began.
        counts: Rows of each lane.
        marks: Fingerprints of the rows of each lane.
        lanes: Lanes that rows were dealt to, before small ones were joined; 0 if they were not dealt.
        workers: The number of ranks when rows were first dealt like this.
        batch_size: Rows per step over all ranks.
        steps_per_epoch: Steps per epoch; None is one pass over the rows.
        seed: The seed of the row order and of dropout.
        shuffle: Whether rows are reordered each epoch.
        seconds: Duration of the unfinished epoch so far.
        rows: The run's rows of the history.
        stopped: Why the run ended before its last epoch, or None.
        callbacks: The class name and state of each callback.
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
        """Whether it was written between two epochs."""
        return self.step_in_epoch == 0

    @property
    def figures(self) -> Mapping[str, Any]:
        """The metrics of the last complete epoch."""
        return self.rows[-1] if self.rows else {}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        header: Its header.
        state: The state that every replica loads.
        local_states: A further state for each rank, in the middle of an epoch.
        path: The file it was read from.
    """

    header: Header
    state: bytes = field(repr=False)
    local_states: tuple[bytes, ...] = field(default=(), repr=False)
    path: str = ""


def pack(header: Header, state: Sequence[Piece], local_states: Sequence[bytes] = ()) -> list[Piece]:
    """The bytes of a checkpoint file, in pieces; the state comes in pieces already."""
    sizes = [sum(memoryview(piece).nbytes for piece in state), *(len(local) for local in local_states)]
    head = json.dumps({"format": _FORMAT, **asdict(header), "sizes": sizes}).encode()
    pieces: list[Piece] = [_MAGIC, _LENGTH.pack(len(head)), head, *state, *local_states]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return [*pieces, digest.digest()]


def is_checkpoint(data: bytes) -> bool:
    """Whether a file that begins with `data` is a checkpoint, possibly a damaged one."""
    return data.startswith(_MAGIC)


def parse_header(data: bytes) -> tuple[Header, list[int], int]:
    """The header of a file that begins with `data`, the sizes of the buffers after it, and where they begin.

    Raises:
        Damaged: It is not a checkpoint, or of another format version.
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
        version, sizes = fields.pop("format"), fields.pop("sizes")
        if version != _FORMAT:
            raise Damaged(f"unsupported format {version!r}; this version of Kindler reads {_FORMAT}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        header = Header(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise Damaged(f"invalid header ({exc})") from exc
    return header, sizes, begin


def check(data: bytes, *, verify: bool = True) -> tuple[Header, list[int], int]:
    """`parse_header` of a complete file; without `verify` the checksum is not computed.

    Raises:
        Damaged: It is not a complete checkpoint.
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
        Damaged: They are not a complete checkpoint.
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
        ConfigError: The file is not a complete checkpoint.
    """
    folder, name = split(path)
    try:
        return parse(folder_at(folder).read(name), str(path))
    except Damaged as exc:
        raise ConfigError(
            f"{path} is not a complete checkpoint: {exc}.\nHint: load weights that save() wrote with load()."
        ) from exc


def write_checkpoint(path: str | PathLike[str], header: Header, state: bytes) -> None:
    """Write a checkpoint to `path`, atomically."""
    folder, name = split(path)
    folder_at(folder).write(name, pack(header, [state]))
