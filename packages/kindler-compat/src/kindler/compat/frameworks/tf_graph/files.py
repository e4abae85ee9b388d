"""A trained graph as files: SavedModels, checkpoints of `tf.train.Saver`, and plain files without code."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.core.protobuf.meta_graph_pb2 import SignatureDef
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import Ends, Values, VariableEnds
from kindler.compat.frameworks.tf_graph.spec import GraphSpec, PackedGraph, needed_graph, opened, packed
from kindler.errors import ConfigError

GRAPH = "graph.pb"
_ENDS, _VALUES, _CONSTANTS = "ends.json", "values.npz", "constants.npz"
_REST = ("optimizer", "clip_norm", "clip_value")
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
    inside = f"{path}/variables/variables"  # of a SavedModel
    prefix = checkpoint_of(inside if Path(f"{inside}.index").exists() else path)
    if prefix is None:
        raise ConfigError(
            f"{path} is neither a SavedModel nor a checkpoint that tf.train.Saver wrote.\n"
            "Hint: a checkpoint is named without its suffix .index."
        )
    there = read_checkpoint(prefix)
    missing = [variable.name for variable in spec.ends.variables if variable.name not in there]
    if own := [name for name in missing if name in spec.ends.model]:
        raise ConfigError(
            f"{path} has no value for the variable {own[0]!r}; it has {sorted(there)[:8]}. It belongs to "
            "another model."
        )
    if missing:
        warnings.warn(
            f"{path} has no values for {missing}, so the optimizer starts with those it has.", stacklevel=2
        )
    return {v.name: there[v.name] for v in spec.ends.variables if v.name in there}


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
    for variable in spec.ends.variables:
        if np.dtype(variable.dtype).kind not in "biufc":
            raise ConfigError(
                f"the variable {variable.name!r} is of type {variable.dtype}, which cannot be stored."
            )
    graph = packed(spec)
    ends = graph.ends
    (folder / GRAPH).write_bytes(graph.graph_def)
    (folder / _VALUES).write_bytes(graph.values)
    constants = [np.asarray(value) for _, *pair in ends.values for value in pair]
    np.savez(folder / _CONSTANTS, *constants, allow_pickle=False)
    facts = asdict(replace(ends, values=(), model=frozenset())) | {
        "values": ends.constants,
        "model": sorted(ends.model),
        "rest": {name: graph.rest[name] for name in _REST},
    }
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
        with np.load(folder / _CONSTANTS, allow_pickle=False) as file:
            arrays = [file[f"arr_{number}"] for number in range(len(file.files))]
        constants = [array.item() if array.ndim == 0 else array for array in arrays]
        values = zip(facts.pop("values"), constants[::2], constants[1::2], strict=True)
        ends = replace(_read_as(Ends, {**facts, "values": []}), values=tuple(values))
        return opened(
            PackedGraph(
                graph_def=(folder / GRAPH).read_bytes(),
                ends=ends,
                values=(folder / _VALUES).read_bytes(),
                session_config=b"",
                rest={name: rest[name] for name in _REST},
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as exc:
        raise ConfigError(f"the files of the graph do not match: {exc!r}.") from exc


def _read_as(kind: Any, value: Any) -> Any:
    """What JSON made of a value of this type: of a dataclass, a tuple or a set of them, or None."""
    if value is None or kind is Any:
        return value
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return cast(Any, kind)(**{name: _read_as(kinds[name], part) for name, part in value.items()})
    parts = [part for part in get_args(kind) if part not in (type(None), ...)]
    if get_origin(kind) in (tuple, frozenset):
        several = len(parts) == 1
        return get_origin(kind)(_read_as(parts[0 if several else place], p) for place, p in enumerate(value))
    return _read_as(parts[0], value) if parts else kind(value)
