"""A replica trained by the user's own step, with any number of optimizers.

Each `run.backward` makes gradients of the mean over all ranks' rows. All ranks run every global step, one
without rows on two rows of zeros that do not count; each exchange checks that ranks ask for the same
gradients in the same order. A step to be skipped runs to its end on all ranks, and is then undone as a whole.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from kindler.collective import Array, Batch, GradientExchange, all_gather
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.frameworks.contract import Use
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.row_gather import RowGather
from kindler.frameworks.torch.device import backward_on
from kindler.frameworks.torch.gather import Gather
from kindler.frameworks.torch.loss import Tensors
from kindler.frameworks.torch.metrics import Counter, is_metric, undo_metric
from kindler.frameworks.torch.module_replica import ModuleReplica, row_weight_complaints
from kindler.frameworks.torch.optim import step_optimizer
from kindler.frameworks.torch.outputs import numbered
from kindler.frameworks.torch.spec import StepSpec, against_several, missing
from kindler.frameworks.torch.state import group_names, to_array
from kindler.frameworks.torch.trials import TriedStep, Undo, undo_optimizer, undo_parameter
from kindler.group import Group

_END = -1  # stands for the end of a step where ranks compare what they do
_MADE_UP_ROWS = 2  # BatchNorm needs more than one


class StepReplica(ModuleReplica):
    spec: StepSpec
    spec_type = StepSpec

    def __init__(self, spec: StepSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._gather: Gather | None = None
        self._shares = False
        self._exchanges = 0
        self._ours = False
        self._used = self._watches = False
        self._made: dict[int, Any] = {}
        self._hooks: list[Any] = []
        self._shown: tuple[Tensors, LabelSource, int] | None = None
        self._step_trial: TriedStep | None = None

    @classmethod
    def complaints(cls, spec: Any, use: Use, value: Any = None) -> list[str]:
        if use == "train":
            return missing(spec, "optimizer")
        if use == "judge" and spec.loss is None and spec.eval_step is None:
            complaint = (
                "this needs to know how to evaluate rows; pass Estimator.from_torch(eval_step=...), a "
                "function"
                " of (run, batch) like train_step, or loss=..., a function of (outputs, targets)."
            )
            return [complaint]
        if use in ("server", "division"):
            return ["your own train_step updates the parameters itself.\nHint: strategy='allreduce'."]
        if use == "several":
            return against_several(spec)
        if use == "row_weights":  # the step finds them in `run`; only a loss must know them itself
            return [] if spec.eval_step is not None else row_weight_complaints(spec)
        return super().complaints(spec, use, value)

    @cached_property
    def counter(self) -> Counter:
        return Counter(self._named_metrics(), self.device, self.model)

    @cached_property
    def run(self) -> StepRun:
        return StepRun(self)

    @property
    def tries(self) -> bool:
        """Whether the current step is a trial and must leave nothing behind."""
        return self._step_trial is not None and self._step_trial.running

    @property
    def gathers(self) -> bool:
        return self._gather is not None

    @property
    def size(self) -> int:
        return 1 if self._collective is None else self._collective.size

    def fuse(
        self, worker: Group, settings: RunSettings, strategy: str, **options: Any
    ) -> GradientExchange | None:
        """Exchange gradients in each `run.backward`, through the collective of `join`."""
        if strategy != "allreduce":
            raise ConfigError(self.complaints(self.spec, "division")[0])
        self._shares = True
        self._watch_gradients()
        self._gather = Gather(RowGather(self._joined))
        if not self.spec.process_group:  # where the step may meet those of others by itself
            self._step_trial = TriedStep(self)
        return GradientExchange()

    def train_step(self, batch: Batch) -> None:
        if not batch.global_rows:
            return
        self._freezer.wait()  # the step may move parameters at any time
        _ = self.tracked
        if not self._watches:
            self._watches = True
            for name, optimizer in self.optimizers.named.items():
                optimizer.register_step_pre_hook(partial(self._before_step, name))
        self._modes.train()
        if self.parameters.look():
            self._watch_gradients()
        undo = None
        if self._guard is not None:
            self._guard.begin_step()
            undo = self.undo() if self._guard.skips else None
        self._begin(batch)
        if batch.rows:
            features, labels = self._tensors(batch.features), self._tensors(batch.labels)
            if self._step_trial is not None:
                self._step_trial(features, labels, batch.rows)
                self._begin(batch)
            self._shown = features, self._label_source(batch), batch.rows
            self._step_on(features, labels, batch.rows)
        else:
            buffers = self.tracked.copies()
            self._step_on(self._tensors(_made_up(batch.features)), self._tensors(_made_up(batch.labels)), 0)
            self.tracked.put_back(buffers)
        self._shown = None
        if undo is not None and not self._shares:  # gradients may have come about without `run.backward`
            self._look_at_gradients_of(self.parameters.held)
        bad = self._agree(_END, float(self._guard is not None and self._guard.bad)) > 0
        if undo is not None and self._guard is not None and bad:
            undo()
            self._remember_gradients()
            self._guard.skip()
            self.counter.count_rows(0)
        else:
            self._step_schedules()
            self.counter.count_rows(batch.rows)
        self.step += 1
        self._count_rows(batch)

    def undo(self) -> Undo:
        """Covers the model, its optimizers and the tallies, not what the user's code keeps besides."""
        everything = [p for module in self._modules().values() for p in module.parameters()]
        buffers, schedules = self.tracked.copies(), self._schedules
        steps = copy.deepcopy(schedules.state_dict()) if schedules is not None else {}
        undo = [
            *(undo_parameter(p) for p in {id(p): p for p in (*everything, *self.parameters.held)}.values()),
            *map(undo_optimizer, self.optimizers.named.values()),
            *(undo_metric(part) for part in self.tracked.modules() if is_metric(part)),
            self.counter.mark(),
        ]

        def put_back() -> None:
            with torch.no_grad():
                for each in undo:
                    each()
            self.tracked.put_back(buffers)
            if schedules is not None:
                schedules.load_state_dict(steps)

        return put_back

    def _remember_gradients(self) -> None:
        """They are the same on all ranks."""
        for parameter in self.parameters.held:
            if parameter.grad is not None:
                self._made[id(parameter)] = weakref.ref(parameter.grad)

    def look_at_loss(self, loss: float | torch.Tensor) -> None:
        """Losses of made-up rows are ignored."""
        if self._guard is None or self._shown is None:
            return
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
        features, source, rows = self._shown
        self._guard.passes(self.step + 1, value, features, source, rows)

    def look_at_losses(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Names tell which of them are losses."""
        for name, value in values.items():
            if name.lower().endswith("loss"):
                self.look_at_loss(value)

    def _look_at_gradients_of(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self._guard is not None:
            self._guard.look_at_gradients(parameter.grad for parameter in parameters)

    def _begin(self, batch: Batch) -> None:
        self.run.rows, self.run.global_rows, self.run.loss_sum = batch.rows, batch.global_rows, None
        self._exchanges, self._used = 0, False
        if self._gather is not None:
            self._gather.begin()

    def losses_of(self, features: Tensors, labels: Tensors, rows: int) -> Any:
        labels = self._without_weights(labels, trains=True, made_up=not rows)
        with self._precision():
            return self.spec.train_step(self.run, self._by_name(features, labels))

    def _gathers_in_step(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext() if self._gather is None else self._gather.step(idle=not rows)

    def _step_on(self, features: Tensors, labels: Tensors, rows: int) -> None:
        with self._gathers_in_step(rows):
            returned = self.losses_of(features, labels, rows)
        if self._row_weights is not None and not self.run.weights_read:
            raise ConfigError(
                "train_step did not use run.sample_weight, so class_weight and weight_col have no"
                " effect: your own train_step computes its loss itself.\nHint: multiply the loss of each row"
                " by it, as in (loss_of_rows * run.sample_weight).mean(), or do not pass the weights to fit."
            )
        values = logged(returned, "train_step")
        self.look_at_losses(values)
        if not self._used:
            self._minimized(returned)
        if "loss" not in values and self.run.loss_sum is not None:
            values["loss"] = self.run.loss_sum
        if rows:
            self.counter.note(values, rows)

    def _minimized(self, returned: Any) -> None:
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise ConfigError(
                "train_step updated no parameters, and returned no loss to minimize.\nHint: return the "
                "loss, or"
                ' {"loss": loss, ...}; or call run.minimize(loss, "name of an optimizer").'
            )
        if len(self.optimizers.named) > 1:
            names = ", ".join(map(repr, self.optimizers.named))
            raise ConfigError(
                f"train_step updated no parameters, and there are the optimizers {names}: which of them"
                " minimizes the loss?\nHint: call run.minimize(loss, name) in it, once for each."
            )
        self.run.minimize(loss)

    def eval_step(self, batch: Batch) -> None:
        if self.spec.eval_step is None:
            if problem := self.complaints(self.spec, "judge"):
                raise ConfigError(problem[0])
            super().eval_step(batch)
            return
        if not batch.rows:
            return
        self._modes.evaluate()
        self._begin(batch)
        labels = self._without_weights(self._tensors(batch.labels), trains=False)
        with torch.no_grad(), self._precision():
            returned = self.spec.eval_step(self.run, self._by_name(self._tensors(batch.features), labels))
        self.counter.note(logged(returned, "eval_step"), batch.rows)
        self.counter.count_rows(batch.rows)

    def _without_weights(self, labels: Tensors, *, trains: bool, made_up: bool = False) -> Tensors:
        """Row weights move to `run.sample_weight`."""
        weights = None
        if self._row_weights is not None:
            labels, weights = self._row_weights.split(labels, trains=trains, by_class=False)
        if weights is not None and made_up:
            weights = torch.ones_like(weights)  # zeros would be a sum that nobody can divide by
        self.run.weigh(weights)
        return labels

    def _by_name(self, features: Tensors, labels: Tensors) -> dict[str, torch.Tensor]:
        names = self._names_of(features)
        of_labels = self._label_names
        if self._row_weights is not None and self._row_weights.column:
            of_labels = of_labels[:-1]
        if len(of_labels) != len(labels):
            of_labels = numbered("y", len(labels))
        return dict(zip((*names, *of_labels), (*features, *labels), strict=True))

    def backward(
        self, loss: torch.Tensor, name: str | None, *, weight: float | torch.Tensor | None, retain_graph: bool
    ) -> None:
        self._used = True
        if self._step_trial is not None and self._step_trial.notes(loss, weight):
            return
        named = self.optimizers.named
        only = name is None or len(named) == 1
        parameters = [p for p in self._parameters_of(None if only else name) if p.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        share = 1.0
        if self._shares:
            code = [None, *named].index(name) * 2 + (weight is not None) + 1
            own = float(self.run.rows if weight is None or not self.run.rows else weight)
            weights = self._agree(code, own)  # at the same place of the step on all ranks
            total = self.run.global_rows if weight is None else weights
            share = own / total if total else 0.0
        if self._gather is not None:
            self._gather.share = share
        self._ours = True
        try:
            with torch.autocast(self.device.type, enabled=False), backward_on(self.device.type):
                torch.autograd.backward(loss, retain_graph=retain_graph, inputs=None if only else parameters)
        finally:
            self._ours = False
        grads = [parameter.grad for parameter in parameters]
        if self._gather is not None:
            self._gather.pending.clear()
        if self._shares:
            grads = self._exchanged(grads, parameters, share)
        if self._guard is not None:
            self._guard.look_at_gradients(grads)
        with torch.no_grad():
            for parameter, old, new in zip(parameters, before, grads, strict=True):
                parameter.grad = new if old is None else old if new is None else old + new
                if parameter.grad is not None:
                    self._made[id(parameter)] = weakref.ref(parameter.grad)

    def _exchanged(
        self, grads: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor], share: float
    ) -> list[torch.Tensor | None]:
        arrays = [
            np.zeros_like(to_array(parameter)) if grad is None or not share else to_array(grad * share)
            for grad, parameter in zip(grads, parameters, strict=True)
        ]
        flags = np.array([grad is not None and share > 0 for grad in grads], np.int64)
        *sums, used = self._joined.sum([*arrays, flags])
        return [
            torch.from_numpy(array).to(parameter) if flag else None
            for array, parameter, flag in zip(sums, parameters, used, strict=True)
        ]

    def _agree(self, code: int, weight: float) -> float:
        """Raises unless all ranks are at the same place of the step; returns the sum of their weights."""
        if not self._shares:
            return weight
        self._exchanges += 1
        # Small enough for the sums of squares to be exact.
        place = float(code if code == _END else self._exchanges % 1000 * 64 + code % 64)
        [sums] = self._joined.sum([np.array([1.0, place, place * place, weight])])
        count, total, squares, weights = (float(value) for value in sums)
        if squares * count != total * total:
            raise ConfigError(
                "workers did different things in one step: each must call run.backward with the same"
                " optimizers in the same order.\nHint: do not let what only one worker knows, such as its "
                "rows or its loss, decide whether backward is called."
            )
        return weights

    def update(self, name: str) -> None:
        if self.tries:
            return
        self._clip(self._parameters_of(name))
        step_optimizer(self.optimizers[name])
        self.optimizers[name].zero_grad(set_to_none=True)

    def _parameters_of(self, name: str | None) -> list[torch.nn.Parameter]:
        if name is None:
            return self.parameters.held
        return [p for group in self.optimizers[name].param_groups for p in group["params"]]

    def _watch_gradients(self) -> None:
        """Other ranks do not have gradients computed without `run.backward`."""
        for hook in self._hooks:
            hook.remove()
        watched: list[Any] = [p for p in self.parameters.held if p.requires_grad] if self._shares else []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._noticed) for parameter in watched]

    def _noticed(self, parameter: torch.Tensor) -> None:
        if not self._ours:
            raise ConfigError(
                "loss.backward() computes the gradients of this worker's rows alone.\nHint: call"
                " run.backward(loss), or run.minimize(loss), which compute those of all workers; in a"
                " LightningModule, self.manual_backward(loss)."
            )

    def _before_step(self, name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._used = True
        moved = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self._shares:
            self._look_at_gradients_of(moved)
            return
        for parameter in moved:
            known = self._made.get(id(parameter), lambda: None)()
            if parameter.grad is not None and parameter.grad is not known:
                raise ConfigError(
                    f"the optimizer {name!r} is about to update parameters with gradients that other "
                    f"workers do"
                    " not have.\nHint: compute them with run.backward(loss)."
                )

    def _optimizer_fields(self) -> dict[str, Any]:
        # Gradients that the next step adds to are the same on all ranks.
        held = enumerate(self.parameters.held)
        return {
            "groups": group_names(self.optimizer, self._modules()),
            "optimizer": {"named": self.optimizers.kept(self._modules())},
            "scheduler": self._schedules.state_dict() if self._schedules is not None else None,
            "gradients": {place: p.grad for place, p in held if p.grad is not None},
        }

    def _load_optimizer_fields(self, fields: Mapping[str, Any]) -> None:
        kept = fields["optimizer"].get("named")
        if kept is None:
            raise ConfigError(
                "the state belongs to a model without a train_step.\n"
                "Hint: load only its weights, with load_weights()."
            )
        self.optimizers.load(kept, self._modules())
        if fields["scheduler"] is not None and self._schedules is not None:
            self._schedules.load_state_dict(fields["scheduler"])
        grads = fields.get("gradients", {})
        for place, parameter in enumerate(self.parameters.held):
            parameter.grad = grads[place].to(parameter) if place in grads else None
        self._remember_gradients()


class StepRun:
    """The first argument of `train_step` and `eval_step`.

    `backward` computes gradients of the mean over the rows of all workers, so a step does the same with one
    worker or several. The loss passed to it is a mean over the rows of `batch`.

    Attributes:
        model: This worker's copy of the model.
        config: The estimator's config.
        rows: The number of rows this worker has in the step. If 0, the step is called with made-up rows, so
            that all workers do the same; they do not contribute.
        global_rows: The number of rows all workers have in the step.
        loss_sum: The sum of the losses passed to `backward` in this step; None before the first.
        weights_read: Whether a step has read `sample_weight`.
        epoch: The current epoch, counted from 1.
        step: Steps since the model was created.
        rank: This worker's number, from 0.
        size: The number of workers.
        device: The device of the model and the batches.
    """

    def __init__(self, replica: StepReplica) -> None:
        self._replica = replica
        self.model: Any = replica.model
        self.config: Mapping[str, Any] = replica.spec.config
        self.rows = self.global_rows = 0
        self.weights_read = False
        self._weights: torch.Tensor | None = None
        self.loss_sum: torch.Tensor | None = None

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; one passed without a name is called "optimizer"."""
        return dict(self._replica.optimizers.named)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, if there is only one."""
        return self.optimizers[self._one(None)]

    @property
    def sample_weight(self) -> torch.Tensor | None:
        """The weight of each row of the batch, from `fit(columns=Columns(class_weight=..., weight_col=...))`.

        With both, it is their product; without them, None. In `eval_step` class weights do not apply. The
        step multiplies the loss of each row by it, and still takes the mean over rows.
        """
        self.weights_read = True
        return self._weights

    def weigh(self, weights: torch.Tensor | None) -> None:
        """Set the row weights of the next batch; called by the replica."""
        self._weights = weights

    epoch = property(attrgetter("_replica.epoch"))
    step = property(attrgetter("_replica.step"))
    rank = property(attrgetter("_replica.rank"))
    size = property(attrgetter("_replica.size"))
    device = property(attrgetter("_replica.device"))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers, with gradients that flow back to each: `kindler.all_gather`."""
        gathered: torch.Tensor = all_gather(tensor)
        return gathered

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: str | None = None,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of a loss over the rows of all workers to the existing ones.

        Args:
            loss: A mean over the rows of the batch, or over something else, specified by `weight`.
            optimizer: Compute only the gradients of this optimizer's parameters. None computes all.
            weight: What the mean was divided by on this worker, if not by its rows: tokens, for example. Only
                a loss without a weight is checked on the first rows.
            retain_graph: Whether another loss of the same outputs will be passed to `backward`.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(f"run.backward needs a loss that is one number; received {_shown(loss)}.")
        name = None if optimizer is None else self._one(optimizer)
        self._replica.look_at_loss(loss)
        value = loss.detach().reshape(())
        self.loss_sum = value if self.loss_sum is None else self.loss_sum + value
        self._replica.backward(loss, name, weight=weight, retain_graph=retain_graph)

    def update(self, optimizer: str | None = None) -> None:
        """Clip gradients as the estimator says, let an optimizer update its parameters, and clear gradients.

        Args:
            optimizer: Its name; None if there is only one.
        """
        self._replica.update(self._one(optimizer))

    def minimize(
        self,
        loss: torch.Tensor,
        optimizer: str | None = None,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Clear the gradients of an optimizer's parameters, then `backward` and `update`."""
        name = self._one(optimizer)
        self.optimizers[name].zero_grad(set_to_none=True)
        self.backward(
            loss, name if len(self.optimizers) > 1 else None, weight=weight, retain_graph=retain_graph
        )
        self.update(name)

    def _one(self, name: str | None) -> str:
        names = list(self._replica.optimizers.named)
        if name is None and len(names) == 1:
            return names[0]
        if name is None:
            raise ConfigError(
                f"there are the optimizers {', '.join(map(repr, names))}; name one, as in"
                f" run.minimize(loss, {names[0]!r})."
            )
        if name not in names:
            raise ConfigError(f"there is no optimizer {name!r}, only {', '.join(map(repr, names))}.")
        return name


def logged(returned: Any, who: str) -> dict[str, float | torch.Tensor]:
    """The numbers that a step returned, by name; raises ConfigError for anything else."""
    if returned is None:
        return {}
    given = returned if isinstance(returned, Mapping) else {"loss": returned}
    values: dict[str, float | torch.Tensor] = {}
    for name, value in given.items():
        single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not single or not isinstance(name, str):
            raise ConfigError(
                f"{who} must return the loss, a tensor of one number, or a dict of numbers by name; received"
                f" {_shown(returned if not isinstance(returned, Mapping) else value)}"
                + (f" for {name!r}." if isinstance(returned, Mapping) else ".")
            )
        values[name] = value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value)
    return values


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _made_up(columns: tuple[Any, ...]) -> tuple[Array, ...]:
    return tuple(np.zeros((_MADE_UP_ROWS, *column.shape[1:]), column.dtype) for column in columns)
