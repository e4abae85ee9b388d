"""Which nodes a cluster has, and the variables by which programs of each framework find the others."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from kindler.engine.job import GangMember, RankSpec, cluster_spec
from kindler.errors import ConfigError

FRAMEWORKS = ("tensorflow", "torch", "jax")
TRAINING = ("chief", "worker")  # the roles that train, and are fed
_TARGET = "kindler.cluster.node:run_node"


def ranks(
    *,
    workers: int,
    ps: int,
    chief: bool,
    evaluator: bool,
    until: str,
    evaluator_grace_s: float,
    fed: bool,
    tensorboard: bool,
) -> tuple[RankSpec, ...]:
    """Training nodes come first, the chief before all, so that ranks equal worker numbers.

    The first port is the program's, the second the feed's, and the first node's last TensorBoard's.
    """
    for name, value, least in (("workers", workers, 1), ("ps", ps, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}: {name} must be a whole number, {least} or more.")
    if until not in ("workers", "chief"):
        raise ConfigError(f"until={until!r}: it is 'workers' or 'chief'.")
    if until == "chief" and not chief:
        raise ConfigError("until='chief' needs chief=True.")
    grace_s = evaluator_grace_s
    if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 <= grace_s < math.inf:
        raise ConfigError(f"evaluator_grace_s={grace_s!r}: it must be a number of seconds, 0 or more.")
    training = ("chief",) * chief + ("worker",) * (workers - chief)
    roles = (*training, *("ps",) * ps, *("evaluator",) * evaluator)
    return tuple(
        RankSpec(
            target=_TARGET,
            role=role,
            ports=1 + (fed and role in TRAINING) + (tensorboard and rank == 0),
            service=role not in TRAINING or (until == "chief" and role != "chief"),
            grace_s=grace_s if role == "evaluator" else 0.0,
        )
        for rank, role in enumerate(roles)
    )


Members = Sequence[GangMember]


def variables(members: Members, rank: int, framework: str | None) -> dict[str, str]:
    if framework is None:
        return {}
    if framework == "tensorflow":
        return {"TF_CONFIG": tf_config(members, rank)}
    training = [member.rank for member in members if member.role in TRAINING]
    first, host, size = members[0], members[rank].host, str(len(training))
    if framework == "jax":
        meeting = {"JAX_COORDINATOR_ADDRESS": coordinator(members), "JAX_NUM_PROCESSES": size}
        return {**meeting, "JAX_PROCESS_ID": str(rank)} if rank in training else meeting
    meeting = {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.ports[0])}
    if rank not in training:
        return meeting
    neighbours = [other for other in training if members[other].host == host]
    return {
        **meeting,
        "RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(neighbours.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
    }


def tf_config(members: Members, rank: int) -> str:
    """TensorFlow's description of the cluster for one node; it must not list the evaluator.

    >>> members = [GangMember(0, "chief", 0, "a", "10.0.0.1", (4000,))]
    >>> tf_config(members, 0)
    '{"cluster": {"chief": ["10.0.0.1:4000"]}, "task": {"type": "chief", "index": 0}}'
    """
    spec = {role: places for role, places in cluster_spec(members).items() if role != "evaluator"}
    me = members[rank]
    return json.dumps({"cluster": spec, "task": {"type": me.role, "index": me.index}})


def coordinator(members: Members) -> str:
    return members[0].endpoints[0]
