"""Gradients, and how they are applied: the operations that training adds to a graph, or finds in one.

Ranks agree between two calls of the session. The first one computes every gradient at once; the second one
feeds the agreed values to the same tensors and applies them, so that nothing is computed twice. One process
alone makes both in a single call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.frameworks.tf_graph.ends import (
    PLACEHOLDERS,
    VARIABLES,
    Parameter,
    Training,
    needed,
    op_of,
    walk,
)
from kindler.errors import ConfigError

# How the types of all operations begin that change a variable.
_CHANGES = (
    "Assign",
    *(f"{kind}{how}" for kind in ("", "Resource") for how in ("Scatter", "Apply", "SparseApply")),
)


def trained_by(
    optimizer: Any,
    loss: Any,
    updates: Sequence[Any],
    judged: Sequence[Any],
    *,
    clip_norm: float | None,
    clip_value: Any,
    global_step: Any,
) -> Training:
    """Add to the loss's graph what an optimizer needs, slots included."""
    graph = loss.graph
    variables = _trainable(loss)
    with _root(graph):
        step = global_step if global_step is not None else tf.train.get_global_step(graph)
        counters = Counters(step)
        pairs = [
            (maker, gradient, variable)
            for maker, members in assigned(optimizer, variables, counters)
            for gradient, variable in maker.compute_gradients(loss, var_list=members)
            if gradient is not None
        ]
        if not pairs:
            raise ConfigError("the loss has no gradient with respect to any trainable variable.")
        with tf.control_dependencies([loss, *judged, *updates]):
            gates = [_gate(gradient, number) for number, (_, gradient, _) in enumerate(pairs)]
        clipped = _clipped(gates, clip_norm, clip_limits(clip_value))
        apply = _applied([(m, c, v) for (m, _, v), c in zip(pairs, clipped, strict=True)], counters.step)
    parameters = tuple(_parameter(gate, v) for gate, (_, _, v) in zip(gates, pairs, strict=True))
    after = needed(apply, fed=Training(parameters, ()).fed)
    _warn_of_counters(after)
    return Training(
        parameters=parameters,
        apply=tuple(op.name for op in apply),
        updates=tuple(op_of(update).name for update in updates),
        rate=_rate(after.values()) or _stated_rate(pairs),
        epoch="" if counters.epoch is None else counters.epoch.name,
    )


def gradients_of(train_op: Any) -> list[tuple[Any, Any]]:
    """The gradients that a train op applies, each with its variable, found in the graph.

    A train op is what `optimizer.minimize(loss)` of any `tf.train` optimizer returned, or something that
    depends on it, such as `slim.learning.create_train_op`. The tensors are what the optimizer's operations
    take: after clipping, if the program clips. Gradients of some rows only (`tf.IndexedSlices`) are given as
    such where the optimizer has an operation for them.
    """
    graph = train_op.graph
    by_op = {variable.op.name: variable for variable in graph.get_collection("trainable_variables")}
    reached = needed([train_op])
    pairs: list[tuple[Any, Any]] = []
    for op in sorted(reached.values(), key=lambda op: op._id):
        arguments = _arguments(op)
        variable = by_op.get(_changed(op) or "")
        if variable is None:
            continue
        gradient = arguments.get("grad", arguments.get("delta"))
        if gradient is None:
            raise ConfigError(
                f"train_op changes the variable {variable.name!r} by {op.type} ({op.name!r}), in which "
                "no gradient is found.\nHint: pass optimizer= instead of train_op=, so that its gradients are"
                " known."
            )
        if "indices" in arguments:
            gradient = tf.IndexedSlices(gradient, arguments["indices"], variable.shape)
        pairs.append((gradient, variable))
    if not pairs:
        raise ConfigError(
            f"train_op {train_op.name!r} applies no gradient to a trainable variable.\n"
            "Hint: it must be what optimizer.minimize(loss) or apply_gradients of a tf.train optimizer"
            " returned."
        )
    return pairs


def of_train_op(train_op: Any, *, updates: Sequence[Any] = ()) -> Training:
    """A step out of a train op that the graph has already; nothing is added to the graph.

    What the train op does besides with the rows of a batch (updates of BatchNorm, which most programs tie to
    it with `tf.control_dependencies`) is untied, and runs with the computation of gradients.
    """
    parameters = tuple(_parameter(gradient, variable) for gradient, variable in gradients_of(train_op))
    fed = Training(parameters, ()).fed
    after = needed([train_op], fed=fed)
    of_rows = _of_rows(after, fed)
    changing = [op for op in after.values() if _changed(op)]
    applied = [op for op in changing if op.name not in of_rows]
    ties = [(op, c) for op in after.values() if op.name not in of_rows for c in op.control_inputs]
    ties = [(op, control) for op, control in ties if control.name in of_rows]
    early = [control for _, control in ties] + [op for op in changing if op.name in of_rows]
    names = {op.name for op in applied}
    for op in early:
        if names & set(needed([op])):
            raise ConfigError(
                f"train_op runs {op.name!r} on the rows of a batch after the gradients were applied.\n"
                "Hint: run it before, or leave it out of train_op."
            )
    whole = op_of(train_op)
    return Training(
        parameters=parameters,
        apply=(whole.name,) if whole.name not in of_rows else tuple(op.name for op in applied),
        updates=tuple(dict.fromkeys([*(op_of(u).name for u in updates), *(op.name for op in early)])),
        rate=_rate(after.values()),
        ties=tuple((op.name, control.name) for op, control in ties),
    )


def clip_limits(clip_value: Any) -> tuple[float, float] | None:
    """The bounds of a gradient's values: a number v stands for -v and v."""
    if clip_value is None:
        return None
    if isinstance(clip_value, int | float) and not isinstance(clip_value, bool) and clip_value > 0:
        return -float(clip_value), float(clip_value)
    if isinstance(clip_value, list | tuple) and len(clip_value) == 2:
        low, high = clip_value
        if isinstance(low, int | float) and isinstance(high, int | float) and low < high:
            return float(low), float(high)
    raise ConfigError(
        f"clip_value must be a positive number, or a pair (lowest, highest); received {clip_value!r}."
    )


@dataclass
class Counters:
    """What a learning rate may depend on, as tensors; made once an optimizer is a function of them.

    Attributes:
        step: Steps of the optimizer so far, the graph's global step.
        epoch: The number of the epoch that runs, from 1 on.
    """

    step: Any
    epoch: Any = None

    def made(self) -> Counters:
        if self.epoch is None:
            self.step = tf.train.get_or_create_global_step() if self.step is None else self.step
            self.epoch = tf.placeholder_with_default(tf.constant(1, tf.int64), (), name="kindler/epoch")
        return self


def _warn_of_counters(applied: Mapping[str, Any]) -> None:
    """Warn of a step that a learning rate depends on and that nobody counts: it would stay what it is."""
    changed = {_changed(op) for op in applied.values()}
    for op in applied.values():
        dtype = op.node_def.attr["dtype"].type if op.type in VARIABLES else None
        if dtype is not None and tf.as_dtype(dtype).is_integer and op.name not in changed:
            warnings.warn(
                f"the optimizer depends on the variable {op.name!r}, which training does not change, so a"
                " learning rate that decays by it stays the same.\nHint: create it "
                "with tf.train.get_or_create_global_step(), or pass it as global_step=.",
                stacklevel=2,
            )


@contextmanager
def _root(graph: Any) -> Iterator[None]:
    """Names as in a program that calls `minimize` itself, whatever scopes the caller is in."""
    with graph.as_default(), graph.name_scope(None), graph.control_dependencies(None):
        try:
            yield
        except RuntimeError as exc:
            if "finalized" not in str(exc):
                raise
            raise ConfigError(
                "the graph is finalized, so no optimizer can be added to it.\n"
                "Hint: create the estimator before a MonitoredSession finalizes the graph, or pass train_op=."
            ) from exc


def _trainable(loss: Any) -> list[Any]:
    reached = needed([loss])
    variables = [v for v in loss.graph.get_collection("trainable_variables") if v.op.name in reached]
    if variables:
        return list({v.op.name: v for v in variables}.values())
    there = [op.name for op in reached.values() if op.type in VARIABLES]
    raise ConfigError(
        f"the loss {loss.name!r} depends on no trainable variable, so there is nothing to train"
        + (f"; it depends on {there}, which are not trainable." if there else ".")
    )


def _gate(gradient: Any, number: int) -> Any:
    """The tensor that is fetched and fed; computed after all that a step is judged by."""
    name = f"kindler/gradient_{number}"
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.identity(gradient.values, name=f"{name}/values")
        indices = tf.identity(gradient.indices, name=f"{name}/indices")
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return tf.identity(gradient, name=name)


def _clipped(gates: list[Any], norm: float | None, limits: tuple[float, float] | None) -> list[Any]:
    if limits is not None:
        gates = [
            tf.IndexedSlices(tf.clip_by_value(gate.values, *limits), gate.indices, gate.dense_shape)
            if isinstance(gate, tf.IndexedSlices)
            else tf.clip_by_value(gate, *limits)
            for gate in gates
        ]
    return gates if norm is None else tf.clip_by_global_norm(gates, norm)[0]


def _applied(parts: Sequence[tuple[Any, Any, Any]], step: Any) -> list[Any]:
    """The operations that apply gradients; the step is counted once, after all of them."""
    makers = list({id(maker): maker for maker, _, _ in parts}.values())
    only = {"global_step": step} if len(makers) == 1 else {}
    ops = [
        op_of(maker.apply_gradients([(g, v) for owner, g, v in parts if owner is maker], **only))
        for maker in makers
    ]
    if step is None or only:
        return ops
    with tf.control_dependencies(ops):
        return [op_of(tf.assign_add(step, tf.ones_like(step)))]


def _parameter(gradient: Any, variable: Any) -> Parameter:
    if isinstance(gradient, tf.IndexedSlices):
        return Parameter(variable.name, gradient.values.name, gradient.indices.name)
    return Parameter(variable.name, gradient.name)


def _of_rows(ops: Mapping[str, Any], fed: Sequence[str]) -> set[str]:
    """Those operations that take something computed from rows, not counting what they merely wait for."""

    def users(op: Any) -> list[Any]:
        outputs = [tensor for tensor in op.outputs if tensor.name not in fed]
        return [user for tensor in outputs for user in tensor.consumers() if user.name in ops]

    return set(walk([op for op in ops.values() if op.type in PLACEHOLDERS], users))


def _arguments(op: Any) -> dict[str, Any]:
    """The inputs of an operation that changes a variable, as TensorFlow names them; empty for others."""
    if not op.type.startswith(_CHANGES) or op.op_def is None:
        return {}
    names = [argument.name for argument in op.op_def.input_arg]
    return dict(zip(names, op.inputs, strict=True)) if len(names) == len(op.inputs) else {}


def _changed(op: Any) -> str | None:
    """The variable that an operation changes."""
    if not op.type.startswith(_CHANGES) or not op.inputs:
        return None
    held = op.inputs[0].op
    while held.type in ("Identity", "Enter", "RefIdentity") and held.inputs:
        held = held.inputs[0].op
    return str(held.name) if held.type in VARIABLES else None


def _stated_rate(pairs: Sequence[tuple[Any, Any, Any]]) -> str:
    """The learning rate of an optimizer that applies gradients with operations of its own making."""
    rates = [getattr(maker, "_lr_t", None) for maker, _, _ in pairs]
    return next((str(rate.name) for rate in rates if isinstance(rate, tf.Tensor)), "")


def _rate(ops: Any) -> str:
    for op in ops:
        arguments = _arguments(op)
        if "Apply" in op.type and ("grad" in arguments or "delta" in arguments):
            rate = arguments.get("lr", arguments.get("alpha"))
            if rate is not None:
                return str(rate.name)
    return ""


_NAMES: dict[str, tuple[str, dict[str, float]]] = {
    "adadelta": ("AdadeltaOptimizer", {}),
    "adagrad": ("AdagradOptimizer", {"learning_rate": 0.01}),
    "adam": ("AdamOptimizer", {}),
    "ftrl": ("FtrlOptimizer", {"learning_rate": 0.01}),
    "momentum": ("MomentumOptimizer", {"learning_rate": 0.01, "momentum": 0.9}),
    "rmsprop": ("RMSPropOptimizer", {"learning_rate": 0.001}),
    "sgd": ("GradientDescentOptimizer", {"learning_rate": 0.01}),
}


def assigned(optimizer: Any, variables: Sequence[Any], counters: Counters) -> list[tuple[Any, list[Any]]]:
    """Each optimizer with the variables that it trains: those of the longest prefix of their names."""
    if not isinstance(optimizer, Mapping):
        return [(_made(optimizer, counters), list(variables))]
    by_prefix: dict[str, list[Any]] = {str(prefix): [] for prefix in optimizer}
    left: list[Any] = []
    for variable in variables:
        fitting = [prefix for prefix in by_prefix if variable.op.name.startswith(prefix)]
        (by_prefix[max(fitting, key=len)] if fitting else left).append(variable)
    names = [variable.op.name for variable in variables]
    for prefix, members in by_prefix.items():
        if not members:
            raise ConfigError(f"optimizer: no variable's name begins with {prefix!r}; there are {names}.")
    if left:
        warnings.warn(
            "these variables are not trained, because no prefix of optimizer= matches them:"
            f" {[variable.op.name for variable in left]}.",
            stacklevel=2,
        )
    return [(_made(optimizer[prefix], counters), members) for prefix, members in by_prefix.items()]


def title(optimizer: Any) -> Any:
    if isinstance(optimizer, Mapping):
        return ", ".join(f"{prefix}: {title(part)}" for prefix, part in optimizer.items())
    return optimizer if isinstance(optimizer, str) else type(optimizer).__qualname__


def _made(optimizer: Any, counters: Counters) -> Any:
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name not in _NAMES:
            raise ConfigError(f"optimizer={optimizer!r}: must be one of {', '.join(sorted(_NAMES))}.")
        kind, options = _NAMES[name]
        return getattr(tf.train, kind)(**options)
    made = optimizer() if isinstance(optimizer, type) else optimizer
    if callable(made) and not isinstance(made, tf.train.Optimizer):
        made = made(counters.made())
    if isinstance(made, tf.train.Optimizer):
        return made
    raise ConfigError(
        f"optimizer must be a tf.compat.v1.train.Optimizer; received {type(made).__qualname__}.\n"
        "Hint: it may also be a name such as 'adam', a dict from prefixes of variables' names to optimizers,"
        " or a function of counters (with step and epoch) that returns an optimizer. Keras's own optimizers "
        "work with Estimator.from_keras."
    )
