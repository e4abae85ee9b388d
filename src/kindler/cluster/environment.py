"""The variables by which TensorFlow, PyTorch and JAX programs find the other nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from kindler.cluster.roles import TRAINING
from kindler.engine.members import GangMember, cluster_spec

Members = Sequence[GangMember]


def variables(members: Members, rank: int, framework: str | None) -> dict[str, str]:
    """What is set in the environment of a node before any of its program is loaded."""
    return {} if framework is None else _VARIABLES[framework](members, rank)


def tf_config(members: Members, rank: int) -> str:
    """TensorFlow's description of the cluster, for one node; an evaluator is not in it, as TensorFlow wants.

    >>> members = [GangMember(0, "chief", 0, "a", "10.0.0.1", (4000,))]
    >>> tf_config(members, 0)
    '{"cluster": {"chief": ["10.0.0.1:4000"]}, "task": {"type": "chief", "index": 0}}'
    """
    spec = {role: places for role, places in cluster_spec(members).items() if role != "evaluator"}
    me = members[rank]
    return json.dumps({"cluster": spec, "task": {"type": me.role, "index": me.index}})


def coordinator(members: Members) -> str:
    """ "address:port" of the node that the others meet at."""
    return members[0].endpoints[0]


def _of_tensorflow(members: Members, rank: int) -> dict[str, str]:
    return {"TF_CONFIG": tf_config(members, rank)}


def _of_torch(members: Members, rank: int) -> dict[str, str]:
    training = _training(members)
    first = members[0]
    meeting = {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.ports[0])}
    if rank not in training:
        return meeting
    neighbours = [other for other in training if members[other].host == members[rank].host]
    return {
        **meeting,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(training)),
        "LOCAL_RANK": str(neighbours.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
    }


def _of_jax(members: Members, rank: int) -> dict[str, str]:
    training = _training(members)
    meeting = {"JAX_COORDINATOR_ADDRESS": coordinator(members), "JAX_NUM_PROCESSES": str(len(training))}
    return {**meeting, "JAX_PROCESS_ID": str(rank)} if rank in training else meeting


def _training(members: Members) -> list[int]:
    return [member.rank for member in members if member.role in TRAINING]


_VARIABLES: dict[str, Callable[[Members, int], dict[str, str]]] = {
    "tensorflow": _of_tensorflow,
    "torch": _of_torch,
    "jax": _of_jax,
}
FRAMEWORKS = tuple(_VARIABLES)
