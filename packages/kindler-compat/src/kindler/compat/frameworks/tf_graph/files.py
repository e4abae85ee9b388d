"""A trained graph as files: SavedModels, checkpoints of `tf.train.Saver`, and plain files without code."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.core.protobuf.meta_graph_pb2 import SignatureDef
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import (
    Ends,
    Parameter,
    Port,
    Streamed,
    Training,
    Values,
    VariableEnds,
)
from kindler.compat.frameworks.tf_graph.spec import (
    GraphSpec,
    PackedGraph,
    make_stateless,
    needed_graph,
    opened,
)
from kindler.errors import ConfigError

GRAPH = "graph.pb"
_ENDS, _VALUES, _CONSTANTS = "ends.json", "values.npz", "constants.npz"
_PORTS = ("inputs", "labels", "outputs", "metrics")
_SIGNATURE = "serving_default"


def save(spec: GraphSpec, path: str) -> None:
    """A SavedModel that maps inputs to outputs, made in a copy: a Saver would add to the user's graph."""
    values = Values(spec.sess, spec.ends.variables).read()
    ends, part = needed_graph(spec.graph, spec.ends)
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(part, name="")
        kept = [_variable(copy, variable) for variable in ends.variables]
        with tf.Session(graph=copy, config=tf.ConfigProto(device_count={"GPU": 0})) as sess:
            named = {v.name: value for v, value in zip(ends.variables, values, strict=True)}
            Values(sess, ends.variables).assign(named)
            start = tf.group(*(copy.get_operation_by_name(name) for name in ends.start))
            builder = tf.saved_model.builder.SavedModelBuilder(path)
            builder.add_meta_graph_and_variables(
                sess,
                [tf.saved_model.tag_constants.SERVING],
                signature_def_map=_signature(copy, spec),
                saver=tf.train.Saver(kept) if kept else None,
                main_op=start,
                clear_devices=True,
            )
            builder.save()


def _variable(graph: Any, ends: VariableEnds) -> Any:
    """The variable itself, known to the graph's collections, which readers of a SavedModel look at."""
    name = ends.name.partition(":")[0]
    described = VariableDef(
        variable_name=ends.name,
        initial_value_name=ends.value,
        initializer_name=ends.assign,
        snapshot_name=ends.read,
        is_resource=graph.get_operation_by_name(name).type == "VarHandleOp",
        trainable=ends.trainable,
    )
    kind = ResourceVariable if described.is_resource else tf.Variable
    variable = kind.from_proto(described)
    graph.add_to_collection("variables", variable)
    if ends.trainable:
        graph.add_to_collection("trainable_variables", variable)
    return variable


def _signature(graph: Any, spec: GraphSpec) -> dict[str, Any]:
    if not spec.ends.outputs:
        return {}
    signature = SignatureDef(method_name="tensorflow/serving/predict")
    for ports, infos in ((spec.ends.inputs, signature.inputs), (spec.ends.outputs, signature.outputs)):
        for port in ports:
            tensor = graph.get_tensor_by_name(port.tensor)
            info = infos[port.name or port.tensor.partition(":")[0]]
            info.name, info.dtype = tensor.name, tensor.dtype.base_dtype.as_datatype_enum
            info.tensor_shape.CopyFrom(tensor.shape.as_proto())
    return {_SIGNATURE: signature}


def read(spec: GraphSpec, path: str) -> dict[str, Array]:
    """The variables of a SavedModel, of a checkpoint, or of the newest checkpoint of a folder."""
    reader = tf.train.load_checkpoint(_prefix(path))
    there = reader.get_variable_to_shape_map()
    found: dict[str, Array] = {}
    missing: list[str] = []
    for variable in spec.ends.variables:
        name = variable.name.partition(":")[0]
        if name in there:
            found[variable.name] = np.asarray(reader.get_tensor(name))
        else:
            missing.append(variable.name)
    own = [name for name in missing if name in spec.ends.model]
    if own:
        raise ConfigError(
            f"{path} has no value for the variable {own[0]!r}; it has {sorted(there)[:8]}. It is of another"
            " model."
        )
    if missing:
        warnings.warn(
            f"{path} has no values for {missing}, so the optimizer starts with those it has.", stacklevel=2
        )
    return found


def _prefix(path: str) -> str:
    inside = f"{path}/variables/variables"  # of a SavedModel
    found = checkpoint_of(inside if Path(f"{inside}.index").exists() else path)
    if found is None:
        raise ConfigError(
            f"{path} is neither a SavedModel nor a checkpoint that tf.train.Saver wrote.\n"
            "Hint: a checkpoint is named without its suffix .index."
        )
    return found


def checkpoint_of(place: str) -> str | None:
    """The prefix of a checkpoint: that of a file, or of the newest in a folder; None where there is none."""
    if Path(f"{place}.index").exists():
        return place
    newest = tf.train.latest_checkpoint(place)
    return None if newest is None else str(newest)


def read_checkpoint(prefix: str) -> dict[str, Array]:
    """The variables of a checkpoint, named as in a graph."""
    reader = tf.train.load_checkpoint(prefix)
    return {f"{name}:0": np.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}


def write_checkpoint(folder: str, values: Mapping[str, Array], step: int) -> str:
    """Write `model-<step>` as the folder's newest checkpoint; like `tf.train.Saver`, keep the last five."""
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default(), tf.Session() as sess:
        variables = [
            tf.Variable(
                tf.placeholder(value.dtype, value.shape), name=name.partition(":")[0], use_resource=True
            )
            for name, value in values.items()
        ]
        for variable, value in zip(variables, values.values(), strict=True):
            sess.run(variable.initializer, {variable.initializer.inputs[1]: value})
        saver = tf.train.Saver(variables)
        state = tf.train.get_checkpoint_state(str(place))
        older = state.all_model_checkpoint_paths if state is not None else []
        saver.recover_last_checkpoints([path for path in older if path != f"{place}/model-{step}"])
        return str(saver.save(sess, str(place / "model"), global_step=step, write_meta_graph=False))


def without_training(spec: GraphSpec) -> GraphSpec:
    """The graph without its optimizer and the variables of that; it predicts and is judged as before."""
    ends = spec.ends
    needed = ends.model | {name for metric in ends.streamed for name in metric.variables}
    variables = tuple(variable for variable in ends.variables if variable.name in needed)
    return replace(spec, ends=replace(ends, training=None, variables=variables), optimizer="")


def write_plain(spec: GraphSpec, folder: Path) -> None:
    """Write a graph with the values that its session holds now."""
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


def read_plain(folder: Path) -> GraphSpec:
    """The graph in a session of its own. Only for graphs that were looked through: they are programs."""
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
