"""The contract of a shard backend, and shards as local files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from kindler import temporary
from kindler.data.shards.codec import Info, Packed
from kindler.errors import ConfigError, KindlerError, revive, worker_error

Work: TypeAlias = Callable[[int, Packed], Packed]
"""Number and shard -> the new shard. Pickles."""

Query: TypeAlias = Literal["sorted_rows", "distinct", "grouped", "merged"]

Cut: TypeAlias = Callable[[int, Packed], Iterable[tuple[int, Packed]]]
"""Number and shard -> pieces, and the new shard that each is for. Pickles."""


class ShardBackend(Protocol):
    """Shards on one engine: this machine or Spark. No method changes them; new ones are on the same engine.

    `kindler.testing.shards` tests this contract.
    """

    engine: str

    @property
    def infos(self) -> tuple[Info, ...]: ...

    @property
    def is_kept(self) -> bool:
        """Whether the values are stored and need not be recomputed."""

    def load(self, numbers: Sequence[int]) -> Iterator[Packed]:
        """Yield shards in the requested order."""

    def mapped(self, work: Work, *, by_user: bool = False) -> ShardBackend:
        """Map each shard to a new one; `by_user` if `work` runs user code."""

    def exchanged(self, cut: Cut, count: int) -> ShardBackend:
        """Make `count` new shards from pieces of the old, which come in the order of their shards."""

    def zipped(self, other: Any) -> ShardBackend:
        """Pair shards of the same number; `other` is of the same engine."""

    def queried(self, operation: Query, *arguments: Any) -> ShardBackend:
        """Apply a function of `frames` to the rows of all frames.

        A collection among the arguments is of the same engine.
        """

    def described(self, names: Sequence[str]) -> Any:
        """pandas' `describe` of numeric columns, over all shards."""

    def spark_frame(self) -> Any: ...

    def keep(self) -> None: ...

    def free(self) -> None: ...


def unsendable(problem: BaseException) -> ConfigError:
    return ConfigError(
        f"transform_shard: the function or its arguments cannot be sent to workers: {problem}\n"
        "Hint: open files and connections and make locks inside the function."
    )


def shard_error(said: dict[str, Any], shard: int) -> KindlerError:
    own = revive(said["types"][0], said["message"], said.get("own", {}))
    return own or worker_error(
        types=said["types"],
        message=said["message"],
        traceback=said["traceback"],
        rank=shard,
        host=said["host"],
        shard=shard,
        fields=said.get("fields"),
    )


class ShardFolder:
    """A temporary folder, deleted when no longer referenced and at process exit."""

    def __init__(self) -> None:
        made = temporary.Folder("kindler-shards-")
        self.path = made.path
        self._finalizer = weakref.finalize(self, made.remove)

    def delete(self) -> None:
        self._finalizer()


def shard_path(folder: str | os.PathLike[str], number: int) -> Path:
    return Path(folder) / f"{number:06d}.shard"
