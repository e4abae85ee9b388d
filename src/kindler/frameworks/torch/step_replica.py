"""A replica trained by the user's own step, with any number of optimizers.

Each `run.backward` makes gradients of the mean over all ranks' rows. All ranks run every global step, one
without rows on two rows of zeros that do not count; each exchange checks that ranks ask for the same
gradients in the same order. A step to be skipped runs to its end on all ranks, and is then undone as a whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kindler.collective import Array, Batch, GradientExchange
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.frameworks.contract import Facts, Use
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.row_gather import RowGather
from kindler.frameworks.torch.device import backward_on
from kindler.frameworks.torch.export import numbered
from kindler.frameworks.torch.gather import Gather
from kindler.frameworks.torch.metrics import named_metrics
from kindler.frameworks.torch.module_replica import ModuleReplica, row_weight_complaints
from kindler.frameworks.torch.optim import step_optimizer
from kindler.frameworks.torch.optimizers import Optimizers, Schedules, build_optimizers, build_schedules
from kindler.frameworks.torch.parameters import group_names
from kindler.frameworks.torch.spec import SPARSE, against_several, optimizer_kind
from kindler.frameworks.torch.state import parse, snapshot, to_array
from kindler.frameworks.torch.step_copy import Undo, undo_of
from kindler.frameworks.torch.step_counter import StepCounter
from kindler.frameworks.torch.step_run import StepRun, logged
from kindler.frameworks.torch.step_spec import StepSpec, check_step, missing_in_step
from kindler.frameworks.torch.tried_step import TriedStep
from kindler.group import Group

_END = -1  # stands for the end of a step where ranks compare what they do
_MADE_UP_ROWS = 2  # BatchNorm needs more than one


class StepReplica(ModuleReplica):
    spec: StepSpec

    def __init__(self, spec: StepSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._optimizers: Optimizers | None = None
        self._schedules: Schedules | None = None
        self._gather: Gather | None = None
        self._run: StepRun | None = None
        self._shares = False
        self._exchanges = 0
        self._ours = False
        self._used = self._watches = False
        self._weight = (0.0, 0.0)
        self._made: dict[int, Any] = {}
        self._hooks: list[Any] = []
        self._shown: tuple[tuple[torch.Tensor, ...], LabelSource, int] | None = None
        self._step_trial: TriedStep | None = None

    @classmethod
    def make_spec(cls, **options: Any) -> StepSpec:
        spec = StepSpec(**{**options, "config": dict(options.get("config") or {})})
        if complaints := check_step(spec):
            raise ConfigError("\n".join(complaints))
        return spec

    @classmethod
    def facts(cls, spec: Any) -> Facts:
        return replace(super().facts(spec), labels="found")

    @classmethod
    def changed(cls, spec: Any, *, config: Mapping[str, Any], learning_rate: float | None) -> Any:
        if learning_rate is not None and isinstance(spec.optimizer, Mapping):
            raise ConfigError(
                f"learning_rate={learning_rate}: there are several optimizers,"
                f" {', '.join(map(repr, spec.optimizer))}.\n"
                "Hint: read their rates from the config in their creators, and give config={...}."
            )
        return super().changed(spec, config=config, learning_rate=learning_rate)

    @classmethod
    def complaints(cls, spec: Any, use: Use, value: Any = None) -> list[str]:
        if use in ("train", "judge"):
            return missing_in_step(spec, *(("optimizer", "loss") if use == "train" else ("loss",)))
        if use in ("server", "division"):
            return ["a step of your own moves the parameters itself.\nHint: sync='allreduce'."]
        if use == "several":
            given = spec.optimizer if isinstance(spec.optimizer, Mapping) else {"": spec.optimizer}
            sparse = any(issubclass(optimizer_kind(one), torch.optim.SparseAdam) for one in given.values())
            return [c for c in against_several(spec) if c != SPARSE] + ([SPARSE] if sparse else [])
        if use == "row_weights":  # the step finds them in `run`; only a loss must know them itself
            return [] if spec.eval_step is not None else row_weight_complaints(spec)
        return super().complaints(spec, use, value)

    @property
    def optimizers(self) -> Optimizers:
        if self._optimizers is None:
            if self.spec.loss is not None:
                _ = self.loss
            self._optimizers = self._build_optimizers()
            self._schedules = self._build_schedules(self._optimizers)
        return self._optimizers

    def _build_optimizers(self) -> Optimizers:
        return build_optimizers(self.spec, self.model)

    def _build_schedules(self, optimizers: Optimizers) -> Schedules | None:
        return build_schedules(self.spec, optimizers)

    @property
    def optimizer(self) -> Any:
        named = self.optimizers.named
        return next(iter(named.values())) if len(named) == 1 else self.optimizers

    @property
    def counter(self) -> StepCounter:
        if self._counter is None:
            loss = self.loss if self.spec.loss is not None else None
            metrics = named_metrics(self.spec.metrics, self.spec.config, loss)
            self._counter = StepCounter(metrics, self.device, self.model.get_submodule)
        assert isinstance(self._counter, StepCounter)
        return self._counter

    @property
    def run(self) -> StepRun:
        if self._run is None:
            self._run = StepRun(self)
        return self._run

    @property
    def size(self) -> int:
        return 1 if self._collective is None else self._collective.size

    def _all_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return list(self.optimizers.named.values())

    def fuse(
        self, worker: Group, settings: RunSettings, strategy: str, **options: Any
    ) -> GradientExchange | None:
        """Exchange gradients in each `run.backward`, through the collective of `join`."""
        if strategy != "allreduce":
            raise ConfigError(self.complaints(self.spec, "division")[0])
        self._shares = True
        self._watch_gradients()
        assert self._collective is not None, "join comes first"
        self._gather = Gather(RowGather(self._collective))
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
                optimizer.register_step_pre_hook(self._before_step(name))
        self._modes.train()
        if self.parameters.look():
            self._watch_gradients()
        undo = self._begin_watched()
        self._begin(batch)
        if batch.rows:
            features, labels = self._tensors(batch.features), self._tensors(batch.labels)
            if self._step_trial is not None:
                self._step_trial(features, labels, batch.rows)
                self._begin(batch)
            self._shown = features, self._label_source(batch), batch.rows
            self._step_on(features, labels, batch.rows)
        else:
            self._step_on_nothing(batch)
        self._shown = None
        if undo is not None and not self._shares:  # gradients may have come about without `run.backward`
            self._look_at_gradients_of(self.parameters.held)
        bad = self._agree(_END, float(self._guard is not None and self._guard.bad)) > 0
        if undo is not None and bad:
            self._leave_out(undo)
            self.counter.count_rows(0)
        else:
            if self._schedules is not None and self.spec.scheduler_step == "step":
                self._schedules.step()
            self.counter.count_rows(batch.rows)
        self.step += 1
        self._count_rows(batch)

    def _begin_watched(self) -> Undo | None:
        if self._guard is None:
            return None
        self._guard.begin_own_step()
        if not self._guard.skips:
            return None
        return self.undo()

    def undo(self) -> Undo:
        """Covers the model, its optimizers and the tallies."""
        everything = [p for module in self._modules().values() for p in module.parameters()]
        undo = undo_of([*everything, *self.parameters.held], self.tracked, self.optimizers, self._schedules)
        forget = self.counter.mark()

        def both() -> None:
            undo()
            forget()

        return both

    def _leave_out(self, undo: Undo) -> None:
        assert self._guard is not None, "who undoes steps watches losses"
        undo()
        for parameter in self.parameters.held:
            if parameter.grad is not None:
                self._made[id(parameter)] = weakref.ref(parameter.grad)
        self._guard.skip()

    def _step_on_nothing(self, batch: Batch) -> None:
        """Restores the buffers."""
        before = snapshot(self.tracked)
        self._step_on(self._tensors(_made_up(batch.features)), self._tensors(_made_up(batch.labels)), 0)
        with torch.no_grad():
            for buffer, value in zip(self.tracked.buffers(), before, strict=True):
                buffer.copy_(value)

    def look_at_loss(self, loss: float | torch.Tensor) -> None:
        """Losses of made-up rows are ignored."""
        if self._guard is None or self._shown is None:
            return
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
        features, source, rows = self._shown
        self._guard.passes(self.step + 1, value, features, source, rows)

    def _look_at_losses(self, values: Mapping[str, float | torch.Tensor]) -> None:
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
        self._weight = (float(batch.rows), float(batch.global_rows))
        if self._gather is not None:
            self._gather.begin()

    def losses_of(
        self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...], rows: int
    ) -> Any:
        labels = self._without_weights(labels, trains=True, made_up=not rows)
        with self._precision():
            return self.spec.train_step(self.run, self._by_name(features, labels))

    def _gathers_in_step(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext() if self._gather is None else self._gather.step(idle=not rows)

    def _step_on(
        self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...], rows: int
    ) -> None:
        with self._gathers_in_step(rows):
            returned = self.losses_of(features, labels, rows)
        self._refuse_unread_weights()
        values = logged(returned, "train_step")
        self._look_at_losses(values)
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
                "train_step moved no parameters, and returned no loss to minimize.\nHint: return the loss, or"
                ' {"loss": loss, ...}; or call run.minimize(loss, "name of an optimizer").'
            )
        if len(self.optimizers.named) > 1:
            names = ", ".join(map(repr, self.optimizers.named))
            raise ConfigError(
                f"train_step moved no parameters, and there are the optimizers {names}: which of them"
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
            given = self._by_name(self._tensors(batch.features), labels)
            returned = self.spec.eval_step(self.run, given)
        self.counter.note(logged(returned, "eval_step"), batch.rows)
        self.counter.count_rows(batch.rows)

    def _without_weights(
        self, labels: tuple[torch.Tensor, ...], *, trains: bool, made_up: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Row weights move to `run.sample_weight`."""
        weights = None
        if self._row_weights is not None:
            labels, weights = self._row_weights.split(labels, trains=trains, by_class=False)
        if weights is not None and made_up:
            weights = torch.ones_like(weights)  # zeros would be a sum that nobody can divide by
        self.run.weigh(weights)
        return labels

    def _refuse_unread_weights(self) -> None:
        if self._row_weights is not None and not self.run.weights_read:
            raise ConfigError(
                "train_step has not read run.sample_weight, so class_weight and sample_weight_col have no"
                " effect: a step of your own computes its loss itself.\nHint: multiply the loss of each row"
                " by it, as in (loss_of_rows * run.sample_weight).mean(), or leave the weights out of fit."
            )

    def _by_name(
        self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...]
    ) -> dict[str, torch.Tensor]:
        names = self._names_of(features)
        of_labels = self._label_names
        if self._row_weights is not None and self._row_weights.column:
            of_labels = of_labels[:-1]
        if len(of_labels) != len(labels):
            of_labels = numbered("y", len(labels))
        return dict(zip((*names, *of_labels), (*features, *labels), strict=True))

    def backward(
        self,
        loss: torch.Tensor,
        name: str | None,
        *,
        weight: float | torch.Tensor | None,
        retain_graph: bool,
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
            places = [None, *named]
            code = places.index(name) * 2 + (weight is not None)
            share = self._share(code, weight)
        if self._gather is not None:
            self._gather.share = share
        with self._own(), torch.autocast(self.device.type, enabled=False), backward_on(self.device.type):
            torch.autograd.backward(loss, retain_graph=retain_graph, inputs=None if only else parameters)
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

    def _share(self, code: int, weight: float | torch.Tensor | None) -> float:
        """Checks that all ranks are at the same place of the step."""
        mine, total = self._weight
        given = mine if weight is None else float(weight) if mine else 0.0
        told = self._agree(code + 1, given)
        total = total if weight is None else told
        return given / total if total else 0.0

    def _exchanged(
        self, grads: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor], share: float
    ) -> list[torch.Tensor | None]:
        assert self._collective is not None, "join comes first"
        arrays: list[Array] = []
        for grad, parameter in zip(grads, parameters, strict=True):
            if grad is None or not share:
                arrays.append(np.zeros_like(to_array(parameter)))
            else:
                arrays.append(to_array(grad * share))
        flags = np.array([grad is not None and share > 0 for grad in grads], np.int64)
        *sums, used = self._collective.sum([*arrays, flags])
        return [
            torch.from_numpy(array).to(parameter) if flag else None
            for array, parameter, flag in zip(sums, parameters, used, strict=True)
        ]

    def _agree(self, code: int, weight: float) -> float:
        """Raises unless all ranks are at the same place of the step; returns the sum of their weights."""
        if not self._shares:
            return weight
        assert self._collective is not None, "join comes first"
        self._exchanges += 1
        # Small enough for the sums of squares to be exact.
        place = float(code if code == _END else self._exchanges % 1000 * 64 + code % 64)
        [sums] = self._collective.sum([np.array([1.0, place, place * place, weight])])
        count, total, squares, weights = (float(value) for value in sums)
        if squares * count != total * total:
            raise ConfigError(
                "workers did different things in one step: each must call run.backward with the same"
                " optimizers in the same order.\nHint: let nothing that only one worker knows, such as its"
                " rows or its loss, decide whether backward is called."
            )
        return weights

    def update(self, name: str) -> None:
        if self._step_trial is not None and self._step_trial.running:
            return
        optimizer = self.optimizers[name]
        moved = self._parameters_of(name)
        self._clip(moved)
        step_optimizer(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def _parameters_of(self, name: str | None) -> list[torch.nn.Parameter]:
        if name is None:
            return self.parameters.held
        return [p for group in self.optimizers[name].param_groups for p in group["params"]]

    @contextmanager
    def _own(self) -> Iterator[None]:
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

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
                " run.backward(loss), or run.minimize(loss), which take those of all workers; in a"
                " LightningModule, self.manual_backward(loss)."
            )

    def _before_step(self, name: str) -> Callable[..., None]:
        def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._used = True
            if not self._shares:
                self._look_at_gradients_of(p for group in optimizer.param_groups for p in group["params"])
                return
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    known = self._made.get(id(parameter), lambda: None)()
                    if parameter.grad is not None and parameter.grad is not known:
                        raise ConfigError(
                            f"the optimizer {name!r} is about to move parameters by gradients that other"
                            " workers do not have.\nHint: compute them with run.backward(loss)."
                        )

        return look

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        if self._schedules is not None and self.spec.scheduler_step == "epoch":
            self._schedules.end_epoch(logs)

    def _optimizer_fields(self) -> dict[str, Any]:
        # Gradients that the next step adds to are the same on all ranks.
        held = enumerate(self.parameters.held)
        return {
            "groups": group_names(self.optimizer, self._modules()),
            "optimizer": {"named": self.optimizers.kept(self._modules())},
            "scheduler": self._schedules.state_dict() if self._schedules is not None else None,
            "gradients": {place: p.grad for place, p in held if p.grad is not None},
        }

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        super().load_state(data, weights_only_model=weights_only_model)
        if weights_only_model or self.spec.optimizer is None:
            return
        grads = parse(data).get("gradients", {})
        for place, parameter in enumerate(self.parameters.held):
            parameter.grad = grads[place].to(parameter) if place in grads else None
            if parameter.grad is not None:
                self._made[id(parameter)] = weakref.ref(parameter.grad)

    def _load_optimizer_fields(self, fields: Mapping[str, Any]) -> None:
        kept = fields["optimizer"].get("named")
        if kept is None:
            raise ConfigError(
                "the state is one of a model without a train_step.\n"
                "Hint: take only its weights, with Estimator.load()."
            )
        self.optimizers.load(kept, self._modules())
        if fields["scheduler"] is not None and self._schedules is not None:
            self._schedules.load_state_dict(fields["scheduler"])


def _made_up(columns: tuple[Any, ...]) -> tuple[Array, ...]:
    return tuple(np.zeros((_MADE_UP_ROWS, *column.shape[1:]), column.dtype) for column in columns)
