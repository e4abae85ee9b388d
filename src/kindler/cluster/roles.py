"""Which nodes a cluster has: their roles by rank, checked on the driver before any of them starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kindler.engine.job import RankSpec
from kindler.errors import ConfigError

TRAINING = ("chief", "worker")  # the roles that train, and are fed
_TARGET = "kindler.cluster.node:run_node"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The nodes that were asked for.

    Nodes that train come first, the chief before all, so that ranks and worker numbers are the same; then
    come parameter servers and the evaluator.

    Attributes:
        workers: Nodes that train, the chief included.
        ps: Parameter servers.
        chief: Whether the first node that trains is the chief.
        evaluator: Whether there is an evaluator.
        until: Whose return ends the cluster: that of all "workers", or of the "chief" alone.
        evaluator_grace_s: Seconds for the evaluator to return by itself after that.
    """

    workers: int
    ps: int = 0
    chief: bool = True
    evaluator: bool = False
    until: str = "workers"
    evaluator_grace_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("ps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: {name} must be a whole number, {least} or more.")

        if self.until not in ("workers", "chief"):
            raise ConfigError(f"until={self.until!r}: it is 'workers' or 'chief'.")
        if self.until == "chief" and not self.chief:
            raise ConfigError("until='chief' needs chief=True.")
        grace_s = self.evaluator_grace_s
        if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 <= grace_s < math.inf:
            raise ConfigError(f"evaluator_grace_s={grace_s!r}: it must be a number of seconds, 0 or more.")

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of every rank.

        >>> Layout(workers=2, ps=1).roles
        ('chief', 'worker', 'ps')
        """
        training = ("chief",) * self.chief + ("worker",) * (self.workers - self.chief)
        return (*training, *("ps",) * self.ps, *("evaluator",) * self.evaluator)

    @property
    def size(self) -> int:
        """How many nodes there are."""
        return len(self.roles)

    def ranks(self, *, fed: bool, tensorboard: bool = False) -> tuple[RankSpec, ...]:
        """What each rank does.

        The first port is the program's; one that is fed has a second, and TensorBoard the first node's last.
        """
        return tuple(
            RankSpec(
                target=_TARGET,
                role=role,
                ports=1 + (fed and role in TRAINING) + (tensorboard and rank == 0),
                service=role not in TRAINING or (self.until == "chief" and role != "chief"),
                grace_s=self.evaluator_grace_s if role == "evaluator" else 0.0,
            )
            for rank, role in enumerate(self.roles)
        )
