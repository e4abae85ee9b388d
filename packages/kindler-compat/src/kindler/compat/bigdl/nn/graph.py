"""Nodes of a graph of layers: what `layer(node)` returns, and the order in which a `Model` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kindler.errors import ConfigError

__all__ = ["Node", "in_order", "nodes_of"]


class Node:
    """A layer in a graph, and the nodes whose outputs it takes.

    Attributes:
        layer: The layer.
        inputs: The nodes before it, in the order in which the layer takes them.
    """

    def __init__(self, layer: Any, inputs: Sequence[Node]) -> None:
        self.layer, self.inputs = layer, tuple(inputs)

    def element(self) -> Any:
        """The layer."""
        return self.layer

    def remove_pre_edges(self) -> Node:
        """Take no inputs any more."""
        self.inputs = ()
        return self

    def remove_next_edges(self) -> Node:
        """Nothing: a node does not know who takes its output."""
        return self

    def __repr__(self) -> str:
        return f"Node({self.layer.name()})"


def nodes_of(given: Any) -> tuple[Node, ...]:
    """The nodes of an argument, if it is one or a list of them; empty otherwise."""
    if isinstance(given, Node):
        return (given,)
    if isinstance(given, list | tuple) and given and all(isinstance(part, Node) for part in given):
        return tuple(given)
    return ()


def in_order(inputs: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
    """All nodes between inputs and outputs, each after those whose outputs it takes.

    Raises:
        ConfigError: An output cannot be computed from the inputs, or an input is not used.
    """
    order: list[Node] = []
    done: set[int] = set()
    pending: list[tuple[Node, bool]] = [(node, False) for node in reversed(outputs)]
    beginnings = {id(node) for node in inputs}
    while pending:
        node, expanded = pending.pop()
        if id(node) in done:
            continue
        if expanded or id(node) in beginnings:
            done.add(id(node))
            order.append(node)
            continue
        if not node.inputs:
            raise ConfigError(f"{node!r} takes no input, and is not one of the inputs of the Model.")
        pending.append((node, True))
        pending.extend((before, False) for before in reversed(node.inputs))
    unused = [node for node in inputs if id(node) not in done]
    if unused:
        raise ConfigError(f"the input {unused[0]!r} of the Model leads to none of its outputs.")
    return order
