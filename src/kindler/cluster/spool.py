"""Blocks of rows on a node's disk, for a feed that the program reads several times: validation data."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from kindler.engine.frames import Piece
from kindler.errors import naming_full_disk

_SIZES = struct.Struct("!QQ")


class BlockFile:
    """Appends blocks, and reads them back in the same order. Each block has two buffers.

    Args:
        path: The file; it is made with the first block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, block: Sequence[Piece]) -> None:
        """Add a block at the end."""
        head, body = (memoryview(buffer).cast("B") for buffer in block)
        with naming_full_disk(self._path, head.nbytes + body.nbytes), self._path.open("ab") as file:
            file.write(_SIZES.pack(head.nbytes, body.nbytes))
            file.write(head)
            file.write(body)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            while sizes := file.read(_SIZES.size):
                first, second = _SIZES.unpack(sizes)
                yield file.read(first), file.read(second)
