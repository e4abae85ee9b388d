"""What the random operations of a graph draw: decided by seed, epoch, rank and step, and by nothing else.

TensorFlow's own keep their state in the session, where no checkpoint reaches it. In the graph that travels to
workers they are replaced by stateless ones, which draw from a seed that is fed with each call. Those within
loops draw anew in every turn and stay what they are; they are seeded by rank.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.collective import Array

DRAWS = "kindler/draws"
_STATELESS = {
    "RandomUniform": "StatelessRandomUniform",
    "RandomStandardNormal": "StatelessRandomNormal",
    "TruncatedNormal": "StatelessTruncatedNormal",
    "RandomUniformInt": "StatelessRandomUniformInt",
    "Multinomial": "StatelessMultinomial",
}
_SEED_AFTER = {"Multinomial": 2}  # inputs before the seed; otherwise it follows the shape
_BITS = 20  # for the numbers of a graph's random operations


def seed_of(*numbers: int) -> int:
    """A number that depends on all of these."""
    words = [number % (1 << 32) for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(2, np.uint64)[0] >> np.uint64(1))


def draw_of(seed: int, count: int) -> Array:
    """What is fed to `DRAWS` for the call of this number."""
    return np.array([seed, count << _BITS], np.int64)


def make_stateless(graph_def: Any) -> str:
    """Replace the random operations of a graph; the tensor to feed, or "" where nothing is drawn."""
    names = {node.name for node in graph_def.node}
    looped = _in_loops(graph_def)
    found = [n for n in graph_def.node if n.op in _STATELESS and n.name not in looped]
    if found and DRAWS not in names:
        _default(graph_def)
    for number, node in enumerate(found):
        _replace(graph_def, node, number)
    return f"{DRAWS}:0" if found or DRAWS in names else ""


def reseed(graph_def: Any, *numbers: int) -> None:
    """Give every operation that still keeps a state of its own a seed that depends on these numbers."""
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    for body, nodes in enumerate(bodies):
        for place, node in enumerate(nodes):
            if "seed" in node.attr and "seed2" in node.attr:
                node.attr["seed"].i = seed_of(*numbers) >> 32
                node.attr["seed2"].i = (body << _BITS) + place + 1


def _default(graph_def: Any) -> None:
    """The tensor that is fed, with a value for whoever does not feed it, as in a SavedModel."""
    zeros = graph_def.node.add(name=f"{DRAWS}/default", op="Const")
    zeros.attr["dtype"].type = tf.int64.as_datatype_enum
    zeros.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([0, 0], tf.int64))
    draws = graph_def.node.add(name=DRAWS, op="PlaceholderWithDefault", input=[zeros.name])
    draws.attr["dtype"].type = tf.int64.as_datatype_enum
    draws.attr["shape"].shape.CopyFrom(tf.TensorShape([2]).as_proto())


def _replace(graph_def: Any, node: Any, number: int) -> None:
    own = graph_def.node.add(name=f"{DRAWS}/number_{number}", op="Const")
    own.attr["dtype"].type = tf.int64.as_datatype_enum
    own.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([0, number], tf.int64))
    seed = graph_def.node.add(name=f"{DRAWS}/seed_{number}", op="AddV2", input=[DRAWS, own.name])
    seed.attr["T"].type = tf.int64.as_datatype_enum
    place = _SEED_AFTER.get(node.op, 1)
    inputs = list(node.input)
    del node.input[:]
    node.input.extend([*inputs[:place], seed.name, *inputs[place:]])
    if node.op == "RandomUniformInt":
        node.attr["dtype"].CopyFrom(node.attr["Tout"])
        del node.attr["Tout"]
    node.attr["Tseed"].type = tf.int64.as_datatype_enum
    for name in ("seed", "seed2"):
        node.attr.pop(name, None)
    node.op = _STATELESS[node.op]


def _in_loops(graph_def: Any) -> set[str]:
    """The nodes within loops: those after an Enter, up to an Exit."""
    users: dict[str, list[Any]] = defaultdict(list)
    for node in graph_def.node:
        for item in node.input:
            users[item.lstrip("^").partition(":")[0]].append(node)
    found: set[str] = set()
    waiting = [node for node in graph_def.node if node.op in ("Enter", "RefEnter")]
    while waiting:
        node = waiting.pop()
        if node.name not in found and node.op not in ("Exit", "RefExit"):
            found.add(node.name)
            waiting.extend(users[node.name])
    return found
