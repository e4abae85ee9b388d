"""The variables of a graph as arrays, read and written through a session without adding to the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import VariableEnds
from kindler.compat.frameworks.tf_graph.reach import VARIABLES
from kindler.errors import ConfigError

_COLLECTIONS = ("variables", "trainable_variables", "local_variables", "model_variables", "metric_variables")


def graph_variables(graph: Any) -> dict[str, Any]:
    """Every variable that the graph's collections know, by the name of its operation."""
    found = [variable for name in _COLLECTIONS for variable in graph.get_collection(name)]
    return {variable.op.name: variable for variable in found if hasattr(variable, "initializer")}


def ends_of(graph: Any, reached: Mapping[str, Any]) -> tuple[VariableEnds, ...]:
    """How to read and write those variables of a graph that are among the operations reached.

    Raises:
        ConfigError: A variable is in no collection, or is initialized in an unusual way.
    """
    known = graph_variables(graph)
    trainable = {variable.op.name for variable in graph.get_collection("trainable_variables")}
    names = [op.name for op in reached.values() if op.type in VARIABLES]
    lost = sorted(set(names) - set(known))
    if lost:
        raise ConfigError(
            f"the graph uses the variable {lost[0]!r}, which is in none of its collections, so its value"
            " cannot be carried to workers.\nHint: make variables without collections=[]."
        )
    order = [name for name in known if name in set(names)]
    return tuple(_ends(known[name], trainable=name in trainable) for name in order)


def _ends(variable: Any, *, trainable: bool) -> VariableEnds:
    assign = variable.initializer
    if assign.type not in ("Assign", "AssignVariableOp"):
        raise ConfigError(
            f"the variable {variable.name!r} is initialized by {assign.type} ({assign.name!r}); only plain"
            " assignments of a first value are understood."
        )
    if variable.dtype.base_dtype == tf.string:
        raise ConfigError(f"the variable {variable.name!r} holds strings, which cannot be trained or saved.")
    shape = variable.shape
    return VariableEnds(
        name=variable.name,
        read=variable.to_proto().snapshot_name,
        assign=assign.name,
        value=assign.inputs[1].name,
        dtype=np.dtype(variable.dtype.base_dtype.as_numpy_dtype).name,
        shape=tuple(shape.as_list()) if shape.is_fully_defined() else None,
        trainable=trainable,
    )


def initialized(sess: Any, variables: Iterable[Any]) -> None:
    """Give those of a graph's variables that have no value yet their first one."""
    missing = [variable for variable in variables if not _has_value(sess, variable)]
    # One at a time and again: the first value of one may depend on another.
    while missing:
        left = []
        for variable in missing:
            try:
                sess.run(variable.initializer)
            except tf.errors.FailedPreconditionError:
                left.append(variable)
        if len(left) == len(missing):
            raise ConfigError(f"the variables {[v.name for v in left]} cannot be initialized.")
        missing = left


def _has_value(sess: Any, variable: Any) -> bool:
    try:
        sess.run(variable.to_proto().snapshot_name)
    except tf.errors.FailedPreconditionError:
        return False
    return True


class Values:
    """The values of variables in a session.

    Args:
        sess: The session.
        variables: The variables.
    """

    def __init__(self, sess: Any, variables: Sequence[VariableEnds]) -> None:
        self._sess = sess
        self.variables = list(variables)
        self._by_name = {variable.name: variable for variable in variables}

    def read(self, names: Sequence[str] | None = None) -> list[Array]:
        """Copies of the values of these variables, or of all.

        Raises:
            ConfigError: One has no value yet, or the session is closed.
        """
        chosen = self.variables if names is None else [self._by_name[name] for name in names]
        try:
            # Old-style variables are changed in place, under arrays that were fetched.
            return [np.array(value) for value in self._sess.run([variable.read for variable in chosen])]
        except tf.errors.FailedPreconditionError as exc:
            raise ConfigError(
                f"the session has no value for {self._empty(chosen)}.\n"
                "Hint: run tf.global_variables_initializer() in the session, or restore a checkpoint, before"
                " it is used; or pass no sess."
            ) from exc
        except RuntimeError as exc:
            if "closed" not in str(exc):
                raise
            raise ConfigError(
                "the session of this graph is closed.\nHint: keep it open as long as the estimator is used."
            ) from exc

    def assign(self, values: Mapping[str, Array]) -> None:
        """Give variables these values; arrays must not change afterwards, for TensorFlow may keep them.

        Raises:
            ConfigError: A value has another shape than its variable.
        """
        feeds: dict[str, Array] = {}
        ops: list[str] = []
        for name, value in values.items():
            variable = self._by_name[name]
            array = np.asarray(value, np.dtype(variable.dtype))
            if variable.shape is not None and array.shape != variable.shape:
                raise ConfigError(
                    f"the variable {name!r} has the shape {variable.shape} in the graph and {array.shape}"
                    " here; they are not the same model."
                )
            if variable.value in feeds:  # variables that share their first value
                self._sess.run(ops, feeds)
                feeds, ops = {}, []
            feeds[variable.value] = array
            ops.append(variable.assign)
        if ops:
            self._sess.run(ops, feeds)

    def _empty(self, chosen: Sequence[VariableEnds]) -> str:
        names = []
        for variable in chosen:
            try:
                self._sess.run(variable.read)
            except tf.errors.FailedPreconditionError:
                names.append(variable.name)
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more variables" if len(names) > 5 else "")
