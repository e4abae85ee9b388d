"""Checks a LightningModule before anything runs, without importing Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kindler.frameworks.torch.spec import TorchSpec, check
from kindler.frameworks.torch.step_spec import StepSpec

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


@dataclass(frozen=True, kw_only=True)
class LightningSpec(StepSpec):
    """Steps receive a "tuple" of columns (a single one bare), or a "dict" by name."""

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


def check_lightning(spec: LightningSpec) -> list[str]:
    plain = TorchSpec(
        model=spec.model,
        config=spec.config,
        precision=spec.precision,
        tf32=spec.tf32,
        clip_norm=spec.clip_norm,
        clip_value=spec.clip_value,
        device_cache=spec.device_cache,
    )
    return [*check(plain), *_complaints(spec)]


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
