"""A small head and large buffers as one run of bytes, without copying the buffers.

magic | length of the head | number of buffers | length of each | head | buffers
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kindler.errors import ConfigError

Buffer: TypeAlias = "bytes | memoryview"

_MAGIC = b"kindler state 1\n"
_NUMBER = struct.Struct("<Q")


def pack(head: bytes, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Pieces for `unpack`."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    numbers = b"".join(_NUMBER.pack(number) for number in (len(head), len(sizes), *sizes))
    return [_MAGIC + numbers + head, *buffers]


def is_packed(data: bytes) -> bool:
    return data[: len(_MAGIC)] == _MAGIC


def unpack(data: bytes) -> tuple[bytes, list[memoryview]]:
    view, at = memoryview(data), len(_MAGIC)
    try:
        length, count = (_NUMBER.unpack_from(view, at + i * _NUMBER.size)[0] for i in range(2))
        at += 2 * _NUMBER.size
        sizes = [_NUMBER.unpack_from(view, at + i * _NUMBER.size)[0] for i in range(count)]
    except struct.error as exc:
        raise ConfigError("this state is incomplete.") from exc
    at += count * _NUMBER.size
    head, at = bytes(view[at : at + length]), at + length
    if not is_packed(data) or at + sum(sizes) != len(view):
        raise ConfigError("this state is incomplete.")
    buffers = []
    for size in sizes:
        buffers.append(view[at : at + size])
        at += size
    return head, buffers


@dataclass(frozen=True)
class ScoringModel:
    """A model for scoring only; `state` holds weights missing from `spec`, `content` is a digest of both."""

    spec: bytes
    state: bytes
    content: str
    of_state: bytes = field(default=b"", repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScoringModel, (self.spec, self.state, self.content)

    @classmethod
    def of(
        cls, spec: bytes, state: bytes, before: ScoringModel | None, *, of_state: bytes = b""
    ) -> ScoringModel:
        """Return `before` if it has the same bytes: comparing costs a tenth of a digest."""
        if before is not None and before.spec == spec and before.state == state:
            return before
        digest = hashlib.blake2b(spec, digest_size=32)
        digest.update(hashlib.blake2b(state).digest())
        return cls(spec, state, digest.hexdigest(), of_state)
