"""Which ranks share memory, and which of them speak for their host: decided from the hosts' names alone."""

from __future__ import annotations

from collections.abc import Sequence


class Topology:
    """One rank's view of who is where; every rank computes the same leaders.

    Args:
        keys: A name for each rank; ranks of one name share memory.
        rank: This rank.

    Attributes:
        ranks: The ranks that share memory with this one, itself included.
        leaders: The first rank of each name, in rank order; they speak to each other.
        leader_of: For each rank, the place of its leader among `leaders`.

    >>> view = Topology(["a", "b", "a"], rank=2)
    >>> view.ranks, view.leaders, view.leader_of
    ((0, 2), (0, 1), (0, 1, 0))
    """

    def __init__(self, keys: Sequence[str], rank: int) -> None:
        self.rank = rank
        self.ranks = tuple(other for other, key in enumerate(keys) if key == keys[rank])
        self.leaders = tuple(other for other, key in enumerate(keys) if keys.index(key) == other)
        self.leader_of = tuple(self.leaders.index(keys.index(key)) for key in keys)
        self.size = len(keys)

    @classmethod
    def of(cls, hosts: Sequence[str], rank: int, *, shared_memory: bool) -> Topology:
        """Ranks of one host share memory, or none do."""
        return cls(hosts if shared_memory else [str(other) for other in range(len(hosts))], rank)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.ranks[0] == self.rank

    @property
    def one_host(self) -> bool:
        """Whether all ranks share memory."""
        return len(self.leaders) == 1

    @property
    def any_shared(self) -> bool:
        """Whether any ranks share memory, these or others: then all ranks meet to set it up."""
        return len(self.leaders) < self.size
