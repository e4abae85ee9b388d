"""How many workers Orca's `workers_per_node` are."""

from __future__ import annotations

from kindler.compat.zoo.orca.errors import InvalidInput
from kindler.spark.session import running
from kindler.spark.versions import is_connect

__all__ = ["workers_of"]


def workers_of(per_node: int) -> int | None:
    """The number of workers: so many on each node, of which a local session has one.

    None, one a slot of Spark, where the number of nodes of a cluster is not known.

    Raises:
        InvalidInput: It is not a number of workers.
    """
    if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1:
        raise InvalidInput(f"workers_per_node must be at least 1; received {per_node!r}.")
    session = running()
    if session is None:
        return per_node
    if is_connect(session):
        return None if per_node == 1 else per_node
    conf = session.sparkContext.getConf()
    if conf.get("spark.master", "local").startswith("local"):
        return per_node
    nodes = conf.get("spark.executor.instances")
    return None if nodes is None else per_node * int(nodes)
