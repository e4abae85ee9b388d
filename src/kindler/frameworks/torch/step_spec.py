"""The user's own training step, perhaps with several optimizers by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kindler.frameworks.torch.spec import TorchSpec, check, is_optimizer_class, missing


@dataclass(frozen=True, kw_only=True)
class StepSpec(TorchSpec):
    """`train_step` and `eval_step` are called with (run, batch) and return the loss or a dict of numbers.

    `optimizer` and `scheduler_creator` may also be dicts by optimizer name.
    """

    train_step: Any = None
    eval_step: Any = None


def check_step(spec: StepSpec) -> list[str]:
    several = spec.optimizer if isinstance(spec.optimizer, Mapping) else None
    if several is None:
        complaints = check(spec)
    else:
        # Each optimizer by itself, the rest once.
        complaints = check(replace(spec, optimizer=None, scheduler_creator=None))
        for name, optimizer in several.items():
            alone = replace(spec, optimizer=optimizer, scheduler_creator=None)
            told = [c for c in check(alone) if c not in complaints]
            complaints += [f"optimizer[{name!r}]: {complaint}" for complaint in told]
    return [*complaints, *_complaints(spec, several)]


def _complaints(spec: StepSpec, several: Mapping[str, Any] | None) -> Iterator[str]:
    for name in ("train_step", "eval_step"):
        given = getattr(spec, name)
        if given is not None and not callable(given):
            yield f"{name} must be a function of (run, batch); received {given!r}."
    if spec.train_step is None and spec.eval_step is not None:
        yield "eval_step belongs to a train_step; without one, give a loss and metrics."
    if spec.eval_step is not None and spec.metrics:
        yield "metrics and eval_step: eval_step returns all figures itself; pass one of them."
    if several is not None:
        yield from _several_complaints(spec, several)
    elif isinstance(spec.scheduler_creator, Mapping):
        yield "scheduler_creator is a dict, but there is one optimizer, which has no name; pass a function."
    if spec.loss == "model" and spec.train_step is not None:
        yield "loss='model' and train_step: the step computes the loss itself; pass one of them."
    if spec.accumulation_steps != 1:
        yield (
            "accumulation_steps: train_step decides itself when it calls run.backward and run.update; leave"
            f" accumulation_steps=1; received {spec.accumulation_steps!r}."
        )
    if spec.precision == "fp16":
        yield "precision='fp16' scales losses, which train_step does not; use precision='bf16'."
    if spec.compile is not None:
        yield f"compile={spec.compile!r}: call torch.compile on the parts of the model in their creator."


def _several_complaints(spec: StepSpec, several: Mapping[str, Any]) -> Iterator[str]:
    if not several or not all(isinstance(name, str) and name for name in several):
        yield f"optimizer must be an optimizer, or a dict of optimizers by name; received {several!r}."
    for name, optimizer in several.items():
        if optimizer is None:
            yield f"optimizer[{name!r}] is None."
        elif len(several) > 1 and is_optimizer_class(optimizer):
            yield (
                f"optimizer[{name!r}] is a class, which would get all parameters of the model.\n"
                "Hint: pass a function of (model, config) that returns an optimizer of some of them."
            )
    schedules = spec.scheduler_creator
    if schedules is None:
        return
    if not isinstance(schedules, Mapping):
        if not callable(schedules):
            yield f"scheduler_creator must be callable with (optimizer, config); received {schedules!r}."
        return
    for name, creator in schedules.items():
        if name not in several:
            yield f"scheduler_creator[{name!r}]: there is no optimizer of that name, only {list(several)}."
        elif not callable(creator):
            yield f"scheduler_creator[{name!r}] must be callable with (optimizer, config)."


def missing_in_step(spec: Any, *names: str) -> list[str]:
    """Training needs an optimizer; evaluation a loss or an `eval_step`."""
    if "optimizer" in names:
        return missing(spec, "optimizer")
    if "loss" in names and spec.loss is None and spec.eval_step is None:
        complaint = (
            "this needs to know how rows are judged; give Estimator.from_torch(eval_step=...), a function of"
            " (run, batch) like train_step, or loss=..., a function of (outputs, targets)."
        )
        return [complaint]
    return []
