"""The contract of a backend of shards: `kindler.xshards` knows no more of either one than this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from kindler.data.shards.codec import Info, Packed
from kindler.data.shards.frames import Aggregate, MergeNames
from kindler.errors import ConfigError, KindlerError, revive, worker_error

Work: TypeAlias = Callable[[int, Packed], Packed]
"""Number and shard -> the new shard. Pickles."""

Cut: TypeAlias = Callable[[int, Packed], Iterable[tuple[int, Packed]]]
"""Number and shard -> pieces, and the new shard that each is for. Pickles."""


class ShardBackend(Protocol):
    """Shards in one home. No method changes them; new ones are in the same home.

    `kindler.testing.shards` has its tests.
    """

    home: str

    @property
    def infos(self) -> tuple[Info, ...]:
        """What each shard is."""

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

    def sorted_rows(self, names: Sequence[str], ascending: Sequence[bool]) -> ShardBackend:
        """The rows of all frames in order; equal rows stay as they were, and nulls come last."""

    def distinct(self) -> ShardBackend:
        """Each row of all frames once, where it is first."""

    def grouped(self, keys: Sequence[str], wanted: Sequence[Aggregate], *, join: bool) -> ShardBackend:
        """A row for each group, in the order of the keys; with `join`, all rows with their group's values."""

    def merged(self, right: Any, how: str, names: MergeNames) -> ShardBackend:
        """Rows of both sides whose keys are equal, in the order of the left ones; a null equals nothing."""

    def described(self, names: Sequence[str]) -> Any:
        """What pandas' `describe` says of numeric columns, over all shards."""

    def schema(self) -> pa.Schema:
        """The plain schema of frames, all shards together."""

    def spark_frame(self) -> Any:
        """The rows of frames as a Spark DataFrame."""

    def keep(self) -> None:
        """Keep the values from now on."""

    def free(self) -> None:
        """Let go of the values."""


def unsendable(problem: BaseException) -> ConfigError:
    """The error to raise for a function that does not pickle."""
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
