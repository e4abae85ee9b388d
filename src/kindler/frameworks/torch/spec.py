"""The user's PyTorch arguments as one value that travels to the workers; `replica.py` builds and runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kindler.errors import ConfigError
from kindler.frameworks.creators import call, lacking, makes, title
from kindler.frameworks.state_format import is_packed, unpack
from kindler.frameworks.torch.named_metrics import known_name, unknown_name
from kindler.frameworks.torch.state import TensorUnpickler

CLOSURE = (
    "optimizer {name} evaluates the model several times per step, through a closure; Kindler computes "
    "one gradient per step, over all workers, and cannot train with it.\n"
    "Hint: use an optimizer that needs one gradient per step, such as Adam or SGD."
)
SPARSE = (
    "optimizer SparseAdam updates only the rows of an embedding that have gradients; over several workers"
    " gradients are dense, and it cannot be used.\n"
    "Hint: use Adam with Embedding(sparse=False), SGD or Adagrad, or workers=1."
)
PLATEAU_STEP = (
    "ReduceLROnPlateau needs a metric of each epoch, so it cannot step with scheduler_step='step'.\n"
    "Hint: scheduler_step='epoch' passes it the training loss of each epoch."
)
_LAZY = (
    "the model has lazy layers whose sizes are not known yet.\n"
    "Hint: call the model once on a sample in its creator, or give the layers their sizes."
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "inputs": ("positional", "dict", "kwargs"),
    "scheduler_step": ("epoch", "step"),
    "precision": (None, "bf16", "fp16"),
    "tf32": (True, False),
    "process_group": (True, False),
    "device_cache": ("auto", True, False),
    "compile": (None, "auto", "default", "graphs", "reduce-overhead"),
}


@dataclass(frozen=True, kw_only=True)
class TorchSpec:
    """The arguments of `Estimator.from_torch`, which documents them."""

    model: Any
    optimizer: Any = None
    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    scheduler: Any = None
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "scheduler_creator" in state:  # written before 0.2
            state["scheduler"] = state.pop("scheduler_creator")
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True)
class StepSpec(TorchSpec):
    """`train_step` and `eval_step` are called with (run, batch) and return the loss or a dict of numbers.

    `optimizer` and `scheduler` may also be dicts by optimizer name.
    """

    train_step: Any = None
    eval_step: Any = None


def loads(data: bytes) -> TorchSpec:
    """A pickle of the user's objects, so it must come from our own channel."""
    # A scoring model has the memory of its tensors behind it.
    spec = TensorUnpickler(*(unpack(data) if is_packed(data) else (data, []))).load()
    if not isinstance(spec, TorchSpec):
        raise ConfigError(f"expected the bytes of a TorchSpec, received {type(spec).__name__}.")
    return spec


def against_several(spec: TorchSpec) -> list[str]:
    """Must not run a creator."""
    complaints = []
    if isinstance(spec.model, torch.nn.Module) and not spec.process_group:
        complaints = synchronized(spec.model)
    optimizers = spec.optimizer.values() if isinstance(spec.optimizer, Mapping) else [spec.optimizer]
    if any(issubclass(optimizer_kind(one), torch.optim.SparseAdam) for one in optimizers):
        complaints.append(SPARSE)
    return complaints


def missing(spec: TorchSpec, *names: str) -> list[str]:
    return [
        f"this needs {'an' if name[0] in 'aeiou' else 'a'} {name}; pass one to "
        f"Estimator.from_torch({name}=...)."
        for name in names
        if getattr(spec, name) is None
    ]


def synchronized(model: torch.nn.Module) -> list[str]:
    layers = [name for name, part in model.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    if not layers:
        return []
    complaint = (
        f"the model has SyncBatchNorm ({', '.join(map(repr, layers[:3]))}), whose statistics would need the "
        "rows of all workers in every step; workers exchange only gradients.\n"
        "Hint: use BatchNorm, which normalises by each worker's own rows of the step (a random sample of"
        " all), a layer that needs no statistics of the batch, such as GroupNorm or LayerNorm,"
        " process_group=True (on GPUs, which SyncBatchNorm needs), or workers=1."
    )
    return [complaint]


def is_creator(given: Any) -> bool:
    if isinstance(given, type):
        return True
    if isinstance(given, torch.nn.Module):
        return False
    return (inspect.isroutine(given) or isinstance(given, functools.partial)) and makes(given)


def is_optimizer_class(given: Any) -> bool:
    """Also true for a partial of a class."""
    return _is_class(given, torch.optim.Optimizer)


def needs_closure(optimizer: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _inner(given: Any) -> Any:
    while isinstance(given, functools.partial):
        given = given.func
    return given


def _is_class(given: Any, base: type) -> bool:
    given = _inner(given)
    return isinstance(given, type) and issubclass(given, base)


def optimizer_kind(given: Any) -> type:
    inner = _inner(given)
    return inner if isinstance(inner, type) else type(given)


def _is_lazy(module: torch.nn.Module) -> bool:
    lazy = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
    return any(isinstance(tensor, lazy) for tensor in (*module.parameters(), *module.buffers()))


def build_model(spec: TorchSpec) -> torch.nn.Module:
    model = spec.model
    if not isinstance(model, torch.nn.Module):
        model = call(spec.model, spec.config)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"{title(spec.model)} must return a torch.nn.Module, it returned {model!r}.")
    if _is_lazy(model):
        raise ConfigError(_LAZY)
    return model


def unfit_inputs(model: torch.nn.Module, columns: Sequence[str]) -> str | None:
    """Why the model cannot be called with these columns."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*columns)
    except TypeError as exc:
        hint, s = "name the columns of all its inputs in feature_cols.", ""
        if len(columns) > 1:
            hint = "columns=Columns(stack_features=True) joins them into one matrix; else each is one tensor."
            s = "s"
        return (
            f"{type(model).__qualname__}.forward({', '.join(signature.parameters)}) is called with"
            f" {len(columns)} input{s}, the column{s} {', '.join(map(repr, columns))}: {exc}.\nHint: {hint}"
        )
    return None


def build_loss(spec: TorchSpec) -> Any:
    if spec.loss is None:
        raise ConfigError(
            "training and evaluation need a loss.\nHint: pass a loss, such as loss=torch.nn.MSELoss()."
        )
    loss = call(spec.loss, spec.config) if is_creator(spec.loss) else spec.loss
    if not callable(loss):
        raise ConfigError(f"the loss must be callable with (outputs, targets); received {loss!r}.")
    return loss


def no_metric(given: Any) -> str:
    return (
        "a metric must be a torchmetrics.Metric, a function of (outputs, targets) or a name such as"
        f" 'accuracy'; received {title(given)}."
    )


def check(spec: TorchSpec) -> list[str]:
    """Must not run a creator."""
    complaints = [*_model_complaints(spec), *_other_complaints(spec)]
    if not isinstance(spec, StepSpec):
        return [*complaints, *_optimizer_complaints(spec)]
    optimizers = spec.optimizer if isinstance(spec.optimizer, Mapping) else None
    if optimizers is None:
        complaints += _optimizer_complaints(spec)
    for name, optimizer in (optimizers or {}).items():
        own = _optimizer_complaints(replace(spec, optimizer=optimizer, scheduler=None))
        complaints += [f"optimizer[{name!r}]: {complaint}" for complaint in own]
    return [*complaints, *_step_complaints(spec, optimizers)]


def _model_complaints(spec: TorchSpec) -> Iterator[str]:
    if not callable(spec.model):
        yield f"model must be a torch.nn.Module or a function that returns one; received {spec.model!r}."
    if isinstance(spec.model, torch.nn.Module) and _is_lazy(spec.model):
        yield _LAZY
    for name, choices in _CHOICES.items():
        if repr(getattr(spec, name)) not in (shown := [repr(choice) for choice in choices]):
            yield (
                f"{name} must be {', '.join(shown[:-1])} or {shown[-1]}; received {getattr(spec, name)!r}."
            )


def _optimizer_complaints(spec: TorchSpec) -> Iterator[str]:
    optimizer, scheduler = spec.optimizer, spec.scheduler
    kind = optimizer_kind(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from _instance_complaints(spec, optimizer)
    elif optimizer is not None and not callable(optimizer):
        yield (
            "optimizer must be a torch.optim.Optimizer, a class of one, or a function of (model, config);"
            f" received {optimizer!r}."
        )
    elif isinstance(_inner(optimizer), type) and not is_optimizer_class(optimizer):
        yield (
            f"optimizer is the class {kind.__name__}, which is not a torch.optim.Optimizer."
            " Pass a function of (model, config) that returns an Optimizer."
        )
    elif is_optimizer_class(optimizer) and (needed := lacking(optimizer, "params")):
        yield (
            f"optimizer {kind.__name__} needs {', '.join(map(repr, needed))} in addition to the "
            f"parameters. Bind"
            f" it, as in functools.partial({kind.__name__}, {needed[0]}=...); or pass a function of (model,"
            " config)."
        )
    if issubclass(kind, torch.optim.Optimizer) and needs_closure(kind):
        yield CLOSURE.format(name=kind.__name__)
    if scheduler is not None and optimizer is None:
        yield "scheduler needs an optimizer to schedule; none was passed."
    if scheduler is not None and not callable(scheduler):
        yield f"scheduler must be callable with (optimizer, config); received {scheduler!r}."
    if spec.scheduler_step == "step" and _is_class(scheduler, ReduceLROnPlateau):
        yield PLATEAU_STEP


def _instance_complaints(spec: TorchSpec, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    name, model = type(optimizer).__name__, spec.model
    if not isinstance(model, torch.nn.Module):
        yield (
            f"optimizer is a ready {name}, but the model comes from a creator: it cannot hold its parameters."
            " Pass a function of (model, config) that returns the optimizer."
        )
        return
    losses = [spec.loss] if isinstance(spec.loss, torch.nn.Module) else []
    own = {id(parameter) for module in (model, *losses) for parameter in module.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in own for parameter in held):
        yield (
            f"optimizer {name} holds {foreign} of {len(held)} parameters that are not the model's. Build it"
            " from model.parameters() of the same model, and perhaps loss.parameters() of the same loss."
        )


def _other_complaints(spec: TorchSpec) -> Iterator[str]:
    metrics, loss = spec.metrics, spec.loss
    if isinstance(metrics, Mapping) and not isinstance(metrics, torch.nn.Module):
        metrics = list(metrics.values())
    for metric in metrics if isinstance(metrics, list | tuple | set) else [metrics]:
        if isinstance(metric, str) and not known_name(metric):
            yield unknown_name(metric)
        elif metric is not None and not isinstance(metric, str) and not callable(metric):
            yield no_metric(metric)
    if isinstance(loss, list | tuple | Mapping):
        yield from _several_losses_complaints(spec)
    elif loss is not None and loss != "model" and not callable(loss):
        what = "a module, a function of (outputs, targets), a creator or 'model'"
        yield f"loss must be {what}; received {loss!r}."
    if spec.loss_weights is not None and not isinstance(loss, list | tuple | Mapping):
        yield "loss_weights belong to a list or dict of losses, one for each output of the model."
    if loss == "model" and spec.inputs == "positional":
        yield (
            "loss='model' passes labels to the model by name, so it needs inputs='kwargs' (or 'dict');"
            f" received inputs={spec.inputs!r}."
        )
    if not isinstance(spec.config, Mapping):
        yield f"config must be a dict; received {spec.config!r}."
    if not isinstance(spec.accumulation_steps, int) or spec.accumulation_steps < 1:
        yield f"accumulation_steps must be a whole number from 1; received {spec.accumulation_steps!r}."
    for name in ("clip_norm", "clip_value"):
        limit = getattr(spec, name)
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            yield f"{name} must be a number above 0 or None; received {limit!r}."


def _several_losses_complaints(spec: TorchSpec) -> Iterator[str]:
    named = isinstance(spec.loss, Mapping)
    losses = dict(spec.loss) if named else dict(enumerate(spec.loss))
    if not losses:
        yield f"loss={spec.loss!r}: it contains no loss."
    for key, loss in losses.items():
        if not callable(loss):
            what = "a module, a function of (output, target) or a creator"
            yield f"loss[{key!r}] must be {what}; received {loss!r}."
        elif isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
            yield f"loss[{key!r}] has its own parameters; only a single loss may learn."
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


def _step_complaints(spec: StepSpec, optimizers: Mapping[str, Any] | None) -> Iterator[str]:
    for name in ("train_step", "eval_step"):
        given = getattr(spec, name)
        if given is not None and not callable(given):
            yield f"{name} must be a function of (run, batch); received {given!r}."
    if spec.train_step is None and spec.eval_step is not None:
        yield "eval_step belongs to a train_step; without one, pass a loss and metrics."
    if spec.eval_step is not None and spec.metrics:
        yield "metrics and eval_step: eval_step returns all metrics itself; pass one of them."
    if optimizers is not None:
        yield from _several_optimizers_complaints(spec.scheduler, optimizers)
    elif isinstance(spec.scheduler, Mapping):
        yield "scheduler is a dict, but there is one optimizer, which has no name; pass a function."
    if spec.loss == "model" and spec.train_step is not None:
        yield "loss='model' and train_step: the step computes the loss itself; pass one of them."
    if spec.accumulation_steps != 1:
        yield (
            "accumulation_steps: train_step decides itself when it calls run.backward and run.update; leave"
            f" accumulation_steps=1; received {spec.accumulation_steps!r}."
        )
    if spec.precision == "fp16":
        yield "precision='fp16' scales losses, which your own train_step does not; use precision='bf16'."
    if spec.compile is not None:
        yield f"compile={spec.compile!r}: call torch.compile on the parts of the model in their creator."


def _several_optimizers_complaints(schedules: Any, optimizers: Mapping[str, Any]) -> Iterator[str]:
    if not optimizers or not all(isinstance(name, str) and name for name in optimizers):
        yield f"optimizer must be an optimizer, or a dict of optimizers by name; received {optimizers!r}."
    for name, optimizer in optimizers.items():
        if optimizer is None:
            yield f"optimizer[{name!r}] is None."
        elif len(optimizers) > 1 and is_optimizer_class(optimizer):
            yield (
                f"optimizer[{name!r}] is a class, which would get all parameters of the model.\n"
                "Hint: pass a function of (model, config) that returns an optimizer of some of them."
            )
    if isinstance(schedules, Mapping):
        for name, creator in schedules.items():
            if name not in optimizers:
                known = list(optimizers)
                yield f"scheduler[{name!r}]: there is no optimizer of that name, only {known}."
            elif not callable(creator):
                yield f"scheduler[{name!r}] must be callable with (optimizer, config)."
    elif schedules is not None and not callable(schedules):
        yield f"scheduler must be callable with (optimizer, config); received {schedules!r}."
