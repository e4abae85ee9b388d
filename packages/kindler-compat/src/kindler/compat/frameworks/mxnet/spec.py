"""What a user passes for MXNet, as one value that travels to the workers, and what creators make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.compat.frameworks.mxnet.library import mx
from kindler.errors import ConfigError
from kindler.frameworks.creators import call, title

_COUNTS = "optimizer counts"


@dataclass(frozen=True, kw_only=True)
class MxnetSpec:
    """A model and all that trains it; creators are called with the config."""

    config: dict[str, Any]  # with "optimizer" and "optimizer_params"
    model_creator: Callable[..., Any]  # returns a Gluon block
    loss_creator: Callable[..., Any] | None = None  # returns a Gluon loss; None cannot train or evaluate
    eval_metrics_creator: Callable[..., Any] | None = None  # returns the metrics of training
    validation_metrics_creator: Callable[..., Any] | None = None  # None takes those of training


def make_spec(*, config: Mapping[str, Any] | None, **creators: Any) -> MxnetSpec:
    complaints = []
    if config is not None and not isinstance(config, Mapping):
        complaints.append(f"config must be a dict, as create_config() creates; received {config!r}.")
    for name, creator in creators.items():
        if not callable(creator) and (creator is not None or name == "model_creator"):
            complaints.append(f"{name} must be a function of the config; received {creator!r}.")
        elif isinstance(creator, mx.gluon.Block):
            complaints.append(f"{name} must be a function that returns a block, not the block itself.")
    if complaints:
        raise ConfigError("\n".join(complaints))
    return MxnetSpec(config=dict(config or {}), **creators)


def build_model(spec: MxnetSpec) -> Any:
    """The block that the creator returns, initialized if it is not."""
    block = call(spec.model_creator, dict(spec.config))
    if not isinstance(block, mx.gluon.Block):
        raise ConfigError(
            f"model_creator {title(spec.model_creator)} must return a mxnet.gluon.Block; it returned"
            f" {type(block).__module__}.{type(block).__qualname__}."
            "\nHint: modules of symbols (mx.mod.Module) are not supported; mx.gluon.SymbolBlock(outputs,"
            " inputs) makes a block from a symbol that ends before its loss."
        )
    values = block.collect_params().values()
    if any(p._data is None and not p._deferred_init for p in values):
        block.initialize(spec.config.get("init") or mx.init.Uniform(), ctx=mx.cpu())
    return block


def build_loss(spec: MxnetSpec) -> Any:
    loss = call(spec.loss_creator, dict(spec.config)) if spec.loss_creator is not None else None
    if not callable(loss):
        raise ConfigError(f"loss_creator must return a mxnet.gluon.loss.Loss; it returned {loss!r}.")
    return loss


def build_metrics(creator: Callable[..., Any] | None, spec: MxnetSpec) -> list[Any]:
    """The metrics that a creator returns: one, a list, or a composite of them."""
    return list(_flat(call(creator, dict(spec.config)) if creator is not None else []))


def build_optimizer(spec: MxnetSpec, parameters: Mapping[int, Any]) -> Any:
    """The optimizer that the config names, with the rates that parameters multiply."""
    made = spec.config.get("optimizer", "sgd")
    if isinstance(made, mx.optimizer.Optimizer):
        made.param_dict = dict(parameters)
        return made
    options = dict(spec.config.get("optimizer_params") or {"learning_rate": 0.01})
    try:
        return mx.optimizer.create(made, param_dict=dict(parameters), **options)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"config: optimizer={made!r} with {options!r} cannot be created: {exc}") from exc


def _flat(metrics: Any) -> Iterator[Any]:
    if isinstance(metrics, list | tuple):
        for metric in metrics:
            yield from _flat(metric)
    elif isinstance(metrics, mx.metric.CompositeEvalMetric):
        yield from _flat(metrics.metrics)
    else:
        metric = mx.metric.create(metrics)
        yield from _flat(metric) if isinstance(metric, mx.metric.CompositeEvalMetric) else [metric]


class Steps:
    """MXNet's optimizer for one replica; all that it remembers is arrays and numbers."""

    def __init__(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        self.optimizer, self._parameters = optimizer, list(parameters)
        # Gradients are means already.
        optimizer.rescale_grad = 1.0
        self._updater = mx.optimizer.get_updater(optimizer)

    def apply(self, gradients: Sequence[Array]) -> None:
        for place, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            weight = parameter.data()
            self._updater(place, mx.nd.array(gradient, ctx=weight.context, dtype=weight.dtype), weight)

    def pass_step(self) -> None:
        """Count a step that moves nothing."""
        optimizer = self.optimizer
        counts = optimizer._index_update_count
        counts.update({place: counts.get(place, 0) + 1 for place in range(len(self._parameters))})
        optimizer.num_update = max(optimizer.num_update, *counts.values())

    def variables(self) -> dict[str, Array]:
        """What the next step depends on in addition to the parameters."""
        optimizer = self.optimizer
        counts = [optimizer._index_update_count.get(i, 0) for i in range(len(self._parameters))]
        arrays = {_COUNTS: np.array([optimizer.num_update, *counts], np.int64)}
        for place, state in self._updater.states.items():
            for number, leaf in enumerate(_leaves(state)):
                arrays[f"optimizer {place}.{number}"] = leaf.asnumpy()
        schedule = sorted(_numbers(optimizer.lr_scheduler).items())
        arrays |= {f"schedule {name}": np.array(value) for name, value in schedule}
        return {**arrays, "learning rate": np.array(float(optimizer.lr))}

    def load_variables(self, arrays: Mapping[str, Array]) -> None:
        optimizer = self.optimizer
        total, *counts = arrays[_COUNTS].tolist()
        optimizer.num_update = total
        optimizer._index_update_count.update({i: n for i, n in enumerate(counts) if n})
        for place, parameter in enumerate(self._parameters):
            if not counts[place]:
                continue
            state = optimizer.create_state_multi_precision(place, parameter.data())
            leaves, prefix = list(_leaves(state)), f"optimizer {place}."
            numbers = sorted(int(name.removeprefix(prefix)) for name in arrays if name.startswith(prefix))
            kept = [arrays[f"{prefix}{number}"] for number in numbers]
            if [leaf.shape for leaf in leaves] != [array.shape for array in kept]:
                raise ConfigError(
                    "this state was saved with another optimizer: it has"
                    f" {[array.shape for array in kept]} for a parameter where this one has"
                    f" {[leaf.shape for leaf in leaves]}."
                )
            for leaf, array in zip(leaves, kept, strict=True):
                leaf[:] = mx.nd.array(array, dtype=leaf.dtype)
            self._updater.states[place], self._updater.states_synced[place] = state, True
        for name, value in _numbers(optimizer.lr_scheduler).items():
            if f"schedule {name}" in arrays:
                setattr(optimizer.lr_scheduler, name, type(value)(arrays[f"schedule {name}"].item()))
        if optimizer.lr_scheduler is None:
            optimizer.lr = float(arrays["learning rate"])


def _leaves(state: Any) -> Iterator[Any]:
    """The arrays of what an optimizer remembers of one parameter: None, an array, or nested tuples."""
    if isinstance(state, list | tuple):
        for part in state:
            yield from _leaves(part)
    elif state is not None:
        yield state


def _numbers(schedule: Any) -> dict[str, Any]:
    """What a schedule of learning rates has of numbers: where it stands."""
    known = {} if schedule is None else vars(schedule)
    return {n: v for n, v in known.items() if isinstance(v, int | float) and not isinstance(v, bool)}
