"""What a LightningModule and what its `configure_optimizers` returns may be; imports no Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kindler.errors import ConfigError
from kindler.frameworks.torch.optim import Optimizers, Schedules, step_optimizer
from kindler.frameworks.torch.spec import CLOSURE, StepSpec, TorchSpec, check, needs_closure

_BATCHES = ("tuple", "dict")
_UNSUPPORTED = {
    "optimizer_step": "set automatic_optimization = False and step in training_step",
    "optimizer_zero_grad": "set automatic_optimization = False and clear gradients in training_step",
    "backward": "set automatic_optimization = False and call self.manual_backward",
    "lr_scheduler_step": "return schedulers with 'interval' and 'frequency' from configure_optimizers",
    "configure_gradient_clipping": "pass clip_norm=... or clip_value=... to from_lightning",
    "configure_callbacks": "pass kindler.Callback objects to fit(callbacks=[...])",
    "transfer_batch_to_device": "pass transform=... or collate=... to from_lightning",
    "on_before_batch_transfer": "pass transform=... or collate=... to from_lightning",
    "on_after_batch_transfer": "do it in training_step",
    "on_save_checkpoint": "keep what must be saved in buffers of the module",
    "on_load_checkpoint": "keep what must be saved in buffers of the module",
    "prepare_data": "prepare the data before fit",
    "on_fit_end": "pass a kindler.Callback with on_run_end to fit",
    "on_train_end": "pass a kindler.Callback with on_run_end to fit",
    "teardown": "pass a kindler.Callback with on_run_end to fit",
    "configure_sharded_model": "fit(sync='sharded') is for plain PyTorch models",
}
_NEEDS_LIGHTNING = ("dataloader_iter", "optimizer_idx")
_OF_SCHEDULE = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


def configured_by_module(model: Any, config: Any) -> Any:
    """Stands for the optimizer in a spec."""
    return model.configure_optimizers()


@dataclass(frozen=True, kw_only=True)
class LightningSpec(StepSpec):
    """Steps receive a "tuple" of columns (a single one bare), or a "dict" by name."""

    optimizer: Any = configured_by_module
    batch: str = "tuple"


def base_of(cls: type) -> type | None:
    """Of the package lightning or pytorch_lightning."""
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        if base.__name__ == "LightningModule" and package in ("lightning", "pytorch_lightning"):
            return base
    return None


def overrides(cls: type, name: str) -> bool:
    base = base_of(cls)
    return getattr(cls, name, None) is not getattr(base, name, None)


def check_lightning(spec: Any) -> list[str]:
    own = ("model", "config", "precision", "tf32", "clip_norm", "clip_value", "device_cache")
    return [*check(TorchSpec(**{name: getattr(spec, name) for name in own})), *_complaints(spec)]


def _complaints(spec: LightningSpec) -> Iterator[str]:
    if spec.batch not in _BATCHES:
        yield f"batch must be 'tuple' or 'dict'; received {spec.batch!r}."
    if spec.precision == "fp16":
        yield "precision='fp16' scales losses, which is not supported here; use precision='bf16'."
    if isinstance(spec.model, torch.nn.Module):
        yield from against_module(spec.model)
    elif isinstance(spec.model, type) and base_of(spec.model) is not None:
        yield from _class_complaints(spec.model)


def against_module(module: torch.nn.Module) -> Iterator[str]:
    if base_of(type(module)) is None:
        yield (
            f"from_lightning needs a LightningModule; received {type(module).__name__}.\n"
            "Hint: Estimator.from_torch takes any other module."
        )
        return
    yield from _class_complaints(type(module))


def _class_complaints(cls: type) -> Iterator[str]:
    for name, instead in _UNSUPPORTED.items():
        if overrides(cls, name):
            yield f"{cls.__name__}.{name} is not supported.\nHint: {instead}."
    for step in ("training_step", "validation_step", "predict_step"):
        if not overrides(cls, step):
            continue
        for name in _NEEDS_LIGHTNING:
            if name in inspect.signature(getattr(cls, step)).parameters:
                yield (
                    f"{cls.__name__}.{step} takes {name!r}, which is not supported; it is called with (batch,"
                    " batch_idx)."
                )


def missing_in_module(spec: Any, *names: str) -> list[str]:
    model = spec.model
    cls = type(model) if isinstance(model, torch.nn.Module) else model if isinstance(model, type) else None
    if cls is None or base_of(cls) is None:
        return []
    needed = ("training_step", "configure_optimizers") if "optimizer" in names else ("validation_step",)
    return [f"{cls.__name__} has no {name}, which this needs." for name in needed if not overrides(cls, name)]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`monitor` is for ReduceLROnPlateau; `strict` makes its absence an error."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True


class LightningSchedules(Schedules):
    def __init__(self, schedules: list[Schedule]) -> None:
        super().__init__({str(place): one.scheduler for place, one in enumerate(schedules)})
        self.all = schedules

    def after_batch(self, number: int) -> None:
        """`number` counts the epoch's batches from 1."""
        for one in self.all:
            if one.interval == "step" and number % one.frequency == 0:
                one.scheduler.step()

    def after_epoch(self, number: int, logs: Mapping[str, float]) -> None:
        """`number` counts epochs from 1."""
        for one in self.all:
            if one.interval != "epoch" or number % one.frequency:
                continue
            if not isinstance(one.scheduler, ReduceLROnPlateau):
                one.scheduler.step()
                continue
            # Validation metrics are also found with the prefix "val_".
            names = (str(one.monitor), f"val_{str(one.monitor).removeprefix('val/')}")
            if known := [name for name in names if name in logs]:
                one.scheduler.step(float(logs[known[0]]))
            elif one.strict:
                raise ConfigError(
                    f"ReduceLROnPlateau monitors {one.monitor!r}, and the epoch's figures are"
                    f" {', '.join(map(repr, logs))}."
                )


def configured(returned: Any) -> tuple[Optimizers, list[Schedule]]:
    optimizers, schedules = _parted(returned)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise _unknown(returned)
        if needs_closure(type(optimizer)):
            raise ConfigError(CLOSURE.format(name=type(optimizer).__name__))
    named = {str(place): optimizer for place, optimizer in enumerate(optimizers)}
    return Optimizers(named), [_schedule(one) for one in schedules]


def _parted(returned: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(returned, torch.optim.Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _of_dict(returned)
    if not isinstance(returned, list | tuple) or not returned:
        raise _unknown(returned)
    if len(returned) == 2 and all(isinstance(part, list | tuple) for part in returned):
        return list(returned[0]), list(returned[1])
    if all(isinstance(part, Mapping) for part in returned):
        parts = [_of_dict(part) for part in returned]
        return [one for each, _ in parts for one in each], [one for _, each in parts for one in each]
    return list(returned), []


def _of_dict(given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    if "optimizer" not in given or set(given) - {"optimizer", "lr_scheduler", "monitor"}:
        raise _unknown(given)
    schedule = given.get("lr_scheduler")
    if schedule is None:
        return [given["optimizer"]], []
    schedule = schedule if isinstance(schedule, Mapping) else {"scheduler": schedule}
    monitor = {"monitor": given["monitor"]} if "monitor" in given else {}
    return [given["optimizer"]], [{**monitor, **schedule}]


def _schedule(given: Any) -> Schedule:
    if not isinstance(given, Mapping):
        given = {"scheduler": given}
    unknown = sorted(set(given) - _OF_SCHEDULE)
    if unknown or not hasattr(given.get("scheduler"), "step"):
        raise ConfigError(
            f"configure_optimizers returned {dict(given)!r} as a scheduler; it must be one, or a dict with"
            f" 'scheduler' and any of {sorted(_OF_SCHEDULE - {'scheduler'})}."
        )
    kept = {name: given[name] for name in given if name not in ("name", "reduce_on_plateau")}
    made = Schedule(**kept)
    if made.interval not in ("epoch", "step") or not isinstance(made.frequency, int) or made.frequency < 1:
        raise ConfigError(
            "a scheduler's 'interval' is 'epoch' or 'step', and its 'frequency' a whole number from 1;"
            f" received {made.interval!r} and {made.frequency!r}."
        )
    if isinstance(made.scheduler, ReduceLROnPlateau) and (made.monitor is None or made.interval == "step"):
        raise ConfigError(
            "ReduceLROnPlateau needs a figure of each epoch: return"
            " {'scheduler': ..., 'monitor': 'val_loss'}, with interval='epoch'."
        )
    return made


def _unknown(returned: Any) -> ConfigError:
    return ConfigError(
        "configure_optimizers must return an optimizer, several, ([optimizers], [schedulers]), or a dict with"
        f" 'optimizer' and 'lr_scheduler'; it returned {returned!r}."
    )


class ManualOptimizer:
    """Returned by `self.optimizers()` in a module that steps itself."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[torch.optim.Optimizer], None],
        toggled: Callable[[torch.optim.Optimizer], AbstractContextManager[None]],
    ) -> None:
        self.optimizer, self._before, self._toggled = optimizer, before, toggled

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = closure() if closure is not None else None
        self._before(self.optimizer)
        step_optimizer(self.optimizer)
        return result

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        return self._toggled(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
