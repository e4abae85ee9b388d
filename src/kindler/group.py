"""The one object that a worker has of its run: who it is, and its way to the other workers and to the driver.

The engine implements it (`engine/worker.py`); `kindler.testing` has one whose ranks are processes and one
whose ranks are threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

    from kindler.collective import Array
    from kindler.engine.job import GangMember
    from kindler.engine.placement import Placement


class Group:
    """One worker's end of a run.

    An implementation sets the attributes and has `gather`, `links` and what else its users call. Where ranks
    exchange something, all of them make the same calls in the same order; a rank that does not come makes the
    others raise SyncTimeoutError.

    Attributes:
        rank: Its number, from 0.
        size: How many workers there are, without ranks that only serve them, such as parameter servers.
        host: Its machine.
        hosts: The machine of every worker.
        local_rank: Its number among those of the same machine.
        local_size: How many are on this machine.
        address: The IP address under which the other workers reach it.
        members: The role, machine, address and held ports of every rank.
        threads: How many threads it computes with.
        scratch: A folder of its own that goes away with the run.
        run_id: The run's name.
        secret: What members of this run prove themselves with.
        port_range: The ports that may be listened on; None is any.
        lost: The ranks that have gone while the others went on, as the last gather found it.
        outlives: Whether ranks go on without each other (`become_optional`).
        replaceable: Whether another process takes the place of a rank that dies; see `opened`.
        waiting: Whether this rank waits for others; exchanges set it.
    """

    rank: int
    size: int
    host: str
    hosts: tuple[str, ...]
    local_rank: int
    local_size: int
    address: str
    members: tuple[GangMember, ...]
    threads: int
    scratch: Path
    run_id: str
    secret: bytes
    port_range: tuple[int, int] | None
    lost: frozenset[int] = frozenset()
    outlives: bool = False
    replaceable: bool = False
    waiting: bool = False

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        """The bytes of the ranks named here, which may be none; all ranks call it together."""
        raise NotImplementedError

    def all_gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank. Where a rank needs only some of them, `gather` moves less."""
        gathered = self.gather(data, range(self.size))
        return [gathered[rank] for rank in range(self.size)]

    def to_first(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, on the first one; an empty list on the others. All ranks call it."""
        gathered = self.gather(data, range(self.size) if self.rank == 0 else ())
        return [gathered[rank] for rank in sorted(gathered)]

    def from_first(self, data: bytes) -> bytes:
        """The first rank's bytes. All ranks call it together."""
        return self.gather(data if self.rank == 0 else b"", [0])[0]

    def merged_by_first(
        self, mine: bytes, merge: Callable[[Sequence[bytes]], dict[str, Any]]
    ) -> dict[str, Any]:
        """All ranks' bytes, merged by the first one into a dict of JSON values. All ranks call it."""
        if self.outlives:  # the first one may die: every rank merges what came
            return merge([part for part in self.all_gather(mine) if part])
        parts = self.to_first(mine)
        merged: dict[str, Any] = json.loads(
            self.from_first(json.dumps(merge(parts)).encode() if self.rank == 0 else b"")
        )
        return merged

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sums over ranks of as many whole numbers on each. All ranks call it together."""
        rows = [json.loads(part) for part in self.all_gather(json.dumps(list(numbers)).encode())]
        return [sum(column) for column in zip(*rows, strict=True)]

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        """The mean over ranks of flat arrays of floats, made where ranks meet. All ranks call it together.

        A rank of weight 0 counts for nothing, whatever its arrays hold; zeros where no rank weighs anything.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(b"", ())

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks that are left, as the last gather found it."""
        return self.rank == min(set(range(self.size)) - self.lost, default=0)

    def links(self, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
        """An authenticated connection to each of the ranks `peers`. All ranks call it together.

        If one rank names another, that one names it too. The sockets are the caller's to close.

        Raises:
            SyncError: Some peer did not come, or cannot be reached.
        """
        raise NotImplementedError

    def call(self, rank: int, timeout_s: float) -> socket.socket:
        """An authenticated connection to a rank that answers calls on its held port; the caller closes it.

        Raises:
            SyncError: It does not answer, or not as a member of this run.
        """
        raise NotImplementedError

    def answer_calls(self, take: Callable[[int, socket.socket], None], check: Callable[[], None]) -> None:
        """Let in members of this run on the held port, until `check`, called several times a second, raises.

        Args:
            take: Gets the caller's rank and the connection, on a thread of its own.
            check: Raises to end it.
        """
        raise NotImplementedError

    def become_optional(self) -> None:
        """From now on the others go on when this rank's process dies; gathers have no bytes of it then."""
        raise NotImplementedError

    def opened(self) -> bytes:
        """What this rank had kept before its process died and this one took its place; empty in a first one.

        All ranks that can be replaced call it once, when they have prepared themselves. A process that takes
        the place of another one makes the same gathers until here; then gathers go on from where `keep` was
        called.
        """
        return b""

    def keep(self, data: bytes) -> None:
        """From now on, a process that takes the place of this one goes on from here, with these bytes."""

    def place(self, device: str, *, share: bool) -> Placement:
        """Take a GPU of this machine, or none, for this process.

        Args:
            device: "auto", "cpu", "cuda" or "cuda:N".
            share: Whether workers may share a GPU.

        Raises:
            ConfigError: There is no such GPU.
        """
        raise NotImplementedError

    def go_on(self, number: int, *, whole: bool = True) -> bool:
        """Before each step: whether to make the step of this number; not after the user has interrupted.

        Args:
            number: The step's, or the epoch's where ranks do not meet in steps. Numbers grow.
            whole: Whether what has the last number that any rank has begun is still done.
        """
        return True

    def tick(self) -> None:
        """Say that this rank got further; a gang in which none does so for too long is stalled."""

    def report(self, kind: str, **fields: Any) -> None:
        """Tell the driver something, as JSON."""
