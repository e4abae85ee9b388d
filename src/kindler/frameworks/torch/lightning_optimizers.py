"""What a LightningModule's `configure_optimizers` returns, in any of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kindler.errors import ConfigError
from kindler.frameworks.torch.optim import step_optimizer
from kindler.frameworks.torch.optimizers import Optimizers, Schedules
from kindler.frameworks.torch.spec import CLOSURE, needs_closure

_KNOWN = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


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
            elif (figure := _figure(logs, one.monitor)) is not None:
                one.scheduler.step(figure)
            elif one.strict:
                raise ConfigError(
                    f"ReduceLROnPlateau monitors {one.monitor!r}, and the epoch's figures are"
                    f" {', '.join(map(repr, logs))}."
                )


def _figure(logs: Mapping[str, float], name: str | None) -> float | None:
    """Validation metrics are also found with the prefix "val_"."""
    for known in (str(name), f"val_{str(name).removeprefix('val/')}"):
        if known in logs:
            return float(logs[known])
    return None


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
    if not isinstance(schedule, Mapping):
        schedule = {"scheduler": schedule}
    if "monitor" in given:
        schedule = {"monitor": given["monitor"], **schedule}
    return [given["optimizer"]], [schedule]


def _schedule(given: Any) -> Schedule:
    if not isinstance(given, Mapping):
        given = {"scheduler": given}
    unknown = sorted(set(given) - _KNOWN)
    if unknown or not hasattr(given.get("scheduler"), "step"):
        raise ConfigError(
            f"configure_optimizers returned {dict(given)!r} as a scheduler; it must be one, or a dict with"
            f" 'scheduler' and any of {sorted(_KNOWN - {'scheduler'})}."
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
        toggled: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        self.optimizer, self._before, self._toggled = optimizer, before, toggled

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = closure() if closure is not None else None
        self._before(self.optimizer)
        step_optimizer(self.optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        with self._toggled(self.optimizer):
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
