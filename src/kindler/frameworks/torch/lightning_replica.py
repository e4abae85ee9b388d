"""A LightningModule's steps and hooks, called in Lightning's order by Kindler's loop.

What the module expects of its trainer is put on the worker's copy of it, never on the user's.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from kindler.collective import Array, Batch, all_gather
from kindler.errors import ConfigError
from kindler.frameworks.contract import Use
from kindler.frameworks.torch import private
from kindler.frameworks.torch.lightning_spec import (
    LightningSchedules,
    LightningSpec,
    ManualOptimizer,
    against_module,
    base_of,
    check_lightning,
    configured,
    configured_by_module,
    missing_in_module,
    overrides,
)
from kindler.frameworks.torch.loss import Tensors
from kindler.frameworks.torch.metrics import is_metric
from kindler.frameworks.torch.optim import Optimizers, Schedules
from kindler.frameworks.torch.state import parse, recall_trained
from kindler.frameworks.torch.step_replica import StepReplica, logged

__all__ = ["LightningReplica", "Trainer", "configured_by_module"]  # the last for files that name it here

_NO_ROW_WEIGHTS = (
    "a LightningModule computes its loss itself.\nHint: weigh it in training_step: a column in label_cols"
    " comes to it as the last part of the batch, and losses such as CrossEntropyLoss take weights of classes."
)


class LightningReplica(StepReplica):
    spec: LightningSpec
    spec_type = LightningSpec
    check = staticmethod(check_lightning)

    def __init__(self, spec: LightningSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        if complaints := [*against_module(self.model)]:  # of a creator only known now
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
            return missing_in_module(spec, *(("optimizer",) if use == "train" else ("loss",)))
        if use == "row_weights":
            return [_NO_ROW_WEIGHTS]
        return super().complaints(spec, use, value)

    @classmethod
    def changed(cls, spec: Any, *, config: Mapping[str, Any], learning_rate: float | None) -> Any:
        if learning_rate is not None:
            raise ConfigError(
                f"learning_rate={learning_rate}: a LightningModule configures its own optimizers.\n"
                "Hint: pass a creator of the module that reads it from the config, and give config={...}."
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
        optimizers, schedules = configured(configured_by_module(self.model, self.spec.config))
        return optimizers, LightningSchedules(schedules)

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
        self._look_at_losses(values)
        if self._automatic and returned is not None:
            self._automatic_step(returned["loss"] if isinstance(returned, Mapping) else returned)
        if "loss" not in values and self.run.loss_sum is not None:
            values["loss"] = self.run.loss_sum
        if rows:
            self.counter.note(values, rows)
        if self._automatic and isinstance(self._schedules, LightningSchedules):
            self._schedules.after_batch(number + 1)
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
        self._backward_with_hooks(loss)
        self._before_update(optimizer)
        self.update(name)

    def _backward_with_hooks(self, loss: torch.Tensor, **options: Any) -> None:
        self._call("on_before_backward", loss)
        self.run.backward(loss, **options)
        self._call("on_after_backward")

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
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

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        _ = self.optimizers
        if self._automatic and isinstance(self._schedules, LightningSchedules):
            self._schedules.after_epoch(self.epoch, logs or {})

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

    def log(
        self, name: str, value: Any, *, forked: bool, reduce_fx: Any = "mean", batch_size: int | None = None
    ) -> None:
        """`forked` also logs separate figures for step and epoch."""
        if self._step_trial is not None and self._step_trial.running:
            return
        if self._judging:
            name = name.removeprefix("val_").removeprefix("val/")
        if is_metric(value):
            for each in (name, f"{name}_epoch") if forked else (name,):
                self.counter.note_metric(each, self._path_of(value, name))
            return
        if reduce_fx not in ("mean", "default") and reduce_fx is not torch.mean:
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): figures are means over rows; for anything"
                " else, log a metric of torchmetrics."
            )
        rows = self.run.rows
        if rows:
            values = logged({name: value}, "self.log")
            self._look_at_losses(values)
            self.counter.note(values, rows, batch_size)
            if forked:
                [shown] = values.values()
                self.counter.note({f"{name}_epoch": shown}, rows, batch_size)
                self.counter.note({f"{name}_step": shown}, rows, batch_size, newest=True)

    def gathered(self, tensor: Any, *, gradients: bool) -> Any:
        if self._gather is None or not isinstance(tensor, torch.Tensor):
            return tensor
        rows = tensor if tensor.dim() else tensor.reshape(1)
        joined = all_gather(rows if gradients else rows.detach())
        return joined.unsqueeze(0) if tensor.dim() else joined

    def _path_of(self, metric: Any, name: str) -> str:
        for path, part in self.model.named_modules():
            if part is metric:
                return str(path)
        raise ConfigError(
            f"self.log({name!r}, ...): this metric is not an attribute of the module, so workers cannot merge"
            " it.\nHint: make it in __init__, as self.accuracy = torchmetrics.Accuracy(...)."
        )

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
            f"self.trainer.{name}: a LightningModule that Kindler trains has no Trainer of Lightning's; there"
            " are current_epoch, global_step, global_rank, world_size, is_global_zero and optimizers."
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
        forked = bool(on_step and on_epoch)
        self._replica.log(name, value, forked=forked, reduce_fx=reduce_fx, batch_size=batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def all_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        all_: list[Any] = self.optimizers
        if use_pl_optimizer:
            all_ = [ManualOptimizer(one, self._replica._before_update, self._replica.toggled) for one in all_]
        return all_[0] if len(all_) == 1 else all_

    def lr_schedulers(self) -> Any:
        all_ = self._replica.schedulers()
        return all_[0] if len(all_) == 1 else all_ or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        self._replica._backward_with_hooks(loss, **options)

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
        return private.tree_map(partial(self._replica.gathered, gradients=sync_grads), data)

    def print(self, *args: Any, **options: Any) -> None:
        if self.is_global_zero:
            print(*args, **options)  # noqa: T201 (what the module asked for)


def _loss_of(returned: Any) -> dict[str, Any]:
    if isinstance(returned, Mapping):
        return {"loss": returned["loss"]} if returned.get("loss") is not None else {}
    return {"loss": returned} if isinstance(returned, torch.Tensor) and returned.numel() == 1 else {}
