"""What the ranks of a gang do, built on the driver and pickled once; and who is in a gang and where."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kindler.config import RunSettings
from kindler.engine.placement import own_address, program_path
from kindler.errors import ConfigError


def new_run_id() -> str:
    return secrets.token_hex(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    target: str  # "module:function", called as `function(worker, *buffers)`; it returns buffers
    role: str = "worker"  # what the rank is to the others: "worker", "chief", "ps", "evaluator", "server",
    # Variables of its process. They are set when the process is forked; what a library reads while it is
    # imported belongs in `Job.environment`.
    environment: Mapping[str, str] = field(default_factory=dict)
    ports: int = 0  # how many TCP ports to hold for the program that runs there
    # Whether it serves the others and has no end of its own: it is stopped as soon as every other rank has a
    # result, and needs none itself.
    service: bool = False
    # Of a service: how long it may go on once every other rank has a result, to return by itself;
    # `worker.others_ended` says so.
    grace_s: float = 0.0
    # Whether it runs beside the others: it takes no slot of the cluster (it runs where ranks meet: at the
    # driver, or with the first rank where that is out of reach) and no part in gathers, and `worker.size`
    # does not count it. Such ranks are services and come last.
    beside: bool = False


def equal_ranks(target: str, count: int) -> tuple[RankSpec, ...]:
    return (RankSpec(target=target),) * count


@dataclass(frozen=True, kw_only=True)
class Job:
    ranks: tuple[RankSpec, ...]  # what each rank does, by rank
    buffers: tuple[bytes, ...] = ()  # the arguments of every rank's target
    run_id: str = field(default_factory=new_run_id)
    # What members prove themselves with.
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    preload: tuple[str, ...] = ()  # what the fork server has imported before a worker is forked
    environment: tuple[tuple[str, str], ...] = ()  # variables that must be set before those imports
    settings: RunSettings = field(default_factory=RunSettings)  # time limits
    # Compute threads of each worker; None shares the machine's cores among its workers.
    threads: int | None = None
    # How many of a machine's cores the run may use; None is all that processes may use there.
    cores: int | None = None
    # The driver's folder, for user modules that are found relative to it.
    cwd: str = field(default_factory=os.getcwd)
    sys_path: tuple[str, ...] = field(default_factory=program_path)  # the driver's module search path
    # Whether all ranks must be started at once and end together. On Spark, others are plain tasks, which it
    # starts when there are slots and starts again when they fail.
    together: bool = True
    # Whether a rank whose process dies is replaced by a new process, which goes on where it had last called
    # `worker.keep`; the others wait for it. Not with `together`, and not for services.
    replaceable: bool = False
    # Whether the ranks end together after a step when one is given notice, so that others can go on there.
    movable: bool = False
    noticed: tuple[str, ...] = ()  # the notices that were heard before, and need not be told again
    # How many processes may be replaced while the others keep theirs and their state: all meet again at once
    # (`worker.regroup`). 0: the loss of one ends the job.
    regroups: int = 0

    def __post_init__(self) -> None:
        if self.replaceable and self.together:
            raise ConfigError("ranks that can be replaced do not all run together: pass together=False, too.")
        if all(spec.service for spec in self.ranks):
            raise ConfigError(
                "a job needs at least one rank that is not a service: services run until it ends."
            )
        if any(not spec.service for spec in self.ranks if spec.beside):
            raise ConfigError("a rank that runs next to the others is a service: pass service=True, too.")
        if any(spec.beside for spec in self.ranks[: self.crew]):
            raise ConfigError("ranks that run next to the others come last.")

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def crew(self) -> int:
        """The number of ranks, not counting those beside."""
        return sum(not spec.beside for spec in self.ranks)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(spec.role for spec in self.ranks)

    @property
    def services(self) -> frozenset[int]:
        return frozenset(rank for rank, spec in enumerate(self.ranks) if spec.service)

    @property
    def graces(self) -> dict[int, float]:
        return {
            rank: spec.grace_s for rank, spec in enumerate(self.ranks) if spec.service and spec.grace_s > 0
        }


@dataclass(frozen=True, slots=True)
class GangMember:
    rank: int  # its number in the gang
    role: str  # its role
    index: int  # its number among the ranks of that role
    host: str  # the name of its machine
    address: str  # the IP address under which the other ranks reach it
    ports: tuple[int, ...] = ()  # the ports held for its program
    # The IP address under which machines that are not of the gang reach it.
    outside_address: str = field(default="", compare=False)

    @property
    def endpoints(self) -> tuple[str, ...]:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return tuple(f"{address}:{port}" for port in self.ports)


def members_of(
    roles: Sequence[str],
    hosts: Sequence[str],
    addresses: Sequence[str],
    ports: Sequence[Sequence[int]],
) -> tuple[GangMember, ...]:
    """Build the members from what each rank said when it joined; `ports` is empty if none holds any."""
    members: list[GangMember] = []
    counts: dict[str, int] = {}
    machines = set(hosts)
    for rank, (role, host, seen) in enumerate(zip(roles, hosts, addresses, strict=True)):
        index = counts[role] = counts.get(role, -1) + 1
        own = tuple(ports[rank]) if ports else ()
        members.append(GangMember(rank, role, index, host, own_address(machines, seen=seen), own, seen))
    return tuple(members)


def cluster_spec(members: Sequence[GangMember]) -> dict[str, list[str]]:
    """Role -> "address:port" of its ranks by index, as in TensorFlow's cluster spec.

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
