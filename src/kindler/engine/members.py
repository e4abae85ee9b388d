"""Who is in a gang and where: what the meeting tells every rank, and what the driver knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kindler.engine.address import own_address


@dataclass(frozen=True, slots=True)
class GangMember:
    """One rank of a gang.

    Attributes:
        rank: Its number in the gang.
        role: Its role.
        index: Its number among the ranks of that role.
        host: The name of its machine.
        address: The IP address under which the other ranks reach it.
        ports: The ports held for its program.
        outside_address: The IP address under which machines that are not of the gang reach it.
    """

    rank: int
    role: str
    index: int
    host: str
    address: str
    ports: tuple[int, ...] = ()
    outside_address: str = field(default="", compare=False)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """ "address:port" for each held port."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return tuple(f"{address}:{port}" for port in self.ports)


def members_of(
    roles: Sequence[str],
    hosts: Sequence[str],
    addresses: Sequence[str],
    ports: Sequence[Sequence[int]],
) -> tuple[GangMember, ...]:
    """The members of a gang, from what each rank said when it came.

    Args:
        roles: By rank.
        hosts: By rank.
        addresses: The address from which each rank reaches the meeting point.
        ports: By rank; empty where no rank holds any.
    """
    made: list[GangMember] = []
    counts: dict[str, int] = {}
    machines = set(hosts)
    for rank, (role, host, seen) in enumerate(zip(roles, hosts, addresses, strict=True)):
        index = counts[role] = counts.get(role, -1) + 1
        held = tuple(ports[rank]) if ports else ()
        made.append(GangMember(rank, role, index, host, own_address(machines, seen=seen), held, seen))
    return tuple(made)


def cluster_spec(members: Sequence[GangMember]) -> dict[str, list[str]]:
    """Role -> "address:port" of its ranks in the order of their index, as TensorFlow's cluster spec has it.

    >>> chief = GangMember(0, "chief", 0, "a", "10.0.0.1", (4000,))
    >>> worker = GangMember(1, "worker", 0, "b", "10.0.0.2", (4000, 4001))
    >>> cluster_spec([chief, worker])
    {'chief': ['10.0.0.1:4000'], 'worker': ['10.0.0.2:4000']}
    """
    spec: dict[str, list[str]] = {}
    for member in members:
        if member.ports:
            spec.setdefault(member.role, []).append(member.endpoints[0])
    return spec
