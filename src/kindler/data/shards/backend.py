"""The contract of a backend of shards, and shards as files of this machine.

`kindler.xshards` knows no more of either home than this.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa

from kindler import temporary
from kindler.data.shards.codec import Info, Packed
from kindler.errors import ConfigError, KindlerError, revive, worker_error

Work: TypeAlias = Callable[[int, Packed], Packed]
"""Number and shard -> the new shard. Pickles."""

Query: TypeAlias = Literal["sorted_rows", "distinct", "grouped", "merged"]

Cut: TypeAlias = Callable[[int, Packed], Iterable[tuple[int, Packed]]]
"""Number and shard -> pieces, and the new shard that each is for. Pickles."""


class ShardBackend(Protocol):
    """Shards in one home. No method changes them; new ones are in the same home.

    `kindler.testing.shards` has its tests.
    """

    home: str

    @property
    def infos(self) -> tuple[Info, ...]: ...

    @property
    def is_kept(self) -> bool:
        """Whether the values are kept and need not be computed again."""

    def load(self, numbers: Sequence[int]) -> Iterator[Packed]:
        """Some shards, in the order asked for."""

    def mapped(self, work: Work, *, by_user: bool = False) -> ShardBackend:
        """Each shard made into another one; `by_user` where the user's code does it."""

    def exchanged(self, cut: Cut, count: int) -> ShardBackend:
        """`count` new shards of pieces of the old; pieces come in the order of the shards they are of."""

    def zipped(self, other: Any) -> ShardBackend:
        """Pairs of shards of the same number; `other` is of the same home."""

    def queried(self, operation: Query, *arguments: Any) -> ShardBackend:
        """What a function of `frames` makes of the rows of all frames, in the home's own way.

        A collection among the arguments is another one of the same home.
        """

    def described(self, names: Sequence[str]) -> Any:
        """What pandas' `describe` says of numeric columns, over all shards."""

    def schema(self) -> pa.Schema: ...

    def spark_frame(self) -> Any: ...

    def keep(self) -> None: ...

    def free(self) -> None: ...


def unsendable(problem: BaseException) -> ConfigError:
    return ConfigError(
        f"transform_shard: the function or its arguments cannot be sent to workers: {problem}\n"
        "Hint: open files and connections and make locks inside the function."
    )


def shard_error(said: dict[str, Any], shard: int) -> KindlerError:
    """The error to raise for what user code raised on a shard."""
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
    """A temporary folder of this process; deleted when nobody refers to it, and when the process ends."""

    def __init__(self) -> None:
        made = temporary.Folder("kindler-shards-")
        self.path = made.path
        self._finalizer = weakref.finalize(self, made.remove)

    def delete(self) -> None:
        self._finalizer()


def shard_path(folder: str | os.PathLike[str], number: int) -> Path:
    return Path(folder) / f"{number:06d}.shard"
