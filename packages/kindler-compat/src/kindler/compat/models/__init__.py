"""Kinds of stored models that only the old systems need. Loads no framework."""

from kindler.models.registry import Row

TF_GRAPH = Row(
    "tf_graph",
    "kindler.compat.models.tf_graph:GraphKind",
    loaded=("kindler.compat.frameworks.tf_graph.spec",),
    package="tensorflow",
    extra="tensorflow",
    family="keras",
    preload=("kindler.compat.models.tf_graph",),
    threads=True,
    gpus=True,
)
