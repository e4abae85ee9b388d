"""From the arguments of `Estimator.from_graph` to a spec: what is wrong with them is said here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.compat.frameworks.tf_graph.ends import (
    PLACEHOLDERS,
    Ends,
    Port,
    Streamed,
    Training,
    ends_of,
    graph_variables,
    needed,
    op_of,
    ports_of,
    session_of,
    tensors_of,
)
from kindler.compat.frameworks.tf_graph.spec import GraphSpec, fetched
from kindler.compat.frameworks.tf_graph.training import clip_limits, of_train_op, title, trained_by
from kindler.errors import ConfigError

_LEARNING_PHASE = "keras_learning_phase"


def make_spec(
    *,
    inputs: Any,
    outputs: Any = None,
    labels: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    metrics: Any = None,
    clip_norm: float | None = None,
    clip_value: Any = None,
    updates: Any = None,
    sess: Any = None,
    train_op: Any = None,
    tensor_with_value: Any = None,
    global_step: Any = None,
    session_config: Any = None,
    config: Mapping[str, Any] | None = None,
) -> GraphSpec:
    """A spec of these arguments, which `Estimator.from_graph` explains."""
    graph = _one_graph(inputs, outputs, labels, loss)
    with graph.as_default():
        input_ports, named_inputs = ports_of(inputs, "inputs")
        label_ports, named_labels = ports_of(labels, "labels")
        output_ports, named_outputs = ports_of(outputs, "outputs")
        _check_rows(graph, (*input_ports, *label_ports))
        _check_training(loss, optimizer, train_op, clip_norm, clip_value)
        means, streamed = _metrics(graph, metrics)
        targets = [t for t in (loss, *tensors_of(outputs, "outputs")) if t is not None]
        values = _values(graph, tensor_with_value, needed(targets))
        ends = Ends(
            inputs=input_ports,
            labels=label_ports,
            outputs=output_ports,
            named_inputs=named_inputs,
            named_labels=named_labels,
            named_outputs=named_outputs,
            loss="" if loss is None else loss.name,
            metrics=means,
            streamed=streamed,
            values=values,
        )
        _check_fed(graph, ends)
        known = set(graph_variables(graph))
        training: Training | None = None
        update_ops = _updates(graph, updates, ends) if loss is not None else []
        if train_op is not None:
            training = of_train_op(_op(graph, train_op), updates=update_ops if updates is not None else ())
        elif optimizer is not None:
            training = trained_by(
                optimizer,
                loss,
                updates=update_ops,
                judged=[graph.get_tensor_by_name(port.tensor) for port in means],
                clip_norm=clip_norm,
                clip_value=clip_value,
                global_step=global_step,
            )
        if training is not None:
            _check_step(graph, ends, training)
        ends = _complete(graph, ends, training)
        return GraphSpec(
            graph=graph,
            sess=session_of(graph, sess, known=known),
            ends=ends,
            optimizer="" if optimizer is None else str(title(optimizer)),
            clip_norm=clip_norm,
            clip_value=clip_limits(clip_value),
            config=dict(config or {}),
            session_config=session_config,
        )


def _one_graph(inputs: Any, outputs: Any, labels: Any, loss: Any) -> Any:
    given = {"inputs": inputs, "outputs": outputs, "labels": labels, "loss": loss}
    tensors = {name: tensors_of(part, name) for name, part in given.items()}
    if not tensors["inputs"]:
        raise ConfigError("inputs must name at least one tensor that features are fed to.")
    graph = tensors["inputs"][0].graph
    for name, parts in tensors.items():
        for tensor in parts:
            if tensor.graph is not graph:
                raise ConfigError(f"{name}: {tensor.name!r} is in another graph than the inputs.")
    return graph


def _check_rows(graph: Any, ports: Sequence[Port]) -> None:
    names = [port.tensor for port in ports]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)} is among the inputs and the labels.")
    for name in names:
        tensor = graph.get_tensor_by_name(name)
        if tensor.shape.rank == 0:
            raise ConfigError(
                f"{name!r} is a scalar; inputs and labels have a row per example, so their shape begins with"
                " None.\nHint: a value that is the same for all rows goes to tensor_with_value."
            )
        if tensor.shape.rank and tensor.shape.as_list()[0] is not None:
            raise ConfigError(
                f"{name!r} has the shape {tuple(tensor.shape.as_list())}, which fixes the number of rows to"
                f" {tensor.shape.as_list()[0]}; batches have any number of rows.\n"
                "Hint: let its shape begin with None."
            )


def _check_training(loss: Any, optimizer: Any, train_op: Any, clip_norm: Any, clip_value: Any) -> None:
    if loss is not None and loss.shape.rank not in (0, None):
        raise ConfigError(
            f"loss must be a scalar, the mean over the rows of a batch; {loss.name!r} has the shape"
            f" {tuple(loss.shape.as_list())}.\nHint: tf.reduce_mean(loss)."
        )
    if optimizer is not None and train_op is not None:
        raise ConfigError("pass either optimizer= or train_op=, which has an optimizer already.")
    if (optimizer is not None or train_op is not None) and loss is None:
        raise ConfigError("an optimizer needs a loss; pass loss=..., a scalar tensor.")
    if clip_norm is not None and (
        not isinstance(clip_norm, int | float) or isinstance(clip_norm, bool) or clip_norm <= 0
    ):
        raise ConfigError(f"clip_norm must be a positive number; received {clip_norm!r}.")
    clip_limits(clip_value)
    if train_op is not None and (clip_norm is not None or clip_value is not None):
        raise ConfigError(
            "a train_op applies gradients as it is; clip them in the graph, or pass optimizer=."
        )


def _metrics(graph: Any, metrics: Any) -> tuple[tuple[Port, ...], tuple[Streamed, ...]]:
    """Those that are means over a batch, and those of `tf.metrics`."""
    if metrics is None:
        return (), ()
    if not isinstance(metrics, Mapping):
        parts = list(metrics) if isinstance(metrics, list | tuple) else [metrics]
        metrics = {tensors_of(part, "metrics")[0].op.name: part for part in parts}
    taken = sorted({"loss", "num_samples"} & set(metrics))
    if taken:
        raise ConfigError(f"metrics: {taken[0]!r} is a name that results have already; give it another one.")
    means, streamed = [], []
    for name, metric in metrics.items():
        if isinstance(metric, list | tuple) and len(metric) == 2:
            streamed.append(_streamed(graph, str(name), *metric))
            continue
        [tensor] = tensors_of(metric, "metrics") or [None]
        if tensor is None or tensor.dtype == tf.string:
            raise ConfigError(f"metrics: {name!r} must be a tensor of numbers; received {metric!r}.")
        means.append(Port(str(name), tensor.name))
    return tuple(means), tuple(streamed)


def _streamed(graph: Any, name: str, value: Any, update: Any) -> Streamed:
    reached = needed([value, update])
    kept = [*graph.get_collection("metric_variables"), *graph.get_collection("local_variables")]
    counted = dict.fromkeys(variable.name for variable in kept if variable.op.name in reached)
    return Streamed(name, value.name, op_of(update).name, tuple(counted))


def _values(graph: Any, given: Any, reached: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Tensors that are fed with a constant; Keras's own switch between training and judging is one."""
    pairs: Iterable[Any] = given.items() if isinstance(given, Mapping) else given or ()
    found: dict[str, tuple[Any, Any]] = {}
    for tensor, value in pairs:
        [element] = tensors_of(
            graph.as_graph_element(tensor) if isinstance(tensor, str) else tensor, "tensor_with_value"
        )
        two = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
        dtype = element.dtype.base_dtype.as_numpy_dtype
        try:
            found[element.name] = (np.asarray(two[0], dtype), np.asarray(two[1], dtype))
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"tensor_with_value: {value!r} cannot be fed to {element.name!r}, which takes"
                f" {element.dtype.base_dtype.name}.\nHint: a pair has the value for training and the one for"
                " evaluate and predict."
            ) from exc
    for op in reached.values():
        if op.type == "PlaceholderWithDefault" and op.name.rpartition("/")[2].startswith(_LEARNING_PHASE):
            dtype = op.outputs[0].dtype.base_dtype.as_numpy_dtype
            found.setdefault(op.outputs[0].name, (np.asarray(True, dtype), np.asarray(False, dtype)))
    return tuple((name, train, other) for name, (train, other) in found.items())


def _check_fed(graph: Any, ends: Ends) -> None:
    """Complain about a loss that no row reaches, and about placeholders that nobody feeds."""
    constants = [name for name, _, _ in ends.values]
    rows = [port.tensor for port in (*ends.inputs, *ends.labels)]
    if ends.loss:
        loss = graph.get_tensor_by_name(ends.loss)
        reached = needed([loss])
        if not any(graph.get_tensor_by_name(name).op.name in reached for name in rows):
            raise ConfigError(
                f"the loss {ends.loss!r} depends on none of the inputs and labels ({', '.join(rows)}), so no"
                " row would be learned from.\nHint: compute it from the tensors that are passed as inputs and"
                " labels."
            )
    judged = [ends.loss, *(port.tensor for port in ends.metrics)]
    judged += [name for metric in ends.streamed for name in (metric.value, metric.update)]
    _refuse_unfed(graph, [name for name in judged if name], [*rows, *constants], "the loss or a metric")
    inputs = [port.tensor for port in ends.inputs]
    outputs = [port.tensor for port in ends.outputs]
    labels = {port.tensor.partition(":")[0] for port in ends.labels}
    for name in outputs:
        needs = labels & set(needed([graph.get_tensor_by_name(name)], fed=[*inputs, *constants]))
        if needs:
            raise ConfigError(
                f"the output {name!r} depends on the labels ({', '.join(sorted(needs))}), which predict has"
                " not.\n"
                "Hint: outputs are what the model says of its inputs; a metric goes to metrics=."
            )
    _refuse_unfed(graph, outputs, [*inputs, *constants], "an output")


def _check_step(graph: Any, ends: Ends, training: Training) -> None:
    constants = [name for name, _, _ in ends.values]
    rows = [port.tensor for port in (*ends.inputs, *ends.labels)]
    gradients = [name for part in training.parameters for name in (part.gradient, part.indices) if name]
    _refuse_unfed(graph, [*gradients, *training.updates], [*rows, *constants], "a gradient or an update")
    ties = {control for _, control in training.ties}
    reached = needed([graph.as_graph_element(name) for name in training.apply], fed=[*gradients, *constants])
    unfed = [op.name for op in reached.values() if op.type in PLACEHOLDERS] if not ties else []
    if unfed:
        _refuse_unfed(graph, training.apply, [*gradients, *constants], "the optimizer (its learning rate?)")


def _refuse_unfed(graph: Any, targets: Sequence[str], fed: Sequence[str], what: str) -> None:
    reached = needed([graph.as_graph_element(name) for name in targets], fed=fed)
    unfed = sorted(op.outputs[0].name for op in reached.values() if op.type in PLACEHOLDERS)
    if unfed:
        raise ConfigError(
            f"{what} needs the placeholder {unfed[0]!r}, which is not fed.\n"
            "Hint: pass it among inputs or labels; or, where one value serves for all rows, in"
            f" tensor_with_value={{{unfed[0].partition(':')[0]}: (value in training, value otherwise)}}."
        )


def _updates(graph: Any, updates: Any, ends: Ends) -> list[Any]:
    """The operations to run with each step; by default those of the graph's collection that can run."""
    fed = [*(port.tensor for port in (*ends.inputs, *ends.labels)), *(name for name, _, _ in ends.values)]
    if updates is not None:
        parts = updates if isinstance(updates, list | tuple | set) else [updates]
        return [_op(graph, part) for part in parts]
    found = [op_of(part) for part in graph.get_collection("update_ops")]
    return [op for op in found if not any(o.type in PLACEHOLDERS for o in needed([op], fed=fed).values())]


def _op(graph: Any, item: Any) -> Any:
    element = item
    try:
        element = graph.as_graph_element(item, allow_tensor=True, allow_operation=True)
    except (TypeError, ValueError, KeyError) as exc:
        raise ConfigError(f"expected an operation of the graph, received {item!r}: {exc}") from exc
    return op_of(element)


def _complete(graph: Any, ends: Ends, training: Training | None) -> Ends:
    """The ends with the variables that they need, and which of them are the model's."""
    from dataclasses import replace

    own = [ends.loss, *(port.tensor for port in (*ends.outputs, *ends.metrics))]
    own += [name for metric in ends.streamed for name in (metric.value, metric.update)]
    own += training.updates if training is not None else ()
    model = needed([graph.as_graph_element(name) for name in own if name])
    whole = replace(ends, training=training)
    reached = needed([graph.as_graph_element(name) for name in fetched(whole)])
    start = [
        op.name
        for op in graph.get_collection("table_initializer")
        if set(needed([op])) & set(reached) - {op.name}
    ]
    variables = ends_of(graph, reached)
    return replace(
        whole,
        variables=variables,
        model=frozenset(v.name for v in variables if v.name.partition(":")[0] in model),
        start=tuple(start),
    )
