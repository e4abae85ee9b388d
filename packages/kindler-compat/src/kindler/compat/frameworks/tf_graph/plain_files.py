"""A graph with its variables as plain files, without any code: a GraphDef, JSON, and arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.compat.frameworks.tf_graph.ends import Ends, Parameter, Port, Streamed, Training, VariableEnds
from kindler.compat.frameworks.tf_graph.randomness import make_stateless
from kindler.compat.frameworks.tf_graph.spec import GraphSpec, PackedGraph, needed_graph, opened
from kindler.compat.frameworks.tf_graph.variables import Values
from kindler.errors import ConfigError

GRAPH = "graph.pb"
_ENDS, _VALUES, _CONSTANTS = "ends.json", "values.npz", "constants.npz"
_PORTS = ("inputs", "labels", "outputs", "metrics")


def without_training(spec: GraphSpec) -> GraphSpec:
    """The graph without its optimizer and the variables of that; it predicts and is judged as before."""
    ends = spec.ends
    needed = ends.model | {name for metric in ends.streamed for name in metric.variables}
    variables = tuple(variable for variable in ends.variables if variable.name in needed)
    return replace(spec, ends=replace(ends, training=None, variables=variables), optimizer="")


def write(spec: GraphSpec, folder: Path) -> None:
    """Write a graph with the values that its session holds now.

    Raises:
        ConfigError: A variable has no value, or is of a type that numpy's files do not have.
    """
    values = Values(spec.sess, spec.ends.variables).read()
    for variable, value in zip(spec.ends.variables, values, strict=True):
        if value.dtype.kind not in "biufc":
            raise ConfigError(
                f"the variable {variable.name!r} is of type {variable.dtype}, which is not stored."
            )
    ends, graph_def = needed_graph(spec.graph, spec.ends)
    ends = replace(ends, draws=make_stateless(graph_def))
    (folder / GRAPH).write_bytes(graph_def.SerializeToString())
    np.savez(folder / _VALUES, *values, allow_pickle=False)
    constants = [np.asarray(value) for _, *pair in ends.values for value in pair]
    np.savez(folder / _CONSTANTS, *constants, allow_pickle=False)
    facts = asdict(replace(ends, values=(), model=frozenset())) | {
        "values": [tensor for tensor, _, _ in ends.values],
        "model": sorted(ends.model),
    }
    facts["rest"] = {"optimizer": spec.optimizer, "clip_norm": spec.clip_norm, "clip_value": spec.clip_value}
    (folder / _ENDS).write_text(json.dumps(facts))


def meta_graph(folder: Path) -> bytes:
    """The graph as a `MetaGraphDef`, to look through before it is opened."""
    graph_def = tf.GraphDef.FromString((folder / GRAPH).read_bytes())
    data: bytes = tf.MetaGraphDef(graph_def=graph_def).SerializeToString()
    return data


def read(folder: Path) -> GraphSpec:
    """The graph in a session of its own. Only for graphs that were looked through: they are programs.

    Raises:
        ConfigError: The files do not belong together.
    """
    try:
        facts = json.loads((folder / _ENDS).read_text())
        rest = facts.pop("rest")
        ends = _ends(facts, _arrays(folder / _CONSTANTS))
        packed = PackedGraph(
            graph_def=(folder / GRAPH).read_bytes(),
            ends=ends,
            values=(folder / _VALUES).read_bytes(),
            session_config=b"",
            rest={name: rest[name] for name in ("optimizer", "clip_norm", "clip_value")},
        )
        return opened(packed)
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as exc:
        raise ConfigError(f"the files of the graph do not belong together: {exc!r}.") from exc


def _arrays(path: Path) -> list[Any]:
    with np.load(path, allow_pickle=False) as file:
        return [file[f"arr_{number}"] for number in range(len(file.files))]


def _ends(facts: Mapping[str, Any], constants: list[Any]) -> Ends:
    fields = dict(facts)
    for name in _PORTS:
        fields[name] = tuple(Port(**port) for port in fields[name])
    fields["streamed"] = tuple(
        Streamed(**{**metric, "variables": tuple(metric["variables"])}) for metric in fields["streamed"]
    )
    pairs = zip(constants[::2], constants[1::2], strict=True)
    fields["values"] = tuple(
        (str(tensor), *(_plain(value) for value in pair))
        for tensor, pair in zip(fields["values"], pairs, strict=True)
    )
    fields["variables"] = tuple(
        VariableEnds(**{**v, "shape": None if v["shape"] is None else tuple(v["shape"])})
        for v in fields["variables"]
    )
    fields["model"] = frozenset(map(str, fields["model"]))
    fields["start"] = tuple(map(str, fields["start"]))
    fields["training"] = None if fields["training"] is None else _training(fields["training"])
    return Ends(**fields)


def _training(facts: Mapping[str, Any]) -> Training:
    return Training(
        parameters=tuple(Parameter(**part) for part in facts["parameters"]),
        apply=tuple(map(str, facts["apply"])),
        updates=tuple(map(str, facts["updates"])),
        rate=str(facts["rate"]),
        epoch=str(facts["epoch"]),
        ties=tuple((str(first), str(second)) for first, second in facts["ties"]),
    )


def _plain(value: Any) -> Any:
    return value.item() if value.ndim == 0 else value
