"""A trained graph as files: SavedModels, and the checkpoints of `tf.train.Saver`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.core.protobuf.meta_graph_pb2 import SignatureDef
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import VariableEnds
from kindler.compat.frameworks.tf_graph.spec import GraphSpec, needed_graph
from kindler.compat.frameworks.tf_graph.variables import Values
from kindler.errors import ConfigError

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
    """The variables of a SavedModel, of a checkpoint, or of the newest checkpoint of a folder.

    Raises:
        ConfigError: There is none, or it lacks a variable of the model.
    """
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
    place = Path(path)
    if (place / "variables" / "variables.index").exists():
        return str(place / "variables" / "variables")
    if Path(f"{path}.index").exists():
        return path
    newest = tf.train.latest_checkpoint(path) if place.is_dir() else None
    if newest is None:
        raise ConfigError(
            f"{path} is neither a SavedModel nor a checkpoint that tf.train.Saver wrote.\n"
            "Hint: a checkpoint is named without its suffix .index."
        )
    return str(newest)
