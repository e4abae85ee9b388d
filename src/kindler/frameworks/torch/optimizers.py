"""Several optimizers by name, with their schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.frameworks.torch.optim import build_optimizer, build_scheduler, step_scheduler
from kindler.frameworks.torch.parameters import group_names, load_optimizer
from kindler.frameworks.torch.spec import TorchSpec

ONLY = "optimizer"  # the name of one that was given without a name


class Optimizers:
    """Looks like one optimizer with the groups and state of all."""

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        self.named = dict(named)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.named.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """For a parameter that two of them move, the last one's."""
        return {key: value for optimizer in self.named.values() for key, value in optimizer.state.items()}

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self.named[name]

    def __iter__(self) -> Any:
        return iter(self.named)

    def kept(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
        """Includes the names of the parameters."""
        return {
            name: {"state": optimizer.state_dict(), "groups": group_names(optimizer, modules)}
            for name, optimizer in self.named.items()
        }

    def load(self, kept: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> None:
        if kept.keys() != self.named.keys():
            raise ConfigError(
                f"the state is one of the optimizers {', '.join(map(repr, kept))}, and these are"
                f" {', '.join(map(repr, self.named))}.\n"
                "Hint: name them as they were named then; or take only the weights, with Estimator.load()."
            )
        for name, optimizer in self.named.items():
            load_optimizer(optimizer, kept[name]["state"], kept[name]["groups"], modules)


class Schedules:
    def __init__(self, named: Mapping[str, Any]) -> None:
        self.named = dict(named)

    def step(self) -> None:
        for schedule in self.named.values():
            schedule.step()

    def end_epoch(self, logs: Mapping[str, float] | None) -> None:
        for schedule in self.named.values():
            step_scheduler(schedule, logs)

    def state_dict(self) -> dict[str, Any]:
        return {name: schedule.state_dict() for name, schedule in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Schedules missing from the state start anew."""
        for name in self.named.keys() & state.keys():
            self.named[name].load_state_dict(state[name])


def build_optimizers(spec: TorchSpec, model: torch.nn.Module) -> Optimizers:
    given = spec.optimizer if isinstance(spec.optimizer, Mapping) else {ONLY: spec.optimizer}
    return Optimizers(
        {str(name): build_optimizer(replace(spec, optimizer=one), model) for name, one in given.items()}
    )


def build_schedules(spec: TorchSpec, optimizers: Optimizers) -> Schedules | None:
    given = spec.scheduler_creator
    if given is None:
        return None
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(optimizers.named, given)
    return Schedules(
        {
            str(name): build_scheduler(replace(spec, scheduler_creator=creator), optimizers[str(name)])
            for name, creator in by_name.items()
        }
    )
