"""A worker's view of its run: who it is, and its way to the other workers and to the driver.

The engine implements it (`engine/worker.py`); `kindler.testing` has one with processes and one with threads.
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

    An implementation sets the attributes and provides `gather`, `links` and what else its users call. Where
    ranks exchange something, all make the same calls in the same order; if a rank does not come, the others
    raise SyncTimeoutError.

    Attributes:
        rank: Its number, from 0.
        size: The number of workers, not counting ranks that only serve them, such as parameter servers.
        host: Its machine.
        hosts: The machine of every worker.
        local_rank: Its number among those on the same machine.
        local_size: The number of ranks on this machine.
        address: The IP address at which the other workers reach it.
        members: Role, machine, address and held ports of every rank.
        threads: The number of compute threads.
        scratch: Its own folder, deleted with the run.
        run_id: The run's name.
        secret: What members of this run authenticate with.
        port_range: The ports that may be listened on; None is any.
        lost: Ranks that died while the others continued, as of the last gather.
        outlives: Whether ranks continue without each other (`become_optional`).
        replaceable: Whether another process takes the place of a rank that dies; see `opened`.
        regroups: Whether a process takes its place while the others keep theirs; see `regroup`.
        absent: Ranks that died since the last `regroup`.
        waiting: Whether this rank waits for others; exchanges set it.
        moves: Whether other processes go on from where `go_on` has returned False.
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
    regroups: bool = False
    absent: frozenset[int] = frozenset()
    waiting: bool = False
    moves: bool = False

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        """Return the bytes of these ranks, possibly none; all ranks call it together."""
        raise NotImplementedError

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank. If only some are needed, `gather` moves less."""
        gathered = self.gather(data, range(self.size))
        return [gathered[rank] for rank in range(self.size)]

    def to_first(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks on the first one, an empty list on the others. All ranks call it."""
        gathered = self.gather(data, range(self.size) if self.rank == 0 else ())
        return [gathered[rank] for rank in sorted(gathered)]

    def from_first(self, data: bytes) -> bytes:
        """Return the first rank's bytes. All ranks call it together."""
        return self.gather(data if self.rank == 0 else b"", [0])[0]

    def merged_by_first(
        self, mine: bytes, merge: Callable[[Sequence[bytes]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return all ranks' bytes, merged by the first one into a dict of JSON values. All ranks call it."""
        if self.outlives:  # the first one may die: every rank merges what came
            return merge([part for part in self.all_gather(mine) if part])
        parts = self.to_first(mine)
        merged: dict[str, Any] = json.loads(
            self.from_first(json.dumps(merge(parts)).encode() if self.rank == 0 else b"")
        )
        return merged

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over ranks of these integers. All ranks call it together."""
        rows = [json.loads(part) for part in self.all_gather(json.dumps(list(numbers)).encode())]
        return [sum(column) for column in zip(*rows, strict=True)]

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        """Return the weighted mean over ranks of flat float arrays. All ranks call it together.

        A rank of weight 0 is ignored, whatever its arrays hold; zeros if all weights are 0.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather(b"", ())

    @property
    def leads(self) -> bool:
        """Whether this is the first of the remaining ranks, as of the last gather."""
        return self.rank == min(set(range(self.size)) - self.lost, default=0)

    def links(self, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
        """Return an authenticated connection to each of the ranks `peers`. All ranks call it together.

        Naming a peer is mutual. The caller closes the sockets.

        Raises:
            SyncError: Some peer did not come, or cannot be reached.
        """
        raise NotImplementedError

    def call(self, rank: int, timeout_s: float) -> socket.socket:
        """Connect to a rank that answers calls on its held port; the caller closes the socket.

        Raises:
            SyncError: It does not answer, or not as a member of this run.
        """
        raise NotImplementedError

    def answer_calls(self, take: Callable[[int, socket.socket], None], check: Callable[[], None]) -> None:
        """Admit members of this run on the held port, until `check` raises.

        Args:
            take: Gets the caller's rank and the connection, on its own thread.
            check: Called several times a second; raises to end it.
        """
        raise NotImplementedError

    def become_optional(self) -> None:
        """Let the others continue if this rank's process dies; gathers then have no bytes from it."""
        raise NotImplementedError

    def opened(self) -> bytes:
        """Return what this rank kept before its process was replaced; empty in a first process.

        All replaceable ranks call it once, when they are prepared. A replacement process makes the same
        gathers up to here; then gathers continue from where `keep` was called.
        """
        return b""

    def regroup(self, timeout_s: float) -> bool:
        """After a failed exchange: meet the others again, with replacements for the ranks that have died.

        A replacement makes the same gathers as its predecessor up to `opened`, which then waits for all and
        does not return empty. From here on all ranks make the same calls again.

        Args:
            timeout_s: How long to wait for the news that a rank has died.

        Returns:
            False if none has, or if none is replaced.
        """
        return False

    def resumed(self) -> None:
        """Say that all ranks can go on after `regroup`, once one of them knows it."""

    def forgo_regroup(self) -> None:
        """Let the loss of a rank end the run; instead of `opened`, on all ranks."""

    def keep(self, data: bytes) -> None:
        """Let a replacement for this process continue from here, with these bytes."""

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
        """Whether to begin the step of this number; False after an interrupt, or if the run `moves`.

        Args:
            number: The step's, or the epoch's if ranks do not meet in steps. Numbers grow.
            whole: Whether to still do the last number that any rank has begun.
        """
        return True

    def tick(self) -> None:
        """Report progress; a gang in which no rank does so for too long is stalled."""

    def report(self, kind: str, **fields: Any) -> None:
        """Send the driver a report, as JSON."""
