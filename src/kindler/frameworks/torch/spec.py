"""The user's PyTorch arguments as one value that travels to the workers; `replica.py` builds and runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import cloudpickle
import torch

from kindler.errors import ConfigError
from kindler.frameworks.creators import call, lacking, makes, title
from kindler.frameworks.pickling import pickle_for_workers
from kindler.frameworks.state_format import is_packed, unpack
from kindler.frameworks.torch.state import TensorUnpickler

CLOSURE = (
    "optimizer {name} evaluates the model several times a step, through a closure; Kindler computes one"
    " gradient a"
    " step, over all workers, and cannot train with it.\nHint: use an optimizer of one gradient a step,"
    " as Adam or SGD."
)
SPARSE = (
    "optimizer SparseAdam moves only the rows of an embedding that a gradient has; over several workers"
    " gradients are"
    " dense, and it cannot be used.\nHint: use Adam with Embedding(sparse=False), SGD or Adagrad, or"
    " workers=1."
)
PLATEAU_STEP = (
    "ReduceLROnPlateau waits for a figure of each epoch, so it cannot move with scheduler_step='step'.\n"
    "Hint: scheduler_step='epoch' shows it the training loss of each epoch."
)
_COMPILE = ("auto", "default", "graphs", "reduce-overhead")
_LAZY = (
    "the model has lazy layers whose sizes are not known yet.\n"
    "Hint: call the model once on a sample in its creator, or give the layers their sizes."
)


@dataclass(frozen=True, kw_only=True)
class TorchSpec:
    """The arguments of `Estimator.from_torch`, which documents them."""

    model: Any
    optimizer: Any = None
    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    scheduler_creator: Any = None
    scheduler_step: Literal["epoch", "step"] = "epoch"
    config: dict[str, Any] = field(default_factory=dict)
    precision: Literal["bf16", "fp16"] | None = None
    tf32: bool = False
    process_group: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulation_steps: int = 1
    inputs: Literal["positional", "dict", "kwargs"] = "positional"
    compile: Literal["auto", "default", "graphs", "reduce-overhead"] | None = None
    device_cache: Literal["auto"] | bool = "auto"


def dumps(spec: TorchSpec) -> bytes:
    """A model and an optimizer over its parameters stay together."""
    return pickle_for_workers(spec)


def loads(data: bytes) -> TorchSpec:
    """A pickle of the user's objects, so it must come from our own channel."""
    # A scoring model has the memory of its tensors behind it.
    spec = TensorUnpickler(*unpack(data)).load() if is_packed(data) else cloudpickle.loads(data)
    if not isinstance(spec, TorchSpec):
        raise ConfigError(f"expected the bytes of a TorchSpec, received {type(spec).__name__}.")
    return spec


def check(spec: TorchSpec) -> list[str]:
    """Must not run a creator."""
    return [*_model_complaints(spec), *_optimizer_complaints(spec), *_other_complaints(spec)]


def against_several(spec: TorchSpec) -> list[str]:
    """Must not run a creator."""
    complaints = [] if spec.process_group else _synchronized_instance(spec.model)
    if issubclass(optimizer_kind(spec.optimizer), torch.optim.SparseAdam):
        complaints.append(SPARSE)
    return complaints


def _synchronized_instance(model: Any) -> list[str]:
    return synchronized(model) if isinstance(model, torch.nn.Module) else []


def missing(spec: TorchSpec, *names: str) -> list[str]:
    return [
        f"this needs {'an' if name[0] in 'aeiou' else 'a'} {name}; give one to"
        f" Estimator.from_torch({name}=...)."
        for name in names
        if getattr(spec, name) is None
    ]


def synchronized(model: torch.nn.Module) -> list[str]:
    found = [name for name, part in model.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    if not found:
        return []
    complaint = (
        f"the model has SyncBatchNorm ({', '.join(map(repr, found[:3]))}), whose statistics would have to be"
        " those of all workers' rows in every step; workers exchange gradients alone.\n"
        "Hint: use BatchNorm, which normalises by each worker's own rows of the step (a random sample of"
        " all), a layer that needs no statistics of the batch, such as GroupNorm or LayerNorm,"
        " process_group=True (on GPUs, which SyncBatchNorm needs), or workers=1."
    )
    return [complaint]


def is_creator(given: Any) -> bool:
    if isinstance(given, type):
        return True
    if isinstance(given, torch.nn.Module) or not callable(given):
        return False
    if not (inspect.isroutine(given) or isinstance(given, functools.partial)):
        return False
    return makes(given)


def is_optimizer_class(given: Any) -> bool:
    """Also true for a partial of a class."""
    given = _inner(given)
    return isinstance(given, type) and issubclass(given, torch.optim.Optimizer)


def needs_closure(optimizer: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _inner(given: Any) -> Any:
    while isinstance(given, functools.partial):
        given = given.func
    return given


def optimizer_kind(given: Any) -> type:
    inner = _inner(given)
    return inner if isinstance(inner, type) else type(given)


def _is_lazy(module: torch.nn.Module) -> bool:
    lazy = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
    return any(isinstance(tensor, lazy) for tensor in (*module.parameters(), *module.buffers()))


def build_model(spec: TorchSpec) -> torch.nn.Module:
    model = spec.model
    if not isinstance(model, torch.nn.Module):
        made = call(model, spec.config)
        if not isinstance(made, torch.nn.Module):
            raise ConfigError(f"{title(model)} must return a torch.nn.Module, it returned {made!r}.")
        model = made
    if _is_lazy(model):
        raise ConfigError(_LAZY)
    return model


def unfit_inputs(model: torch.nn.Module, columns: Sequence[str]) -> str | None:
    """None if it can."""
    try:
        inspect.signature(model.forward).bind(*columns)
    except TypeError as exc:
        takes = ", ".join(inspect.signature(model.forward).parameters)
        hint = (
            "stack_features=True joins the columns to one matrix; else the model gets one tensor a column."
            if len(columns) > 1
            else "name the columns of all its inputs in feature_cols."
        )
        return (
            f"{type(model).__qualname__}.forward({takes}) is called with {len(columns)}"
            f" input{'s' if len(columns) > 1 else ''}, the column{'s' if len(columns) > 1 else ''}"
            f" {', '.join(map(repr, columns))}: {exc}.\nHint: {hint}"
        )
    return None


def build_loss(spec: TorchSpec) -> Any:
    if spec.loss is None:
        raise ConfigError("training and evaluation need a loss.\nHint: pass loss=torch.nn.MSELoss(), say.")
    loss = call(spec.loss, spec.config) if is_creator(spec.loss) else spec.loss
    if not callable(loss):
        raise ConfigError(f"the loss must be callable with (outputs, targets); received {loss!r}.")
    return loss


def _model_complaints(spec: TorchSpec) -> Iterator[str]:
    if not callable(spec.model):
        yield f"model must be a torch.nn.Module or a function that returns one; received {spec.model!r}."
    if isinstance(spec.model, torch.nn.Module) and _is_lazy(spec.model):
        yield _LAZY
    if spec.inputs not in ("positional", "dict", "kwargs"):
        yield f"inputs must be 'positional', 'dict' or 'kwargs'; received {spec.inputs!r}."


def _optimizer_complaints(spec: TorchSpec) -> Iterator[str]:
    optimizer = spec.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from _instance_complaints(spec, optimizer)
    elif optimizer is not None and not callable(optimizer):
        yield (
            "optimizer must be a torch.optim.Optimizer, a class of one, or a function of (model, config);"
            f" received {optimizer!r}."
        )
    elif isinstance(_inner(optimizer), type):
        yield from _class_complaints(optimizer)
    kind = optimizer_kind(optimizer)
    if issubclass(kind, torch.optim.Optimizer) and needs_closure(kind):
        yield CLOSURE.format(name=kind.__name__)
    if spec.scheduler_creator is not None and optimizer is None:
        yield "scheduler_creator needs an optimizer to schedule; none was given."
    if spec.scheduler_creator is not None and not callable(spec.scheduler_creator):
        given = spec.scheduler_creator
        yield f"scheduler_creator must be callable with (optimizer, config); received {given!r}."
    if spec.scheduler_step not in ("epoch", "step"):
        yield f"scheduler_step must be 'epoch' or 'step'; received {spec.scheduler_step!r}."
    if spec.scheduler_step == "step" and _is_plateau(spec.scheduler_creator):
        yield PLATEAU_STEP


def _is_plateau(given: Any) -> bool:
    given = _inner(given)
    return isinstance(given, type) and issubclass(given, torch.optim.lr_scheduler.ReduceLROnPlateau)


def _class_complaints(given: Any) -> Iterator[str]:
    """A class is called with the model's parameters alone."""
    name = _inner(given).__name__
    if not is_optimizer_class(given):
        yield (
            f"optimizer is the class {name}, which is none of torch.optim.Optimizer."
            " Pass a function of (model, config) that returns an Optimizer."
        )
    elif missing := lacking(given, "params"):
        yield (
            f"optimizer {name} needs {', '.join(map(repr, missing))} besides the parameters."
            f" Bind it, as in functools.partial({name}, {missing[0]}=...); or pass a function of (model,"
            f" config)."
        )


def _instance_complaints(spec: TorchSpec, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    name, model = type(optimizer).__name__, spec.model
    if not isinstance(model, torch.nn.Module):
        yield (
            f"optimizer is a ready {name}, but the model is made by a creator: it cannot hold its parameters."
            " Pass a function of (model, config) that returns the optimizer."
        )
        return
    losses = [spec.loss] if isinstance(spec.loss, torch.nn.Module) else []
    own = {id(parameter) for module in (model, *losses) for parameter in module.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        yield (
            f"optimizer {name} holds {foreign} of {len(held)} parameters that are not the model's."
            " Build it from model.parameters() of the same model, and perhaps loss.parameters() of the"
            " same loss."
        )


def no_metric(given: Any) -> str:
    return (
        "a metric must be a torchmetrics.Metric, a function of (outputs, targets) or a name such as"
        f" 'accuracy'; received {title(given)}."
    )


def _metric_complaints(metrics: Any) -> Iterator[str]:
    from kindler.frameworks.torch.named_metrics import known_name, unknown_name  # which knows of losses

    if isinstance(metrics, Mapping) and not isinstance(metrics, torch.nn.Module):
        metrics = list(metrics.values())
    for metric in metrics if isinstance(metrics, list | tuple | set) else [metrics]:
        if isinstance(metric, str):
            if not known_name(metric):
                yield unknown_name(metric)
        elif metric is not None and not callable(metric):
            yield no_metric(metric)


def _single_complaints(spec: TorchSpec) -> Iterator[str]:
    if spec.loss_weights is not None:
        yield "loss_weights belong to a list or dict of losses, one for each output of the model."


def _several_complaints(spec: TorchSpec) -> Iterator[str]:
    named = isinstance(spec.loss, Mapping)
    losses = dict(spec.loss) if named else dict(enumerate(spec.loss))
    if not losses:
        yield f"loss={spec.loss!r}: there is no loss in it."
    for key, loss in losses.items():
        if not callable(loss):
            yield (
                f"loss[{key!r}] must be a module, a function of (output, target) or a creator; received"
                f" {loss!r}."
            )
        elif isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
            yield f"loss[{key!r}] has parameters of its own; only a single loss may learn."
    if spec.accumulation_steps != 1:
        yield "accumulation_steps: with several losses it must be 1."
    weights = spec.loss_weights
    if weights is None:
        return
    fits = isinstance(weights, Mapping) if named else isinstance(weights, list | tuple)
    if not fits or (not named and len(weights) != len(losses)):
        yield (
            f"loss_weights must be a {'dict' if named else 'list'} like loss, with a number for each of the"
            f" {len(losses)}; received {weights!r}."
        )
        return
    for key, weight in (dict(weights) if named else dict(enumerate(weights))).items():
        if key not in losses:
            yield f"loss_weights[{key!r}]: there is no loss of that name, only {list(losses)}."
        elif isinstance(weight, bool) or not isinstance(weight, int | float):
            yield f"loss_weights[{key!r}] must be a number; received {weight!r}."


def _other_complaints(spec: TorchSpec) -> Iterator[str]:
    yield from _metric_complaints(spec.metrics)
    several = isinstance(spec.loss, list | tuple | Mapping)
    yield from _several_complaints(spec) if several else _single_complaints(spec)
    if spec.loss is not None and spec.loss != "model" and not callable(spec.loss) and not several:
        yield (
            "loss must be a module, a function of (outputs, targets), a creator or 'model'; received"
            f" {spec.loss!r}."
        )
    if spec.loss == "model" and spec.inputs == "positional":
        yield (
            "loss='model' passes labels to the model by name, so it needs inputs='kwargs' (or 'dict');"
            f" received inputs={spec.inputs!r}."
        )
    if not isinstance(spec.config, Mapping):
        yield f"config must be a dict; received {spec.config!r}."
    if spec.precision not in (None, "bf16", "fp16"):
        yield f"precision must be None, 'bf16' or 'fp16'; received {spec.precision!r}."
    for name in ("tf32", "process_group"):
        if not isinstance(getattr(spec, name), bool):
            yield f"{name} must be True or False; received {getattr(spec, name)!r}."
    if spec.device_cache not in ("auto", True, False):
        yield f"device_cache must be 'auto', True or False; received {spec.device_cache!r}."
    if spec.compile not in (None, *_COMPILE):
        yield f"compile must be None or one of {', '.join(map(repr, _COMPILE))}; received {spec.compile!r}."
    if not isinstance(spec.accumulation_steps, int) or spec.accumulation_steps < 1:
        yield f"accumulation_steps must be a whole number from 1; received {spec.accumulation_steps!r}."
    for name in ("clip_norm", "clip_value"):
        limit = getattr(spec, name)
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            yield f"{name} must be a number above 0 or None; received {limit!r}."
