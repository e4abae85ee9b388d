"""What a user passes for MXNet, as one value that travels to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kindler.compat.frameworks.mxnet.library import mx
from kindler.errors import ConfigError
from kindler.frameworks.creators import call, title


@dataclass(frozen=True, kw_only=True)
class MxnetSpec:
    """A model and all that trains it; creators are called with the config.

    Attributes:
        config: The config, with "optimizer" and "optimizer_params".
        model_creator: Returns a Gluon block.
        loss_creator: Returns a Gluon loss. None cannot train or evaluate.
        eval_metrics_creator: Returns the metrics of training.
        validation_metrics_creator: Returns those of validation and evaluation. None takes the former.
    """

    config: dict[str, Any]
    model_creator: Callable[..., Any]
    loss_creator: Callable[..., Any] | None = None
    eval_metrics_creator: Callable[..., Any] | None = None
    validation_metrics_creator: Callable[..., Any] | None = None


def make_spec(
    *,
    config: Mapping[str, Any] | None,
    model_creator: Any,
    loss_creator: Any = None,
    eval_metrics_creator: Any = None,
    validation_metrics_creator: Any = None,
) -> MxnetSpec:
    """A spec of the arguments of `Estimator.from_mxnet`."""
    creators = {
        "model_creator": model_creator,
        "loss_creator": loss_creator,
        "eval_metrics_creator": eval_metrics_creator,
        "validation_metrics_creator": validation_metrics_creator,
    }
    complaints = list(_complaints(config, creators))
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
            " inputs) makes a block of a symbol that ends before its loss."
        )
    values = block.collect_params().values()
    if any(p._data is None and not p._deferred_init for p in values):
        block.initialize(spec.config.get("init") or mx.init.Uniform(), ctx=mx.cpu())
    return block


def build_loss(spec: MxnetSpec) -> Any:
    """The loss, called with outputs and labels."""
    loss = call(spec.loss_creator, dict(spec.config)) if spec.loss_creator is not None else None
    if not callable(loss):
        raise ConfigError(f"loss_creator must return a mxnet.gluon.loss.Loss; it returned {loss!r}.")
    return loss


def build_metrics(creator: Callable[..., Any] | None, spec: MxnetSpec) -> list[Any]:
    """The metrics that a creator returns: one, a list, or a composite of them."""
    made = call(creator, dict(spec.config)) if creator is not None else []
    return list(_flat(made))


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
        raise ConfigError(f"config: optimizer={made!r} with {options!r} cannot be made: {exc}") from exc


def _flat(metrics: Any) -> Iterator[Any]:
    if isinstance(metrics, list | tuple):
        for metric in metrics:
            yield from _flat(metric)
    elif isinstance(metrics, mx.metric.CompositeEvalMetric):
        yield from _flat(metrics.metrics)
    else:
        metric = mx.metric.create(metrics)
        yield from _flat(metric) if isinstance(metric, mx.metric.CompositeEvalMetric) else [metric]


def _complaints(config: Any, creators: Mapping[str, Any]) -> Iterator[str]:
    if config is not None and not isinstance(config, Mapping):
        yield f"config must be a dict, such as create_config() makes; received {config!r}."
    for name, creator in creators.items():
        if not callable(creator) and (creator is not None or name == "model_creator"):
            yield f"{name} must be a function of the config; received {creator!r}."
        elif isinstance(creator, mx.gluon.Block):
            yield f"{name} must be a function that returns a block, not the block itself."
