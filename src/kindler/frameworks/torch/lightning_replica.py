"""A LightningModule's steps and hooks, called in Lightning's order by Kindler's loop.

What the module expects of its trainer is put on the worker's copy of it, never on the user's.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kindler.collective import Array, Batch, all_gather
from kindler.errors import ConfigError
from kindler.frameworks.contract import Use
from kindler.frameworks.torch import private
from kindler.frameworks.torch.loss import Tensors
from kindler.frameworks.torch.metrics import is_metric
from kindler.frameworks.torch.optim import Optimizers, Schedule, Schedules, step_optimizer
from kindler.frameworks.torch.spec import CLOSURE, StepSpec, check, needs_closure
from kindler.frameworks.torch.state import parse, recall_trained
from kindler.frameworks.torch.step_replica import StepReplica, logged

_UNSUPPORTED = {
    "optimizer_step": "set automatic_optimization = False and step in training_step",
    "optimizer_zero_grad": "set automatic_optimization = False and clear gradients in training_step",
    "backward": "set automatic_optimization = False and call self.manual_backward",
    "lr_scheduler_step": "return schedulers with 'interval' and 'frequency' from configure_optimizers",
    "configure_gradient_clipping": "pass Optimization(clip_norm=...) or (clip_value=...) to from_lightning",
    "configure_callbacks": "pass kindler.callbacks.Callback objects to fit(callbacks=[...])",
    "transfer_batch_to_device": "pass Prepare(transform=...) or (collate=...) to from_lightning",
    "on_before_batch_transfer": "pass Prepare(transform=...) or (collate=...) to from_lightning",
    "on_after_batch_transfer": "do it in training_step",
    "on_save_checkpoint": "keep what must be saved in buffers of the module",
    "on_load_checkpoint": "keep what must be saved in buffers of the module",
    "prepare_data": "prepare the data before fit",
    "on_fit_end": "pass a kindler.callbacks.Callback with on_run_end to fit",
    "on_train_end": "pass a kindler.callbacks.Callback with on_run_end to fit",
    "teardown": "pass a kindler.callbacks.Callback with on_run_end to fit",
    "configure_sharded_model": "fit(strategy='zero1') is for plain PyTorch models",
}
_OF_SCHEDULE = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
_NO_ROW_WEIGHTS = (
    "a LightningModule computes its loss itself.\nHint: weight it in training_step: a column in label_cols"
    " is passed to it as the last part of the batch, and losses such as CrossEntropyLoss take weights of "
    "classes."
)


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
    complaints = check(spec)
    if spec.batch not in ("tuple", "dict"):
        complaints.append(f"batch must be 'tuple' or 'dict'; received {spec.batch!r}.")
    cls = _class_of(spec.model)
    if cls is not None and (isinstance(spec.model, torch.nn.Module) or base_of(cls) is not None):
        complaints += _class_complaints(cls)
    return complaints


def _class_of(model: Any) -> type | None:
    """None for a creator."""
    return type(model) if isinstance(model, torch.nn.Module) else model if isinstance(model, type) else None


def _class_complaints(cls: type) -> Iterator[str]:
    if base_of(cls) is None:
        yield (
            f"from_lightning needs a LightningModule; received {cls.__name__}.\n"
            "Hint: Estimator.from_torch takes any other module."
        )
        return
    for name, instead in _UNSUPPORTED.items():
        if overrides(cls, name):
            yield f"{cls.__name__}.{name} is not supported.\nHint: {instead}."
    for step in ("training_step", "validation_step", "predict_step"):
        taken = inspect.signature(getattr(cls, step)).parameters if overrides(cls, step) else {}
        for name in ("dataloader_iter", "optimizer_idx"):
            if name in taken:
                yield (
                    f"{cls.__name__}.{step} takes {name!r}, which is not supported; it is called with (batch,"
                    " batch_idx)."
                )


def configured(returned: Any) -> tuple[Optimizers, Schedules]:
    optimizers, schedules = _parted(returned)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise _unknown(returned)
        if needs_closure(type(optimizer)):
            raise ConfigError(CLOSURE.format(name=type(optimizer).__name__))
    named = {str(place): optimizer for place, optimizer in enumerate(optimizers)}
    return Optimizers(named), Schedules({str(place): _schedule(one) for place, one in enumerate(schedules)})


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
            "ReduceLROnPlateau needs a metric of each epoch: return"
            " {'scheduler': ..., 'monitor': 'val_loss'}, with interval='epoch'."
        )
    return made


def _unknown(returned: Any) -> ConfigError:
    return ConfigError(
        "configure_optimizers must return an optimizer, several, ([optimizers], [schedulers]), or a dict with"
        f" 'optimizer' and 'lr_scheduler'; it returned {returned!r}."
    )


class LightningReplica(StepReplica):
    spec: LightningSpec
    spec_type = LightningSpec
    check = staticmethod(check_lightning)

    def __init__(self, spec: LightningSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        if complaints := [*_class_complaints(type(self.model))]:  # of a creator only known now
            raise ConfigError("\n".join(complaints))
        self._attached = self._began = self._judging = self._trains = False
        self._predicted = 0
        self._stage: str | None = None
        self._call("configure_model")
        self.model.to(self.device)

    def set_up(self, stage: str) -> None:
        """Runs once, with the first stage, as Lightning does."""
        if self._stage is None:
            self._stage = stage
            if not overrides(type(self.model), "setup"):
                return
            trained = {} if stage == "fit" else dict(self.model.state_dict())
            with torch.inference_mode(False), torch.enable_grad():  # it may make parameters
                self._call("setup", stage)
            if trained:  # which it may have replaced by new ones
                new = self.model.state_dict()
                kept = {name: old for name, old in trained.items() if name in new}
                kept = {name: old for name, old in kept.items() if old.shape == new[name].shape}
                self.model.load_state_dict(kept, strict=False)
            self.model.to(self.device)

    @classmethod
    def complaints(cls, spec: Any, use: Use, value: Any = None) -> list[str]:
        if use in ("train", "judge"):
            kind = _class_of(spec.model)
            if kind is None or base_of(kind) is None:
                return []
            needed = ("training_step", "configure_optimizers") if use == "train" else ("validation_step",)
            lacking = [name for name in needed if not overrides(kind, name)]
            return [f"{kind.__name__} has no {name}, which this needs." for name in lacking]
        if use == "row_weights":
            return [_NO_ROW_WEIGHTS]
        return super().complaints(spec, use, value)

    @classmethod
    def changed(cls, spec: Any, *, config: Mapping[str, Any], learning_rate: float | None) -> Any:
        if learning_rate is not None:
            raise ConfigError(
                f"learning_rate={learning_rate}: a LightningModule configures its own optimizers.\n"
                "Hint: pass a creator of the module that reads it from the config, and pass config={...}."
            )
        return super().changed(spec, config=config, learning_rate=None)

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Only training has optimizers; the driver and scoring load the weights alone."""
        if weights_only_model:
            self.set_up("predict")  # not later: it may make the parameters
        if self._stage == "fit" and not weights_only_model:
            super().load_state(data)
            return
        self._loaded(partial(super().load_state, weights_only_model=True), data)
        if not weights_only_model:
            fields = parse(data)
            self._modes.recall(fields["resting"])
            recall_trained(fields["trained"], self._modules())
            self.epoch, self.step = fields["epoch"], fields["step"]

    @property
    def _optimizes(self) -> bool:
        return self._stage == "fit"

    def load_weights(self, data: bytes) -> None:
        self._loaded(super().load_weights, data)

    def _loaded(self, load: Callable[[bytes], None], data: bytes) -> None:
        try:
            load(data)
        except RuntimeError:  # of torch: `setup` may make some of the parameters
            if self._stage is not None:
                raise
            self.set_up("predict")
            load(data)

    def _build_optimizers(self) -> tuple[Optimizers, Schedules | None]:
        self.set_up("fit")
        return configured(configured_by_module(self.model, self.spec.config))

    @property
    def _automatic(self) -> bool:
        return bool(self.model.automatic_optimization)

    def _attach(self) -> None:
        """Only where the module runs, not on the driver."""
        if self._attached:
            return
        self._attached = True
        trainer = Trainer(self)
        for module in self.model.modules():
            if base_of(type(module)) is not None:
                module.__dict__.update({"_trainer": trainer, **trainer.methods()})

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self._attach()
        self._judging, self._trains = False, True
        if not self._began:
            self._began = True
            self._call("on_fit_start")
            self._call("on_train_start")
        self._call("on_train_epoch_start")

    def _step_on(self, features: Tensors, labels: Tensors, rows: int) -> None:
        self.counter.begin_batch()
        batch, number = self._formed(features, labels), self.counter.batches
        if self._call("on_train_batch_start", batch, number) == -1:
            raise ConfigError("on_train_batch_start returned -1, which would skip the epoch: not supported.")
        with self._gathers_in_step(rows), self._precision():
            returned = self._call("training_step", batch, number)
        values = logged(_loss_of(returned), "training_step")
        self.look_at_losses(values)
        if self._automatic and returned is not None:
            self._automatic_step(returned["loss"] if isinstance(returned, Mapping) else returned)
        if "loss" not in values and self.run.loss_sum is not None:
            values["loss"] = self.run.loss_sum
        if rows:
            self.counter.note(values, rows)
        if self._automatic and self._schedules is not None:
            self._schedules.after_step(number + 1)
        self._call("on_train_batch_end", returned, batch, number)

    def losses_of(self, features: Tensors, labels: Tensors, rows: int) -> Any:
        with self._precision():
            return self._call("training_step", self._formed(features, labels), self.counter.batches)

    def _automatic_step(self, loss: torch.Tensor) -> None:
        named = self.optimizers.named
        if len(named) != 1:
            raise ConfigError(
                f"configure_optimizers returned {len(named)} optimizers: a module with more than one steps by"
                " itself.\nHint: self.automatic_optimization = False in __init__, and self.manual_backward"
                " and optimizer.step() in training_step."
            )
        [(name, optimizer)] = named.items()
        self._call("on_before_zero_grad", optimizer)
        optimizer.zero_grad(set_to_none=True)
        self.backward_with_hooks(loss)
        self.before_update(optimizer)
        self.update(name)

    def backward_with_hooks(self, loss: torch.Tensor, **options: Any) -> None:
        self._call("on_before_backward", loss)
        self.run.backward(loss, **options)
        self._call("on_after_backward")

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._call("on_before_optimizer_step", optimizer)

    def eval_step(self, batch: Batch) -> None:
        self.counter.begin_batch()
        if not batch.rows:
            return
        self._modes.evaluate()
        self._begin_judging()
        self._begin(batch)
        given = self._formed(self._tensors(batch.features), self._tensors(batch.labels))
        number, weighed = self.counter.batches, self.counter.weight_of("loss")
        self._call("on_validation_batch_start", given, number)
        with torch.no_grad(), self._precision():
            returned = self._call("validation_step", given, number)
        if self.counter.weight_of("loss") == weighed:  # not logged by the module
            self.counter.note(logged(_loss_of(returned), "validation_step"), batch.rows)
        self._call("on_validation_batch_end", returned, given, number)
        self.counter.count_rows(batch.rows)

    def take_tallies(self) -> bytes:
        """Hooks at the end of an epoch may still log."""
        self.run.rows = self.counter.rows_seen
        if self._trains:
            self._call("on_train_epoch_end")
        else:
            self._modes.evaluate()
            self._begin_judging()
            with torch.no_grad():
                self._call("on_validation_epoch_end")
                self._call("on_validation_end")
        self._trains = self._judging = False
        return super().take_tallies()

    def _begin_judging(self) -> None:
        self._attach()
        if not self._judging:
            self._judging = True
            self._call("on_validation_start")
            self._call("on_validation_epoch_start")

    def _step_schedules(self) -> None:
        """They have moved before `on_train_batch_end`."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        _ = self.optimizers
        if self._automatic:
            super().end_epoch(logs)

    def _scored(self, features: tuple[Array, ...]) -> Any:
        if self._stage is None:
            self.set_up("predict")
            self._modes.evaluate()
        if not overrides(type(self.model), "predict_step"):
            return super()._scored(features)
        self._attach()
        given = self._formed(self._tensors(features), ())
        self._predicted += 1
        return self._call("predict_step", given, self._predicted - 1)

    def lightning_file(self, *, whole: bool) -> bytes:
        """For Lightning's `load_from_checkpoint`; `whole` includes the optimizers."""
        package = "lightning" if "lightning" in sys.modules else "pytorch_lightning"
        fields: dict[str, Any] = {
            "epoch": self.epoch - 1,
            "global_step": self.step,
            "pytorch-lightning_version": sys.modules[package].__version__,
            "state_dict": self.model.state_dict(),
            "loops": {},
        }
        hparams: Any = self.model.hparams
        if hparams:
            fields |= {"hparams_name": "kwargs", "hyper_parameters": dict(hparams)}
        if whole:
            fields["optimizer_states"] = [one.state_dict() for one in self.optimizers.named.values()]
            fields["lr_schedulers"] = [one.state_dict() for one in self.schedulers()]
        data = io.BytesIO()
        torch.save(fields, data)
        return data.getvalue()

    def schedulers(self) -> list[Any]:
        _ = self.optimizers  # which they are made with
        return [] if self._schedules is None else list(self._schedules.named.values())

    def stored_model(self) -> torch.nn.Module:
        if overrides(type(self.model), "predict_step"):
            raise ConfigError(
                f"{type(self.model).__name__} has a predict_step, which a stored model would not call: it"
                " predicts by forward.\nHint: let forward do it; or save the whole estimator, with"
                " estimator.save('name.estimator')."
            )
        return self.trained_model()

    def _formed(self, features: Tensors, labels: Tensors) -> Any:
        if self.spec.batch == "dict":
            return self._by_name(features, labels)
        several = (*features, *labels)
        return several[0] if len(several) == 1 else several

    def _call(self, hook: str, *args: Any) -> Any:
        if not overrides(type(self.model), hook):
            return None
        function = getattr(self.model, hook)
        takes = inspect.signature(function).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in takes):
            return function(*args)
        return function(*args[: len(takes)])

    @contextmanager
    def toggled(self, optimizer: Any) -> Iterator[None]:
        """Only this optimizer's parameters get gradients."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        before = [(p, p.requires_grad) for group in self.optimizers.param_groups for p in group["params"]]
        for parameter, flag in before:
            parameter.requires_grad_(flag and id(parameter) in own)
        try:
            yield
        finally:
            for parameter, flag in before:
                parameter.requires_grad_(flag)


_FACTS: dict[str, Callable[[LightningReplica], Any]] = {
    "current_epoch": lambda replica: max(0, replica.epoch - 1),
    "global_step": lambda replica: replica.step,
    "global_rank": lambda replica: replica.rank,
    "local_rank": lambda replica: int(os.environ.get("LOCAL_RANK", "0")),
    "world_size": lambda replica: replica.size,
    "is_global_zero": lambda replica: replica.rank == 0,
    "training": lambda replica: not replica._judging,
    "validating": lambda replica: replica._judging,
    "optimizers": lambda replica: list(replica.optimizers.named.values()),
    "sanity_checking": lambda replica: False,
    "barebones": lambda replica: False,
    "logger": lambda replica: None,
    "loggers": lambda replica: (),
}


class Trainer:
    """What a module finds as `self.trainer`, and the methods of the module that need one."""

    def __init__(self, replica: LightningReplica) -> None:
        self._replica = replica
        self._toggled: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return _FACTS[name](self._replica)
        raise AttributeError(
            f"self.trainer.{name}: a LightningModule that Kindler trains has no Lightning Trainer; available "
            "are current_epoch, global_step, global_rank, world_size, is_global_zero and optimizers."
        )

    def methods(self) -> dict[str, Any]:
        names = (
            "log log_dict lr_schedulers manual_backward clip_gradients toggle_optimizer untoggle_optimizer"
        )
        own = {name: getattr(self, name) for name in (*names.split(), "all_gather", "print")}
        return {**own, "optimizers": self.all_optimizers}

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *args: Any,
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        replica = self._replica
        if replica.tries:
            return
        if self.validating:
            name = name.removeprefix("val_").removeprefix("val/")
        forked = bool(on_step and on_epoch)  # separate metrics for step and epoch
        if is_metric(value):
            path = next((path for path, part in replica.model.named_modules() if part is value), None)
            if path is None:
                raise ConfigError(
                    f"self.log({name!r}, ...): this metric is not an attribute of the module, so workers"
                    " cannot merge it.\n"
                    "Hint: make it in __init__, as self.accuracy = torchmetrics.Accuracy(...)."
                )
            for each in (name, f"{name}_epoch") if forked else (name,):
                replica.counter.note_metric(each, path)
            return
        if reduce_fx not in ("mean", "default") and reduce_fx is not torch.mean:
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): numbers become means over rows; for anything"
                " else, log a metric of torchmetrics."
            )
        rows, note = replica.run.rows, replica.counter.note
        if rows:
            values = logged({name: value}, "self.log")
            replica.look_at_losses(values)
            note(values, rows, batch_size)
            if forked:
                [shown] = values.values()
                note({f"{name}_epoch": shown}, rows, batch_size)
                note({f"{name}_step": shown}, rows, batch_size, newest=True)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def all_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        all_: list[Any] = self.optimizers
        if use_pl_optimizer:
            all_ = [ManualOptimizer(one, self._replica) for one in all_]
        return all_[0] if len(all_) == 1 else all_

    def lr_schedulers(self) -> Any:
        all_ = self._replica.schedulers()
        return all_[0] if len(all_) == 1 else all_ or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        self._replica.backward_with_hooks(loss, **options)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_val is None:
            self._replica._clip(held)
        elif gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(held, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(held, gradient_clip_val)

    def toggle_optimizer(self, optimizer: Any) -> None:
        self._toggled.append(stack := ExitStack())
        stack.enter_context(self._replica.toggled(optimizer))

    def untoggle_optimizer(self, optimizer: Any) -> None:
        if self._toggled:
            self._toggled.pop().close()

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Rows of all workers, as one entry of a new first dimension; unchanged with one worker.

        Lightning has one entry per worker there, but here their row counts differ.
        """

        def gathered(tensor: Any) -> Any:
            if not self._replica.gathers or not isinstance(tensor, torch.Tensor):
                return tensor
            rows = tensor if tensor.dim() else tensor.reshape(1)
            joined = all_gather(rows if sync_grads else rows.detach())
            return joined.unsqueeze(0) if tensor.dim() else joined

        return private.tree_map(gathered, data)

    def print(self, *args: Any, **options: Any) -> None:
        if self.is_global_zero:
            print(*args, **options)  # noqa: T201 (what the module asked for)


def _loss_of(returned: Any) -> dict[str, Any]:
    if isinstance(returned, Mapping):
        return {"loss": returned["loss"]} if returned.get("loss") is not None else {}
    return {"loss": returned} if isinstance(returned, torch.Tensor) and returned.numel() == 1 else {}


class ManualOptimizer:
    """Returned by `self.optimizers()` in a module that steps itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, replica: LightningReplica) -> None:
        self.optimizer, self._replica = optimizer, replica

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = closure() if closure is not None else None
        self._replica.before_update(self.optimizer)
        step_optimizer(self.optimizer)
        return result

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        return self._replica.toggled(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
