"""PyTorch: one replica of the user's model, stepped so that N ranks compute what one process would.

Building from what the user handed in is in `spec.py` and `optim.py`, the rule of each loss in
`loss.py`, counting in `metrics.py`; which parameters are trained in `parameters.py`, which
modules are in training mode in `modes.py`. How gradients travel is the business of the sync; when to step, of
the training loop.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch

from kindler.collective import Array, Collective, Gradients, gathering, share_bytes
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica, with_config
from kindler.frameworks.contract import Batch, LossWatch, Scored
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.rng import own_states, restore_own, seed_own
from kindler.frameworks.row_gather import RowGather, refuse_to_gather
from kindler.frameworks.scoring_model import ScoringModel
from kindler.frameworks.state_format import Buffer
from kindler.frameworks.torch.buffers import Tracked
from kindler.frameworks.torch.device import (
    Conveyor,
    OnTheirWay,
    arrays,
    backward_on,
    has_gpu_build,
    held,
    preload,
    resolve_device,
    tensors,
)
from kindler.frameworks.torch.divided import DividedOptimizer, Slices, against_division, division_of
from kindler.frameworks.torch.export import export, numbered
from kindler.frameworks.torch.gather import Gather
from kindler.frameworks.torch.graphs import (
    GraphedStep,
    facts_of,
    numbers_in_python,
    set_capturable,
    why_not,
)
from kindler.frameworks.torch.loss import Judged, LossRule
from kindler.frameworks.torch.loss_list import LossList, loss_parts, weight_parts
from kindler.frameworks.torch.metrics import Counter, named_metrics
from kindler.frameworks.torch.model_loss import ModelLoss, Trial, label_arguments
from kindler.frameworks.torch.modes import Modes
from kindler.frameworks.torch.optim import (
    build_optimizer,
    build_scheduler,
    bytes_to_come,
    refuse_several,
    step_optimizer,
    step_scheduler,
    with_rate,
)
from kindler.frameworks.torch.outputs import flat, names_of, without_loss
from kindler.frameworks.torch.parameters import (
    Parameters,
    agree_on,
    group_names,
    load_optimizer,
    lone_change,
    named_parameters,
    recall_trained,
    trained,
)
from kindler.frameworks.torch.row_weights import RowWeights, against_row_weights
from kindler.frameworks.torch.scoring import scoring_model
from kindler.frameworks.torch.spec import (
    TorchSpec,
    against_several,
    build_loss,
    build_model,
    check,
    dumps,
    loads,
    missing,
    synchronized,
    unfit_inputs,
)
from kindler.frameworks.torch.state import (
    Exchange,
    Freezer,
    GradientExchange,
    changes,
    dump,
    fork_seed,
    load_merged,
    merge_buffers,
    parse,
    parse_weights,
    save_weights,
    snapshot,
    to_array,
)
from kindler.frameworks.torch.step_guard import StepGuard
from kindler.frameworks.torch.tried_loss import TriedLoss

_MOST_BEGINS = 64
_UNDER_WAY = 2  # batches that are scored while the outputs of one come back

__all__ = ["TorchReplica", "TorchSpec", "check", "dumps", "loads", "preload", "resolve_device"]


class TorchReplica(BaseReplica):
    """One rank's copy of a PyTorch model; keeps the contracts `DriverModel` and `Stepper`.

    Optimizer, loss and scheduler are built when first needed, so a replica that only predicts needs none.

    Args:
        spec: What the user handed in.
        device: "auto", "cpu", "cuda" (one GPU a rank) or "cuda:0".
        rank: This rank; randomness other than the model's first weights differs by it.
        local_rank: Its number on its host, which chooses the GPU.
        seed: Creators see torch seeded with it.
        threads: Threads of torch's own operations; None leaves them as they are.
        feature_names: Names of the features, for `inputs="dict"` and `inputs="kwargs"`.
        label_names: Names of the labels, for complaints, and for a model that computes its own loss.
        label_shapes: Where rows of one batch may have another shape than those of another: the shape of a
            row of each label, in the first batch of all. Otherwise None.

    Attributes:
        mode: How steps are run, and why not as graphs, where the spec asks for that.
    """

    fuses = "torch"
    divisible = True
    takes_read_only = True

    def __init__(
        self,
        spec: TorchSpec,
        *,
        device: str = "auto",
        rank: int = 0,
        local_rank: int = 0,
        seed: int = 0,
        threads: int | None = None,
        feature_names: tuple[str, ...] = (),
        label_names: tuple[str, ...] = (),
        label_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec, self.rank, self.seed = spec, rank, seed
        self.device = resolve_device(device, local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if spec.tf32:
                torch.set_float32_matmul_precision("high")
                torch.backends.cudnn.allow_tf32 = True
        seed_own(seed)
        torch.manual_seed(seed)
        self.model: torch.nn.Module = build_model(spec).to(self.device)
        seed_own(seed, 0, rank)
        torch.manual_seed(seed + rank)
        self.epoch = self.step = 0
        self.output_names: tuple[str, ...] | None = None
        self._names, self._label_names = feature_names, label_names
        self._label_shapes = None if label_shapes is None else [tuple(shape) for shape in label_shapes]
        self._modes = Modes(self.model)
        self._given = {name: p.requires_grad for name, p in self.model.named_parameters()}
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._loss: LossRule | None = None
        self._row_weights: RowWeights | None = None
        self._guard: StepGuard | None = None
        self._counter: Counter | None = None
        self._parameters: Parameters | None = None
        self._collective: Collective | None = None
        self._exchange: GradientExchange | None = None
        self._divided: DividedOptimizer | None = None
        self._fully: Any = None
        self._tracked: Tracked | None = None
        self._looked_at_buffers = False
        self._buffers: list[torch.Tensor] = []
        self._changed: list[bool] = []
        self._epoch_rows = 0
        self._freezer = Freezer()
        scales = spec.precision == "fp16"
        self._scaler = torch.amp.GradScaler(self.device.type) if scales else None
        self._graphs: GraphedStep | None = None
        self._chosen = False
        self._now: Batch
        self._begins: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._trial: Trial | None = None
        self._tried: TriedLoss | None = None
        self._gather: Gather | None = None
        self.mode: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return bool(self.device.type == "cuda")

    def set_precision(self, precision: str) -> None:
        """Predict in this precision, whatever the model was trained in."""
        self.spec = replace(self.spec, precision=None if precision == "fp32" else precision)

    @classmethod
    def may_use_gpus(cls, spec: TorchSpec) -> bool:
        """Whether torch was built for GPUs."""
        return has_gpu_build()

    @classmethod
    def wants_process_group(cls, spec: TorchSpec) -> bool:
        """Whether the user's model calls `torch.distributed`."""
        return spec.process_group

    @classmethod
    def make_spec(cls, **options: Any) -> TorchSpec:
        """A spec of these fields of `TorchSpec`; `config` may be None."""
        spec = TorchSpec(**{**options, "config": dict(options.get("config") or {})})
        if complaints := check(spec):
            raise ConfigError("\n".join(complaints))
        return spec

    @classmethod
    def changed(cls, spec: TorchSpec, *, config: Mapping[str, Any], learning_rate: float | None) -> TorchSpec:
        """The spec with these entries of its config; the optimizer gets the rate, however it was given."""
        spec = with_config(spec, config)
        if learning_rate is None:
            return spec
        return replace(spec, optimizer=with_rate(spec.optimizer, learning_rate))

    dumps = staticmethod(dumps)
    loads = staticmethod(loads)
    lacking = staticmethod(missing)

    @classmethod
    def scoring_model(
        cls,
        spec: TorchSpec,
        live: TorchReplica | None,
        state: Callable[[], bytes],
        before: ScoringModel | None,
    ) -> ScoringModel:
        """The model with its parameters and buffers alone."""
        return scoring_model(spec, None if live is None else live.model, state(), before)

    against_several = staticmethod(against_several)
    against_division = staticmethod(against_division)

    @classmethod
    def against_row_weights(cls, spec: TorchSpec) -> list[str]:
        """What the loss says; it is made for that, if it is given by a creator."""
        if spec.loss is None:  # which `lacking` complains about, where one is needed
            return []
        if not callable(spec.loss):
            return against_row_weights(spec.loss)
        try:
            return against_row_weights(build_loss(spec))
        except Exception:  # noqa: BLE001 - a creator of the user's: its error is the worker's to tell
            return []

    def watch_losses(self, watch: LossWatch) -> None:
        """Show `watch` every loss; those of a GPU a little later."""
        self._guard = StepGuard(watch, self._names)

    def weigh_rows(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        """Multiply the losses of rows by weights."""
        self._row_weights = RowWeights(classes, column=column)

    @classmethod
    def against_parts(cls, spec: TorchSpec) -> list[str]:
        """The norm of all gradients is known to none of several servers."""
        return [] if spec.clip_norm is None else ["clip_norm needs the gradients of all parameters."]

    @classmethod
    def needs_labels(cls, spec: TorchSpec) -> bool | Literal["found"]:
        """A model that computes its own loss may have labels among its inputs."""
        return "found" if spec.loss == "model" else True

    @staticmethod
    def has_instance(spec: TorchSpec) -> bool:
        """Whether the user holds something that training changes, rather than a way to make it."""
        return isinstance(spec.model, torch.nn.Module) or (
            isinstance(spec.loss, torch.nn.Module) and any(True for _ in spec.loss.parameters())
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, built at first use together with its schedule."""
        if self._optimizer is None:
            if self.spec.loss is not None:
                _ = self.loss  # on its device before an optimizer takes its parameters
            self._optimizer = build_optimizer(self.spec, self.model)
            self._set_capturable(self._optimizer)
            self._scheduler = build_scheduler(self.spec, self._optimizer)
        return self._optimizer

    @property
    def loss(self) -> LossRule:
        """The loss with its rule, built at first use."""
        if self._loss is None and self.spec.loss == "model":
            rule = ModelLoss(self.model, self._label_arguments)
            self._trial = Trial(rule, half=self.spec.precision is not None)
            self._loss = rule
        elif self._loss is None and (parts := loss_parts(self.spec.loss)) is not None:
            losses = {name: self._built_loss(replace(self.spec, loss=loss)) for name, loss in parts.items()}
            self._loss = LossList(
                losses,
                weight_parts(self.spec.loss_weights, list(parts)),
                named=isinstance(self.spec.loss, Mapping),
                labels=self._label_names,
                varying=self._label_shapes is not None,
            )
        elif self._loss is None:
            loss = self._built_loss(self.spec)
            self._loss = LossRule(loss, varying=self._label_shapes is not None)
        if self._tried is None and self._loss.unknown:
            accumulates = self.spec.accumulation_steps > 1
            self._tried = TriedLoss(self._loss, self.device, accumulates=accumulates)
        return self._loss

    def _built_loss(self, spec: TorchSpec) -> Any:
        loss = build_loss(spec)
        return loss.to(self.device) if isinstance(loss, torch.nn.Module) else loss

    @property
    def parameters(self) -> Parameters:
        """What training moves."""
        if self._parameters is None:
            self._parameters = Parameters(self.model, self.optimizer)
        return self._parameters

    @property
    def counter(self) -> Counter:
        """The tallies, built at first use."""
        if self._counter is None:
            loss = self.loss if self.spec.loss is not None else None
            metrics = named_metrics(self.spec.metrics, self.spec.config, loss)
            if isinstance(loss, LossList):
                metrics |= loss.metrics()
            self._counter = Counter(metrics, self.device)
        return self._counter

    @property
    def tracked(self) -> Tracked:
        """The buffers that training may change."""
        if self._tracked is None:
            self._tracked = Tracked(*self._modules().values())
        return self._tracked

    def hold(self, columns: Sequence[Array]) -> Sequence[Callable[[slice | Array], Any]] | None:
        """Keep these columns on the GPU, if there is one and the spec lets it."""
        return held(columns, self.device, self.spec.device_cache)

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state; what ranks share besides gradients goes through `collective`."""
        if self._collective is not None:
            raise ConfigError("this replica has joined others already; a replica serves one run.")
        self._collective = collective
        if collective.size == 1:
            return
        if not self.spec.process_group and (complaints := synchronized(self.model)):
            raise ConfigError(complaints[0])
        refuse_several(self.optimizer)
        state = share_bytes(collective, self.state() if collective.rank == 0 else b"")
        if collective.rank != 0:
            self.load_state(state)
        self.parameters.look()
        self._watch_buffers()

    def fuse(self, exchange: Exchange) -> None:
        """Exchange gradients within `train_step`, while backward still runs."""
        wanted = self.parameters.unexchanged()
        self._exchange = exchange.gradients(wanted)
        self.parameters.exchange(wanted)
        self._meet_in_steps()

    def divide(self, exchange: Any, asked: str | None, *, one_copy: bool = False) -> None:
        """Exchange gradients within `train_step`, and let the optimizer move only what this rank owns.

        Args:
            exchange: What makes slices.
            asked: What the user says that the optimizer can be divided into; None if it is known.
            one_copy: Whether ranks of one host share one copy of the parameters.
        """
        assert self._collective is not None, "join comes first"
        self._refuse_scaling("sharded")
        division = division_of(type(self.optimizer), asked)
        wanted = self.parameters.unexchanged()
        whole = division == "parameters"
        sliced: Slices = exchange.sliced(wanted, whole=whole, one_copy=one_copy)
        self._exchange = sliced
        self._divided = DividedOptimizer(self.optimizer, sliced, self._collective)
        self.parameters.exchange(wanted)
        self._meet_in_steps()

    def _meet_in_steps(self) -> None:
        """Ranks make steps together: losses may gather rows, and know what all of several divide by."""
        collective = self._collective
        assert collective is not None, "join comes first"
        if collective.size > 1:
            self._gather = Gather(RowGather(collective))
        if self.spec.loss is not None and isinstance(rule := self.loss, LossList):
            rule.total_of = lambda own: [float(x) for x in collective.sum([np.array(own, np.float64)])[0]]

    def shard_fully(self, mesh: Any, modules: Sequence[str]) -> None:
        """Keep only this rank's part of the parameters between steps.

        Args:
            mesh: The ranks, as torch sees them.
            modules: Names of modules that are gathered by themselves.
        """
        from kindler.frameworks.torch.fully_sharded import FullySharded

        assert self._collective is not None, "join comes first"
        self._refuse_scaling("fsdp")
        if self.spec.accumulation_steps > 1:
            raise ConfigError(
                "sync='fsdp': accumulation_steps must be 1, since all workers gather parameters in every pass"
                " and may have different numbers of rows.\nHint: sync='sharded' allows more."
            )
        self._meet_in_steps()
        self._fully = FullySharded(self.model, self.optimizer, mesh, self._collective, modules)
        self._parameters = None

    def _refuse_scaling(self, sync: str) -> None:
        if self._scaler is not None:
            raise ConfigError(
                f"sync={sync!r}: precision='fp16' scales losses, and whether a gradient fits is known to the"
                " worker alone that owns it.\nHint: precision='bf16' needs no scaling."
            )

    def gather_state(self) -> None:
        """Where the optimizer is divided: let the first rank know the whole of it until the next step."""
        if self._fully is not None:
            self._fully.gather()
        if self._divided is not None:
            self._divided.gather()

    def optimizer_bytes(self) -> int:
        """The memory of the optimizer's state in this process."""
        if self._divided is not None:
            return self._divided.nbytes
        if self._fully is not None:
            return int(self._fully.nbytes)
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def as_given(self) -> None:
        """Freeze and unfreeze as the user's own model says, whatever the state that was loaded does."""
        if isinstance(self.spec.model, torch.nn.Module):
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(self._given.get(name, parameter.requires_grad))

    def begin_epoch(self, epoch: int) -> None:
        """Seed by epoch and rank, so that a resumed epoch is the same as an uninterrupted one."""
        self.epoch = epoch
        self._epoch_rows = 0
        seed_own(self.seed, epoch, self.rank)
        torch.manual_seed(fork_seed(self.seed, epoch, self.rank))
        self._watch_buffers()

    def train_step(self, batch: Batch) -> None:
        """One optimizer step on the mean over the rows of all ranks."""
        if not batch.global_rows:
            return
        fresh = self._begin_step()
        if (graphs := self._graphed()) is not None:
            self._replayed(graphs, batch)
            return
        if batch.rows:
            self._backward(batch, self._tensors(batch.features), self._tensors(batch.labels))
        elif self.spec.process_group:
            raise ConfigError(
                f"worker {self.rank} has no row in step {self.step + 1}, and with process_group=True every"
                " worker must run the model in every step.\n"
                "Hint: a batch_size that leaves the last batch of an epoch at least as many rows as there are"
                " workers."
            )
        else:
            self._pass_without_rows(batch)
        if fresh:
            self._take_in(fresh)
        self._move()
        self._count_rows(batch)

    def _graphed(self) -> GraphedStep | None:
        """What runs steps as graphs, if that was asked for and can be."""
        if not self._chosen and self.spec.compile in ("auto", "graphs"):
            reason = why_not(
                self.spec,
                self.optimizer,
                self.device,
                several=self._exchange is not None or self._fully is not None,
                stateful_metrics=self.counter.has_states,
                skips=self._guard is not None and self._guard.skips,
            )
            self._note_mode(reason)
            if reason is None:
                loss = self.loss.function
                parts = [self.model, *([loss] if isinstance(loss, torch.nn.Module) else [])]
                self._graphs = GraphedStep(self._whole_step, self._facts, partial(numbers_in_python, *parts))
        self._chosen = True
        return self._graphs

    def _set_capturable(self, optimizer: torch.optim.Optimizer) -> None:
        set_capturable(optimizer, self.device, wanted=self.spec.compile in ("auto", "graphs"))

    def _note_mode(self, problem: str | None) -> None:
        if problem is not None and self.spec.compile == "graphs":
            raise ConfigError(
                f"compile='graphs': a step cannot be recorded as a CUDA graph: {problem}.\n"
                "Hint: compile='auto' records steps where that is possible; compile='default' uses"
                " torch.compile."
            )
        self.mode = "graphs" if problem is None else f"eager: {problem}"

    def _replayed(self, graphs: GraphedStep, batch: Batch) -> None:
        self.loss.look(self._label_source(batch))
        self._freezer.settle()
        self._now = batch
        if graphs.run(self._tensors(batch.features), self._tensors(batch.labels)):
            self.counter.count(batch.rows)  # the rest of what `add` does is in the graph
            if self._guard is not None:
                self._guard.replayed(
                    self.step + 1, self.counter.loss_total(), self._label_source(batch), batch.rows
                )
        elif graphs.problem is not None:
            self._note_mode(graphs.problem)
        self.step += 1
        self._count_rows(batch)

    def _whole_step(self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...]) -> None:
        for parameter in self.parameters.held:  # a recording that failed has left some
            parameter.grad = None
        self._backward(self._now, features, labels)
        self._clip()
        step_optimizer(self.optimizer)

    def _facts(self) -> Any:
        return facts_of(self.optimizer, self.parameters.held), self.loss.all_count

    def names(self) -> list[str]:
        """What the trained parameters are called; those of nobody's module by their number."""
        if self._fully is not None:
            return list(self._fully.named())
        known = {id(p): name for name, p in named_parameters(self._modules()).items()}
        return [known.get(id(p), f"parameter {place}") for place, p in enumerate(self.parameters.trained)]

    def read(self) -> list[Array]:
        """Copies of the trained parameters."""
        if self._fully is not None:
            return [to_array(parameter) for parameter in self._fully.named().values()]
        return [to_array(parameter) for parameter in self.parameters.trained]

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters."""
        self._freezer.settle()
        with torch.no_grad():
            for parameter, array in zip(self.parameters.trained, arrays, strict=True):
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def gradients(self, batch: Batch) -> Gradients:
        """The gradient of the mean over this rank's rows, and what that mean weighs."""
        self._begin_step()
        trained = self.parameters.trained
        if not batch.rows:
            return Gradients([np.zeros_like(to_array(parameter)) for parameter in trained], 0.0)
        weight = self._backward(batch, self._tensors(batch.features), self._tensors(batch.labels))
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
            self._scaler.update()
        # Where no weights divide it, the sum of all ranks' gradients is the mean over the rows of all.
        scale = 1.0 if self.loss.weighted else batch.global_rows / batch.rows
        self._count_rows(batch)
        return Gradients([_gradient(parameter, scale) for parameter in trained], float(weight))

    def read_into(self, arrays: Sequence[Array]) -> None:
        """Copy the trained parameters."""
        with torch.no_grad():
            for parameter, array in zip(self.parameters.trained, arrays, strict=True):
                torch.from_numpy(array).copy_(parameter)

    def apply(self, gradients: Sequence[Array | None]) -> None:
        """One step of the optimizer, with clipping, and of a schedule that moves by steps."""
        for parameter, array in zip(self.parameters.trained, gradients, strict=True):
            parameter.grad = (
                None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(parameter)
            )
        if self._scaler is not None and not self._all_finite():
            self.step += 1  # as the scaler does: a gradient that was too large moves nothing
            return
        self._move(unscaled=True)

    def pass_step(self) -> None:
        """Let a schedule that moves by steps go on, where others step and this rank has no rows."""
        _ = self.optimizer  # which its schedule is made with
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch: the optimizer has not stepped before
            self._step_schedule()
        self.step += 1

    def _step_schedule(self) -> None:
        if self._scheduler is not None and self.spec.scheduler_step == "step":
            self._scheduler.step()

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        """The first server's state, with what the others know of their parameters."""
        fields = [parse(data) for data in states]
        whole, names = fields[0], self.names()
        order = {name: place for place, name in enumerate(n for group in whole["groups"] for n in group)}
        for part, places in zip(fields[1:], owned[1:], strict=True):
            for name in (names[place] for place in places):
                own = name.removeprefix("loss:")
                home = "model" if own == name else "loss"
                whole[home][own] = part[home][own]
                if (kept := part["optimizer"]["state"].get(order[name])) is not None:
                    whole["optimizer"]["state"][order[name]] = kept
        return dump(whole)

    def rates(self) -> list[float]:
        """The rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set the rate of each group."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _begin_step(self) -> list[torch.nn.Parameter]:
        """Ready for backward; the parameters that are trained from this step on."""
        _ = self.optimizer, self.tracked  # built before anything runs in training mode
        if self._divided is not None:
            self._freezer.settle()  # once they have this rank's gradients, others may move parameters
        if self._fully is not None:
            self._freezer.settle()  # what it copies is let go
            self._fully.begin_step()
        self._modes.train()
        if self._guard is not None:
            self._guard.begin_step(self.tracked)
        if self._gather is not None:
            self._gather.begin()
        fresh = self._fresh_parameters()
        for parameter in self.parameters.held:
            parameter.grad = None
        return fresh

    def _move(self, *, unscaled: bool = False) -> None:
        if self._guard is not None and self._guard.left_out(
            self.parameters.held, self.tracked, self._others, scaled=self._scaler is not None
        ):
            self.step += 1
            return
        if self._divided is not None:
            self._freezer.settle()
            clips = {"clip_norm": self.spec.clip_norm, "clip_value": self.spec.clip_value}
            self._divided.update(step_optimizer, **clips)
        else:
            scaler = None if unscaled else self._scaler
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self._clip()
            self._freezer.settle()
            step_optimizer(self.optimizer, scaler)
        self._step_schedule()
        self.step += 1

    def _count_rows(self, batch: Batch) -> None:
        self._epoch_rows += batch.rows
        if not self._looked_at_buffers and batch.rows:  # soon, and not after an epoch
            self.tracked.refuse_new()
            self._looked_at_buffers = True

    def eval_step(self, batch: Batch) -> None:
        """Count loss and metrics of a batch, learning nothing."""
        if not batch.rows:
            return
        self._modes.evaluate()
        with torch.inference_mode():
            self._judge(
                self._tensors(batch.features),
                self._tensors(batch.labels),
                batch.rows,
                self._label_source(batch),
            )

    def merge_buffers(self) -> None:
        """Make what training changed besides weights (BatchNorm's statistics) the same on all ranks."""
        self.tracked.refuse_new()
        if self._fully is not None:
            self._fully.unshard()  # ranks may have different numbers of rows to judge
        if (others := self._others) is not None:
            odd = self.tracked.reshaped(others, self._buffers)
            changed = [flag and not other for flag, other in zip(self._buffer_changes(), odd, strict=True)]
            merge_buffers(others, self.tracked, changed, self._epoch_rows)

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """Move a per-epoch schedule."""
        if self._scheduler is not None and self.spec.scheduler_step == "epoch":
            step_scheduler(self._scheduler, logs)

    def take_tallies(self) -> bytes:
        """This rank's sums and metric states since they were last taken."""
        return self.counter.take()

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """All ranks' tallies as numbers."""
        merged = self.counter.merge(tallies)
        if self.spec.loss is not None and isinstance(rule := self.loss, LossList):
            merged["loss"] = rule.combined(merged)
        return merged

    def running_loss(self) -> float:
        """This rank's mean loss since tallies were last taken."""
        return self.counter.running_loss()

    def running_metrics(self) -> dict[str, float]:
        """This rank's metrics since tallies were last taken, without those that torchmetrics computes."""
        return self.counter.running_metrics()

    def loss_sums(self) -> tuple[float, float]:
        """This rank's summed loss since tallies were last taken, and its weight."""
        return self.counter.loss_sums()

    def learning_rate(self) -> float:
        """The first parameter group's rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> bytes:
        """Weights, optimizer, schedule, randomness, epoch and step."""
        return dump(self._fields())

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """A copy of what `state` has, made now; its bytes are made by the function, on any thread."""
        return self._freezer.freeze(self._fields(), restless=self.tracked.buffers())

    def settle(self) -> None:
        """Wait until what was frozen is copied; only then may others change weights."""
        self._freezer.settle()

    def _fields(self) -> dict[str, Any]:
        optimizer = self.optimizer if self._optimizes else None
        loss = self._learning_loss()
        return {
            "model": self._model_state(),
            "loss": loss.state_dict() if loss is not None else None,
            "trained": trained(self._modules()),
            "groups": self._group_names() if optimizer is not None else None,
            "resting": sorted(self._modes.resting),
            "optimizer": self._optimizer_state() if optimizer is not None else None,
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            **({} if self._scaler is None else {"scaler": self._scaler.state_dict()}),
            "rng": self._rng(),
            "epoch": self.epoch,
            "step": self.step,
        }

    @property
    def _optimizes(self) -> bool:
        """Whether its state has that of an optimizer."""
        return self.spec.optimizer is not None

    def _model_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.model.state_dict() if self._fully is None else self._fully.model_state()
        return state

    def _group_names(self) -> list[list[str | None]]:
        if self._fully is not None:
            return [list(names) for names in self._fully.groups]
        return group_names(self.optimizer, self._modules())

    def _optimizer_state(self) -> dict[str, Any]:
        if self._fully is not None:
            state: dict[str, Any] = self._fully.state_dict()
            return state
        return self.optimizer.state_dict() if self._divided is None else self._divided.state_dict()

    def expected_bytes(self) -> int:
        """The size of `state` now, and of what the optimizer will add in its first step."""
        held = self._held_optimizers() if self._optimizes else []
        return len(self.state()) + sum(map(bytes_to_come, held))

    def _held_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self.optimizer]

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`, or take only the model's weights from it."""
        fields = parse(data)
        self._freezer.settle()
        self.model.load_state_dict(fields["model"])
        if weights_only_model:
            return
        loss = self._learning_loss()
        if fields["loss"] is not None and loss is not None:
            loss.load_state_dict(fields["loss"])
        self._modes.recall(fields["resting"])
        if fields["optimizer"] is not None and self.spec.optimizer is not None:
            self._load_optimizer(fields)
        recall_trained(fields["trained"], self._modules())
        self._load_scheduler(fields)
        if self._scaler is not None and fields.get("scaler"):
            self._scaler.load_state_dict(fields["scaler"])
        self.epoch, self.step = fields["epoch"], fields["step"]
        self._load_rng(fields["rng"])

    def _load_optimizer(self, fields: Mapping[str, Any]) -> None:
        load_optimizer(self.optimizer, fields["optimizer"], fields["groups"], self._modules())
        self._set_capturable(self.optimizer)

    def _load_scheduler(self, fields: Mapping[str, Any]) -> None:
        if fields["scheduler"] is not None and self._scheduler is not None:
            self._scheduler.load_state_dict(fields["scheduler"])

    def local_state(self) -> bytes:
        """What this rank alone has within an epoch: randomness, tallies, and buffers that it changed."""
        changed = self._buffer_changes()
        buffers = {
            i: b for i, b in enumerate(self.tracked.buffers()) if self._others is not None and changed[i]
        }
        return dump(
            {
                "rng": self._rng(),
                "own": own_states(),
                "tallies": self.counter.keep(),
                "rows": self._epoch_rows,
                "changed": changed,
                "buffers": buffers,
            }
        )

    def load_local_state(self, data: bytes) -> None:
        """Go on from `local_state` of this rank, in the epoch that has just begun."""
        fields = parse(data)
        with torch.no_grad():
            for place, buffer in enumerate(self.tracked.buffers()):
                if place in fields["buffers"]:
                    buffer.copy_(fields["buffers"][place])
        self.counter.restore(fields["tallies"])
        self._epoch_rows, self._changed = fields["rows"], fields["changed"]
        self._load_rng(fields["rng"])
        if "own" in fields:
            restore_own(fields["own"])

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """Go on from the states of other ranks than there are now, in the epoch that has just begun."""
        fields = [parse(data) for data in states]
        rows = [part["rows"] for part in fields]
        load_merged(self.tracked, [part["buffers"] for part in fields], rows)
        if self.rank == 0:
            self.counter.restore_all([part["tallies"] for part in fields])
        self._epoch_rows = sum(rows) // size
        if self._others is not None:
            # One rank alone had no reason to look which buffers it changes.
            told = [part["changed"] for part in fields if part["changed"]] or [[True] * len(self._changed)]
            self._changed = [any(flags) for flags in zip(*told, strict=True)]
        seed_own(self.seed, self.epoch, self.rank, self.step)
        torch.manual_seed(fork_seed(self.seed, self.epoch, self.rank, self.step))

    def trained_model(self) -> torch.nn.Module:
        """The model itself, ready to predict."""
        return self.model.eval()

    def weights(self) -> bytes:
        """The model's state dict, as `torch.save` writes it."""
        return save_weights(self._model_state())

    def load_weights(self, data: bytes) -> None:
        """Take the weights of a state dict's file, or of a checkpoint."""
        self._freezer.settle()
        if self._fully is not None:
            self._fully.load_model(parse_weights(data))
        else:
            self.model.load_state_dict(parse_weights(data))

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The outputs for these rows; several outputs in the model's order."""
        self._modes.evaluate()
        with torch.inference_mode(), self._precision():
            outputs = self._scored(features)
        self.output_names = names_of(outputs)
        return arrays(outputs)

    def predict_all(self, batches: Iterable[tuple[Array, ...]]) -> Iterator[Scored]:
        """On a GPU, a batch is copied and computed while the outputs of those before it come back."""
        if not self.on_gpu:
            yield from super().predict_all(batches)
            return
        waiting: deque[tuple[int, OnTheirWay, tuple[str, ...] | None]] = deque()
        for batch in batches:
            self._modes.evaluate()
            with torch.inference_mode(), self._precision():
                outputs = self._scored(batch)
            waiting.append((len(batch[0]), OnTheirWay(outputs), names_of(outputs)))
            if len(waiting) > _UNDER_WAY:
                yield self._arrived(*waiting.popleft())
        while waiting:
            yield self._arrived(*waiting.popleft())

    @cached_property
    def _conveyor(self) -> Conveyor:
        return Conveyor(self.device)

    def _scored(self, features: tuple[Array, ...]) -> Any:
        carried = self._conveyor.carry(features) if self.on_gpu else self._tensors(features)
        outputs = self._forward(carried)
        own = self.spec.inputs == "kwargs" or self.spec.loss == "model"
        return without_loss(outputs) if own else outputs

    def _arrived(self, rows: int, outputs: OnTheirWay, names: tuple[str, ...] | None) -> Scored:
        self.output_names = names
        return Scored(rows, outputs.arrived(), names)

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
        """Write the model as "onnx" or "openvino"; a few rows of its inputs were predicted before."""
        outputs = self.predict(tuple(features))
        export(
            self.model,
            form,
            path,
            names=self._names_of(features),
            outputs=self.output_names or numbered("prediction_", len(outputs)),
            features=features,
            inputs=self.spec.inputs,
        )

    @property
    def _others(self) -> Collective | None:
        """What joins this replica to others; None where there are none."""
        return self._collective if self._collective is not None and self._collective.size > 1 else None

    def _watch_buffers(self) -> None:
        """From now on, note which buffers training changes; without other ranks nobody asks."""
        self._buffers = snapshot(self.tracked) if self._others is not None else []
        self._changed = [False] * len(self._buffers)

    def _buffer_changes(self) -> list[bool]:
        """Which buffers this rank has changed in this epoch, also before it was interrupted."""
        if self._others is None:
            return []
        now = changes(self.tracked, self._buffers)
        return [flag or before for flag, before in zip(now, self._changed, strict=True)]

    def _learning_loss(self) -> torch.nn.Module | None:
        """The loss, if it is a module of the user's own: it may learn as the model does."""
        loss = self.loss.function if self.spec.loss is not None else None
        own = isinstance(loss, torch.nn.Module) and not type(loss).__module__.startswith("torch.")
        return loss if own else None

    def _modules(self) -> dict[str, torch.nn.Module]:
        """What learns, by a prefix for names."""
        loss = self._learning_loss()
        return {"": self.model} if loss is None else {"": self.model, "loss:": loss}

    def _fresh_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that are trained from this step on, and were not before; the other ranks hear of it."""
        if not self.parameters.look() or self._exchange is None:
            return []
        fresh = self.parameters.unexchanged()
        if fresh:
            self._exchange.announce()
        return fresh

    def _take_in(self, fresh: list[torch.nn.Parameter]) -> None:
        """Exchange these parameters' gradients too, from the step that has just been computed on."""
        assert self._exchange is not None, "without other ranks nothing is fresh"
        assert self._collective is not None, "join comes before fuse"
        if not self._exchange.all_announced():
            raise lone_change()
        agree_on(self._collective, fresh)
        self._exchange.extend(fresh)
        if self._divided is not None:
            self._divided.take_in()
        self.parameters.exchange(fresh)

    def _label_source(self, batch: Batch) -> LabelSource:
        number, rows = self.step + 1, batch.rows

        def within_step(row: int) -> str:
            return f"{row} of the {rows} that worker {self.rank} has in step {number}"

        return LabelSource(batch.labels, self._label_names, batch.where or within_step)

    def _rng(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {"rank": self.rank, "cpu": torch.get_rng_state(), "cuda": cuda}

    def _load_rng(self, rng: Mapping[str, Any]) -> None:
        if rng["rank"] != self.rank:  # another rank's dropout masks must not become this one's
            torch.manual_seed(fork_seed(self.seed, self.epoch, self.rank, self.step))
            return
        torch.set_rng_state(rng["cpu"])
        if rng["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], self.device)

    def _backward(
        self, batch: Batch, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...]
    ) -> float | torch.Tensor:
        """All micro-batches of one step; fused, `grad` holds the mean over all ranks afterwards.

        Returns what this rank's own mean weighs.
        """
        source = self._label_source(batch)
        passes = min(self.spec.accumulation_steps, batch.rows)
        if self.spec.loss == "model" and (passes > 1 or self._others is not None):
            self._try_loss(features, labels, batch.rows)
        weight: float | torch.Tensor = 0.0
        unit = 1.0
        for number, (start, stop) in enumerate(_cuts(batch.rows, passes), start=1):
            if passes == 1:
                judged = self._judge(features, labels, batch.rows, source)
            else:
                parts = [tuple(t[start:stop] for t in tensors) for tensors in (features, labels)]
                judged = self._judge(parts[0], parts[1], stop - start, source.part(start, stop))
            if judged.opaque and self._others is not None:
                self._refuse_other_shapes(batch)
            # Where all rows have one shape it is enough to count rows: the others need not be divided.
            unit = batch.global_rows * (judged.per_row if self._label_shapes is None else 1.0)
            weight = weight + judged.weight
            share = 1.0 if self.loss.sums else judged.scale / unit
            with self._collecting(last=number == passes, weight=weight / unit):
                self._descend(judged.loss, share)
        if self._exchange is not None:
            self._exchange.finish()
        elif self.loss.weighted:
            self._divide(weight / unit if self._fully is None else self._fully.total(float(weight / unit)))
            return weight / unit
        return batch.rows

    def _descend(self, loss: torch.Tensor, share: float) -> None:
        """Backward from `share` times the loss.

        The share is what backward begins with: the numbers are those of a product, which would be one more
        kernel in each direction. In steps of small models on a GPU it is the number of kernels that counts.
        """
        if self._scaler is not None:
            scaled = self._scaler.scale(loss if share == 1.0 else loss * share)
            self._back_from(scaled, None)
            return
        key = (share, loss.dtype)
        begin = self._begins.get(key)
        if begin is None:
            begin = torch.full((), share, dtype=loss.dtype, device=loss.device)
            if len(self._begins) < _MOST_BEGINS:  # none is let go: a recorded step uses the one it has seen
                self._begins[key] = begin
        self._back_from(loss, begin)

    def _back_from(self, loss: torch.Tensor, begin: torch.Tensor | None) -> None:
        with backward_on(self.device.type):
            if self._gather is not None and self._gather.pending:
                self._gather.backward(loss, begin)
            else:
                loss.backward(begin)  # type: ignore[no-untyped-call]

    def _pass_without_rows(self, batch: Batch) -> None:
        """Take part in what ranks do together in a step, with a row of zeros that teaches nothing."""
        may = self.loss.unknown and self._tried is not None and self._tried.gathers is not False
        gather = self._gather if may else None
        outputs: Any = ()
        if gather is not None or self._fully is not None:
            self._modes.evaluate()  # layers must neither draw random numbers nor learn from it
            with self._precision():
                outputs = self._forward(self._tensors(_one_row(batch.features)))
        if gather is not None:
            weighed = self._row_weights is not None and self._row_weights.column
            labels = self._tensors(_one_row(batch.labels[:-1] if weighed else batch.labels))
            assert self._tried is not None, "an unknown loss is tried"
            if not self._tried.listen(outputs, labels):
                gather = None
            else:
                with self._precision(), gather.step(idle=True):
                    self.loss.take_part(outputs, labels)
        if isinstance(self.loss, LossList):
            self.loss.idle()
        if gather is not None:
            with backward_on(self.device.type):
                gather.backward(None)
        if self._exchange is not None:
            self._exchange.idle(weighted=self.loss.weighted)
        elif self._fully is not None:
            nothing = torch.stack([part.float().sum() for part in flat(outputs)]).sum() * 0.0
            nothing.backward()  # type: ignore[no-untyped-call]
            if self.loss.weighted:
                self._divide(self._fully.total(0.0))

    def _refuse_other_shapes(self, batch: Batch) -> None:
        """A mean that the loss took itself: over what, only rows of one shape leave no doubt."""
        for place, (label, shape) in enumerate(zip(batch.labels, self._label_shapes or (), strict=False)):
            if label.shape[1:] != shape:
                raise ConfigError(
                    f"rows of {self._label_names[place]!r} have shape {label.shape[1:]} in this batch and"
                    f" {shape}"
                    " in the first one, and the loss returns a mean: whether it is one over rows, over"
                    " all values"
                    " or over those that are not padding is not known, so workers cannot weigh theirs.\n"
                    "Hint: let the loss return one loss for each row or value, not reduced; or use"
                    " CrossEntropyLoss(ignore_index=...); or pad all batches to one length."
                )

    def _collecting(self, *, last: bool, weight: float | torch.Tensor) -> AbstractContextManager[Any]:
        """Around one backward: only the last of a step lets gradients travel."""
        if self._exchange is None:
            return nullcontext()
        if not last:
            paused: AbstractContextManager[Any] = self._exchange.paused()
            return paused
        if self.loss.weighted:
            self._exchange.weigh(weight)
        return nullcontext()

    def _divide(self, divisor: float | torch.Tensor) -> None:
        """Without other ranks: what the exchange of gradients does with weights."""
        if isinstance(divisor, float):
            if divisor == 1.0:
                return
            divisor = divisor or 1.0  # nothing weighs anything, so all gradients are zero
        grads = [parameter.grad for parameter in self.parameters.held if parameter.grad is not None]
        torch._foreach_div_(grads, divisor)

    def _judge(
        self,
        features: tuple[torch.Tensor, ...],
        labels: tuple[torch.Tensor, ...],
        rows: int,
        source: LabelSource,
    ) -> Judged:
        rule, weights = self.loss, None
        if self._row_weights is not None:
            trains, by_class = torch.is_grad_enabled(), rule.by_class
            labels, weights = self._row_weights.split(labels, trains=trains, by_class=by_class)
        with self._precision():
            if isinstance(rule, ModelLoss):
                inputs = self._inputs(features, labels)
                outputs = self._called(self._compiled, inputs)
                judged = rule.judge(outputs, inputs, rows)
                outputs, labels = rule.for_metrics(outputs, labels, inputs)
            else:
                outputs = self._forward(features)
                with self._gathering(outputs, labels, rows, weights):
                    judged = rule(outputs, labels, rows, source, weights)
        if (
            self._guard is None
            or not torch.is_grad_enabled()
            or self._guard.passes(self.step + 1, judged.loss, features, source, rows)
        ):
            self.counter.add(judged, outputs, labels, rows)
        return judged

    def _gathering(
        self,
        outputs: Any,
        labels: tuple[torch.Tensor, ...],
        rows: int,
        weights: torch.Tensor | None,
    ) -> AbstractContextManager[None]:
        """Around a loss of the user's own, which is tried in the first training steps."""
        if not self.loss.unknown or not torch.is_grad_enabled() or self._is_recorded():
            return nullcontext()
        accumulates = self.spec.accumulation_steps > 1
        is_cut = (accumulates or self._others is not None) and not self.spec.process_group
        if is_cut and self._tried is not None and not self._tried.over:
            self._tried(outputs, labels, rows, weights)
        if self._others is None:
            return nullcontext()
        if self._gather is None or accumulates:
            return gathering(refuse_to_gather)
        return self._gather.step()

    def _is_recorded(self) -> bool:
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def _try_loss(
        self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...], rows: int
    ) -> None:
        """Whether the model's own loss is the mean that it is taken for, before a step relies on it."""
        _ = self.loss
        if self._trial is None or self._fully is not None or self.spec.process_group:
            return  # where the model can only be called by all ranks at once
        self._modes.evaluate()
        with torch.no_grad(), self._precision():
            self._trial(partial(self._called, self.model), self._inputs(features, labels), rows)
        self._modes.train()

    def _forward(self, features: tuple[torch.Tensor, ...]) -> Any:
        if self.spec.inputs == "positional":
            try:
                return self._compiled(*features)
            except TypeError as exc:
                problem = unfit_inputs(self.model, self._names_of(features))
                if problem is None:
                    raise
                raise ConfigError(problem) from exc
        return self._called(self._compiled, self._inputs(features))

    def _names_of(self, features: Sequence[Any]) -> tuple[str, ...]:
        return self._names if len(self._names) == len(features) else numbered("x", len(features))

    def _inputs(
        self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...] = ()
    ) -> dict[str, torch.Tensor]:
        """What the model takes, by name."""
        named = dict(zip(self._names, features, strict=True))
        return named | dict(zip(self._label_arguments, labels, strict=False))

    def _called(self, model: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> Any:
        return model(**inputs) if self.spec.inputs == "kwargs" else model(dict(inputs))

    @cached_property
    def _label_arguments(self) -> tuple[str, ...]:
        return label_arguments(self.model, self._label_names, self._names)

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        """The model, compiled by torch if that was asked for."""
        if self.spec.compile not in ("default", "reduce-overhead"):
            return self.model
        compiled: Callable[..., Any] = torch.compile(self.model, mode=self.spec.compile)
        return compiled

    def _precision(self) -> AbstractContextManager[Any]:
        if self.spec.precision is None:
            return nullcontext()
        half = torch.float16 if self.spec.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=half)

    def _all_finite(self) -> bool:
        grads = [parameter.grad for parameter in self.parameters.held if parameter.grad is not None]
        return all(bool(torch.isfinite(grad).all()) for grad in grads)

    def _clip(self) -> None:
        if self.spec.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters.held, self.spec.clip_value)
        if self.spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.held, self.spec.clip_norm)

    def _tensors(self, columns: tuple[Array, ...]) -> tuple[torch.Tensor, ...]:
        return tensors(columns, self.device)


def _one_row(columns: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(np.zeros((1, *column.shape[1:]), column.dtype) for column in columns)


def _gradient(parameter: torch.nn.Parameter, scale: float) -> Array:
    """A copy of a parameter's gradient; zeros where it has none."""
    if parameter.grad is None:
        return np.zeros_like(to_array(parameter))
    array = to_array(parameter.grad)
    return array if scale == 1.0 else array * array.dtype.type(scale)


def _cuts(rows: int, passes: int) -> Iterator[tuple[int, int]]:
    return ((rows * i // passes, rows * (i + 1) // passes) for i in range(passes))
