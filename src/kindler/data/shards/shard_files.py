"""Shards as files of this machine: a folder that goes away with the last one who holds it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from kindler import temporary
from kindler.data.shards.codec import Info, Packed, read, write
from kindler.errors import ConfigError


class ShardFolder:
    """A temporary folder of this process; deleted when nobody refers to it, and when the process ends."""

    def __init__(self) -> None:
        made = temporary.Folder("kindler-shards-")
        self.path = made.path
        self._finalizer = weakref.finalize(self, made.remove)

    def delete(self) -> None:
        """Delete it now."""
        self._finalizer()


def shard_path(folder: str | os.PathLike[str], number: int) -> Path:
    """Where a shard is kept."""
    return Path(folder) / f"{number:06d}.shard"


class StoredShards:
    """Shards that lie in files: `infos` says what they are, `load` maps them."""

    def __init__(self, folder: ShardFolder, infos: Sequence[Info]) -> None:
        self.folder = folder
        self.infos = tuple(infos)
        self.freed = False

    @staticmethod
    def of(shards: Iterable[Packed]) -> StoredShards:
        """Write shards one after the other."""
        folder = ShardFolder()
        infos = []
        try:
            for number, packed in enumerate(shards):
                write(packed, shard_path(folder.path, number))
                infos.append(packed.info)
                del packed  # before the next one is made
        except BaseException:
            folder.delete()
            raise
        pa.default_memory_pool().release_unused()  # Arrow would keep the size of a few shards
        return StoredShards(folder, infos)

    def load(self, number: int) -> Packed:
        """One shard, mapped."""
        self.load_check()
        return read(self.infos[number], shard_path(self.folder.path, number))

    def load_check(self) -> None:
        """Raise when the shards were freed."""
        if self.freed:
            raise ConfigError(
                "these shards were freed by uncache().\n"
                "Hint: keep what you need later, or create the collection again."
            )

    def free(self) -> None:
        """Delete the files."""
        self.freed = True
        self.folder.delete()
