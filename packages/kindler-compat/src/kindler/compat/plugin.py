"""The frameworks that this distribution adds to Kindler's table, as any plug-in may. Loads none of them."""

from __future__ import annotations

from kindler.frameworks.registry import FrameworkSpec

TF_GRAPH = FrameworkSpec(
    name="tf_graph",
    target="kindler.compat.frameworks.tf_graph.replica:GraphReplica",
    package="tensorflow",
    extra="tensorflow",
    preload="kindler.compat.frameworks.tf_graph.replica:preload",
    live=True,
    gpus=True,
)
MXNET = FrameworkSpec(
    name="mxnet",
    target="kindler.compat.frameworks.mxnet.replica:MxnetReplica",
    package="mxnet",
    extra="mxnet",
    preload="kindler.compat.frameworks.mxnet.replica:preload",
)
