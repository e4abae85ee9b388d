"""A PyTorch replica, stepped so that N ranks compute what one process would."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kindler.collective import Array, Batch, GradientExchange, Gradients, gathering
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.frameworks.contract import Use
from kindler.frameworks.rng import OwnGenerators
from kindler.frameworks.row_gather import RowGather, refuse_to_gather
from kindler.frameworks.torch import private
from kindler.frameworks.torch import state as torch_state
from kindler.frameworks.torch.device import backward_on, preload, resolve_device
from kindler.frameworks.torch.exchange import GradientSync, TorchExchange
from kindler.frameworks.torch.exchange_slices import DividedOptimizer, against_division, division_of
from kindler.frameworks.torch.gather import Gather
from kindler.frameworks.torch.graphs import (
    FastestWay,
    GraphedStep,
    Way,
    facts_of,
    moves_in_graph,
    numbers_in_python,
    set_capturable,
    why_not,
)
from kindler.frameworks.torch.loss import Tensors
from kindler.frameworks.torch.losses import LossList
from kindler.frameworks.torch.module_replica import ModuleReplica, row_weight_complaints
from kindler.frameworks.torch.optim import ONLY, step_optimizer
from kindler.frameworks.torch.outputs import flat
from kindler.frameworks.torch.slice_record import SliceRecord, holds
from kindler.frameworks.torch.spec import TorchSpec, against_several, check, loads, missing
from kindler.group import Group

_MOST_BEGINS = 64

__all__ = ["TorchReplica", "TorchSpec", "check", "loads", "preload", "resolve_device"]


class TorchReplica(ModuleReplica):
    divisible = True

    def __init__(self, spec: TorchSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._exchange: GradientSync | None = None
        self._divided: DividedOptimizer | None = None
        self._record: SliceRecord | None = None
        self._fully: Any = None
        scales = spec.precision == "fp16"
        self._scaler = torch.amp.GradScaler(self.device.type) if scales else None
        self._graphs: GraphedStep | None = None
        self._ways: FastestWay | None = None
        self._way = Way()
        self._chosen = self._moves_in_graph = False
        self._now: Batch
        self._kept_buffers: list[torch.Tensor] = []
        self._begins: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._gather: Gather | None = None
        self._generators = OwnGenerators()

    @classmethod
    def complaints(cls, spec: TorchSpec, use: Use, value: Any = None) -> list[str]:
        if use in ("train", "judge"):
            return missing(spec, *(("optimizer", "loss") if use == "train" else ("loss",)))
        if use == "parts":  # the norm of all gradients is known to none of several servers
            return [] if spec.clip_norm is None else ["clip_norm needs the gradients of all parameters."]
        if use == "division":
            return against_division(spec, value)
        if use == "several":
            return against_several(spec)
        return row_weight_complaints(spec) if use == "row_weights" else []

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        [optimizer] = self.optimizers.named.values()
        self._set_capturable(optimizer)
        return optimizer

    @property
    def scheduler(self) -> Any:
        return None if self._schedules is None else self._schedules.named[ONLY]

    def fuse(
        self, worker: Group, settings: RunSettings, strategy: str, **options: Any
    ) -> GradientExchange | None:
        """Exchanges gradients while backward still runs."""
        if strategy == "fsdp":
            return self._shard_fully(worker, settings, **options)
        whole = False
        if strategy == "zero1":
            if options["one_copy"] and self.device.type != "cpu":
                raise ConfigError(
                    f"strategy='zero1': one_copy=True, but the parameters are on {self.device}, and only"
                    " those in the memory of the machine can be shared.\nHint: leave one_copy out;"
                    " or device='cpu'."
                )
            self._refuse_scaling("zero1")
            whole = division_of(type(self.optimizer), options["divide"]) == "parameters"
        exchange = TorchExchange(
            worker,
            device=self.device,
            timeout_s=settings.sync_timeout_s,
            shared_memory=settings.shared_memory,
        )
        if self._exchange is not None:  # of a group that has lost a rank
            self._exchange.close()
            self.__dict__.pop("parameters", None)
        wanted = self.parameters.unexchanged()
        if strategy == "zero1":
            self._exchange = self._divided = DividedOptimizer(
                wanted,
                exchange,
                self.optimizer,
                self._joined,
                whole=whole,
                one_copy=options["one_copy"],
                record=self._record,
                step=self.step,
            )
        else:
            self._exchange = GradientSync(wanted, exchange)
        if self.regroups:
            self._exchange.before_last = self._before_last_bucket
        self.parameters.exchange(wanted)
        self._meet_in_steps()
        return exchange

    @property
    def regroups(self) -> bool:
        """Not where a library's own group of processes carries what ranks exchange."""
        return not (self.on_gpu or self.spec.process_group)

    def _before_last_bucket(self) -> None:
        self.before_exchange()

    def keep_in(self, file: int, former: str = "") -> None:
        self._record = SliceRecord(file, former)

    def go_back(self, step: int) -> bool:
        self._freezer.wait()
        return self._divided is None or self._divided.go_back(step)

    def is_kept(self, file: int | None, step: int) -> bool:
        return self._divided is None or (file is not None and holds(file, step))

    def snapshot(self) -> bytes:
        raw = torch_state.to_raw([self.counter.keep(), list(self.tracked.buffers())])
        drawn = self._generators.take(torch.get_rng_state().numpy().tobytes())
        return pickle.dumps((drawn, raw), pickle.HIGHEST_PROTOCOL)

    def restore(self, snapshot: bytes) -> None:
        drawn, raw = pickle.loads(snapshot)
        counted, buffers = torch_state.from_raw(raw)
        self.counter.restore([counted])
        self.tracked.put_back(buffers)
        (own,) = self._generators.put_back(drawn)
        torch.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8))

    def _meet_in_steps(self) -> None:
        """Losses may gather rows, and several losses share their divisors."""
        collective = self._joined
        if collective.size > 1:
            self._gather = Gather(RowGather(collective))
        if self.spec.loss is not None and isinstance(rule := self.loss, LossList):
            rule.total_of = lambda own: [float(x) for x in collective.sum([np.array(own, np.float64)])[0]]

    def _shard_fully(
        self, worker: Group, settings: RunSettings, *, modules: Sequence[str]
    ) -> GradientExchange:
        from kindler.frameworks.torch.fully_sharded import DefaultGroup, FullySharded

        self._refuse_scaling("fsdp")
        if self.spec.accumulation_steps > 1:
            raise ConfigError(
                "strategy='fsdp': accumulation_steps must be 1, since all workers gather parameters in every"
                " pass and may have different numbers of rows.\nHint: strategy='zero1' allows more."
            )
        group = DefaultGroup(worker, self.device, timeout_s=settings.sync_timeout_s)
        self._meet_in_steps()
        self._fully = FullySharded(self.model, self.optimizer, group.mesh, self._joined, modules)
        self.__dict__.pop("parameters", None)  # they are parts now
        return group

    def _refuse_scaling(self, strategy: str) -> None:
        if self._scaler is not None:
            raise ConfigError(
                f"strategy={strategy!r}: precision='fp16' scales losses, and only the worker that owns a "
                "gradient knows whether it fits.\nHint: precision='bf16' needs no scaling."
            )

    def gather_state(self) -> None:
        """Collects a divided optimizer's state on the first rank, until the next step."""
        if (division := self._fully or self._divided) is not None:
            division.gather()

    def optimizer_bytes(self) -> int:
        if (division := self._fully or self._divided) is not None:
            return int(division.nbytes)
        return torch_state.state_bytes(self.optimizer.state)

    def train_step(self, batch: Batch) -> None:
        if not batch.global_rows:
            return
        fresh = self._begin_step()
        graphs = self._graphed()
        if self._ways is None:
            self._step_through(graphs, batch, fresh)
            return
        # Backward is compiled after the loss was counted.
        counted = self._counted() if self._way.compiled else None
        try:
            with self._ways.timed(batch.rows):
                self._step_through(graphs, batch, fresh)
        except private.compile_error():
            if counted is not None:
                self._count_on_from([counted])
            self._ways.give_up(compiled=True)
            self._go_way(self._ways)
            self.train_step(batch)
            return
        if graphs is not None and graphs.problem is not None:
            self._ways.give_up(recorded=True)
        self._go_way(self._ways)

    def _step_through(
        self, graphs: GraphedStep | None, batch: Batch, fresh: list[torch.nn.Parameter]
    ) -> None:
        if graphs is not None and batch.rows and not fresh and not self._tries_loss:
            self._replayed(graphs, batch)
            return
        if batch.rows:
            self._backward(batch, self._tensors(batch.features), self._tensors(batch.labels))
        elif self.spec.process_group:
            raise ConfigError(
                f"worker {self.rank} has no row in step {self.step + 1}, and with process_group=True every"
                " worker must run the model in every step.\n"
                "Hint: choose a batch_size that leaves the last batch of an epoch at least as many rows as "
                "there are"
                " workers."
            )
        else:
            self._pass_without_rows(batch)
        if fresh and self._exchange is not None:  # whose gradients are exchanged starting with this step
            if not self._exchange.all_announced():
                raise ConfigError(
                    "a worker has started to train more parameters (unfrozen, or added to the optimizer),"
                    f" and others have not.\nHint: {torch_state.EVERY_WORKER}"
                )
            torch_state.agree_on(self._joined, fresh)
            self._exchange.extend(fresh)
            self.parameters.exchange(fresh)
        self._move()
        self._count_rows(batch)

    @property
    def _tries_loss(self) -> bool:
        return self.spec.accumulation_steps > 1 and self._tried is not None and not self._tried.over

    def _graphed(self) -> GraphedStep | None:
        if not self._chosen and self.spec.compile in ("auto", "graphs"):
            reason = why_not(
                self.spec,
                self.device,
                gathers=self._others is not None and self.loss.unknown,
                divided=self._fully is not None,
                skips=self._guard is not None and self._guard.skips,
            )
            self._set_capturable(self.optimizer)
            self._note_mode(reason)
            if self.spec.compile == "auto" and self.on_gpu and self._others is None:
                self._ways = FastestWay(records=reason is None)
                self._go_way(self._ways)
            elif reason is None:
                self._graphs = self._new_graphs()
        self._chosen = True
        return self._graphs

    def _new_graphs(self) -> GraphedStep:
        loss = self.loss.function
        parts = [self.model, *([loss] if isinstance(loss, torch.nn.Module) else [])]
        return GraphedStep(self._recorded, self._facts, partial(numbers_in_python, *parts))

    def _go_way(self, ways: FastestWay) -> None:
        """Compute steps in the way that is tried next, or in the fastest."""
        if self._way != ways.now:
            if ways.now.compiled != self._way.compiled:
                self.__dict__["_compiled"] = self._compiled_steps() if ways.now.compiled else self.model
            self._graphs = self._new_graphs() if ways.now.recorded else None
            self._way = ways.now
        if ways.over:
            self._ways = None
            if ways.now != Way():  # of eager steps it is known why
                self.mode = str(ways.now)

    def _compiled_steps(self) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(self.model)

        def called(*inputs: Any, **named: Any) -> Any:  # compiling takes long, and again for evaluation
            model = compiled if torch.is_grad_enabled() else self.model
            return model(*inputs, **named)

        return called

    def _set_capturable(self, optimizer: torch.optim.Optimizer) -> None:
        exchanged = self._exchange is not None or self._others is not None
        self._moves_in_graph = moves_in_graph(self.spec, optimizer, exchanged=exchanged)
        wanted = self._moves_in_graph and self.spec.compile in ("auto", "graphs")
        set_capturable(optimizer, self.device, wanted=wanted)

    def _note_mode(self, problem: str | None) -> None:
        if problem is not None and self.spec.compile == "graphs":
            raise ConfigError(
                f"compile='graphs': a step cannot be recorded as a CUDA graph: {problem}.\n"
                "Hint: compile='auto' records steps where that is possible; compile='default' uses"
                " torch.compile."
            )
        self.mode = "graphs" if problem is None else f"eager: {problem}"

    def _replayed(self, graphs: GraphedStep, batch: Batch) -> None:
        self._freezer.wait()
        self._now = batch
        features, labels = self._tensors(batch.features), self._tensors(batch.labels)
        replayed, (counted, grads, filled) = graphs.run(features, labels, self._decided(batch))
        if replayed:
            self.counter.count(batch.rows, counted)
            for parameter, grad in zip(self.parameters.held, grads, strict=True):
                parameter.grad = grad
            if self._guard is not None:
                self._guard.replayed(
                    self.step + 1, self.counter.loss_total(), self._label_source(batch), batch.rows
                )
        elif graphs.problem is not None:
            self._note_mode(graphs.problem)
        if self._exchange is not None:
            self._exchange.finish(filled)
        if self._moves_in_graph:
            self.step += 1
        else:
            self._move()
        self._count_rows(batch)

    def _recorded(self, features: Tensors, labels: Tensors) -> tuple[Any, ...]:
        """The step, or its part up to the gradients.

        Returns what a replay counts, the gradients, and what is laid out for the exchange.
        """
        held = self.parameters.held
        for parameter in held:  # a recording that failed has left some
            parameter.grad = None
        self.counter.recorded()
        filled = None
        if self._exchange is None:
            weight = self._passes(self._now, features, labels)
            self._average(weight)
        else:
            with self._exchange.paused():
                weight = self._passes(self._now, features, labels)
            filled = self._exchange.fill(weight if self.loss.weighted else None)
        if self._moves_in_graph:
            self._clip(held)
            step_optimizer(self.optimizer)
        return self.counter.recorded(), [parameter.grad for parameter in held], filled

    def _decided(self, batch: Batch) -> tuple[Any, ...]:
        """What a recording takes for granted: the rows of all, and in which passes all labels count."""
        source, counts = self._label_source(batch), []
        for start, stop in self._cuts(batch.rows):
            self.loss.look(source.part(start, stop) if stop - start < batch.rows else source)
            counts.append(self.loss.all_count)
        return batch.global_rows, *counts

    def _facts(self) -> Any:
        return facts_of(self.parameters.held, self.optimizer if self._moves_in_graph else None)

    def gradients(self, batch: Batch) -> Gradients:
        self._begin_step()
        trained = self.parameters.trained
        if not batch.rows:
            return Gradients([torch_state.to_array(torch.zeros_like(p)) for p in trained], 0.0)
        weight = self._backward(batch, self._tensors(batch.features), self._tensors(batch.labels))
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
            self._scaler.update()
        # Where no weights divide it, the sum of all ranks' gradients is the mean over the rows of all.
        scale = 1.0 if self.loss.weighted else batch.global_rows / batch.rows
        self._count_rows(batch)
        grads = [torch_state.to_array(torch.zeros_like(p) if p.grad is None else p.grad) for p in trained]
        if scale != 1.0:
            grads = [grad * grad.dtype.type(scale) for grad in grads]
        return Gradients(grads, float(weight))

    def apply(self, gradients: Sequence[Array | None]) -> None:
        for parameter, array in zip(self.parameters.trained, gradients, strict=True):
            parameter.grad = (
                None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(parameter)
            )
        if self._scaler is not None and not all(bool(torch.isfinite(g).all()) for g in self._grads()):
            self.step += 1  # as the scaler does: a gradient that was too large moves nothing
            return
        self._move(unscaled=True)

    def pass_step(self) -> None:
        _ = self.optimizer  # which its schedule is made with
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch: the optimizer has not stepped before
            self._step_schedules()
        self.step += 1

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        fields = [torch_state.parse(data) for data in states]
        whole, names = fields[0], self.names()
        order = {name: place for place, name in enumerate(n for group in whole["groups"] for n in group)}
        for part, places in zip(fields[1:], owned[1:], strict=True):
            for name in (names[place] for place in places):
                own = name.removeprefix("loss:")
                home = "model" if own == name else "loss"
                whole[home][own] = part[home][own]
                if (kept := part["optimizer"]["state"].get(order[name])) is not None:
                    whole["optimizer"]["state"][order[name]] = kept
        return torch_state.dump(whole)

    def _begin_step(self) -> list[torch.nn.Parameter]:
        _ = self.optimizer, self.tracked  # built before anything runs in training mode
        if self._divided is not None:
            self._freezer.wait()  # once they have this rank's gradients, others may move parameters
        if self._fully is not None:
            self._freezer.wait()  # what it copies is let go
            self._fully.begin_step()
        self._modes.train()
        if self._guard is not None:
            self._guard.begin_step()
            self._kept_buffers = self.tracked.copies() if self._guard.skips else []
        if self._gather is not None:
            self._gather.begin()
        fresh: list[torch.nn.Parameter] = []
        if self.parameters.look() and self._exchange is not None and (fresh := self.parameters.unexchanged()):
            self._exchange.announce()  # to the other ranks
        for parameter in self.parameters.held:
            parameter.grad = None
        return fresh

    def _move(self, *, unscaled: bool = False) -> None:
        if self._guard is not None and self._guard.skips:  # on all ranks or none
            if self._scaler is None:
                self._guard.look_at_gradients(self._grads())
            bad = np.array([self._guard.bad], np.int64)
            if self._others.sum([bad])[0][0] if self._others is not None else bad[0]:
                self.tracked.put_back(self._kept_buffers)
                self._guard.skip()
                self.step += 1
                return
        if self._divided is not None:
            self._freezer.wait()
            number = self.step + 1
            self._divided.update(step_optimizer, self.spec.clip_norm, self.spec.clip_value, number=number)
        else:
            scaler = None if unscaled else self._scaler
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self._clip(self.parameters.held)
            self._freezer.wait()
            step_optimizer(self.optimizer, scaler)
        self._step_schedules()
        self.step += 1

    def _trained(self) -> dict[str, torch.Tensor]:
        return super()._trained() if self._fully is None else dict(self._fully.named())

    def merge_buffers(self) -> None:
        if self._fully is not None:
            self._fully.unshard()  # ranks may have different numbers of rows to judge
        super().merge_buffers()

    def _optimizer_fields(self) -> dict[str, Any]:
        optimizer = self.optimizer
        names = (
            torch_state.group_names(optimizer, self._modules()) if self._fully is None else self._fully.groups
        )
        fields = {
            "groups": names,
            "optimizer": (self._fully or self._divided or optimizer).state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
        }
        return fields if self._scaler is None else {**fields, "scaler": self._scaler.state_dict()}

    def _load_optimizer_fields(self, fields: Mapping[str, Any]) -> None:
        torch_state.load_optimizer(self.optimizer, fields["optimizer"], fields["groups"], self._modules())
        self._set_capturable(self.optimizer)
        if fields["scheduler"] is not None and self.scheduler is not None:
            self.scheduler.load_state_dict(fields["scheduler"])
        if self._scaler is not None and fields.get("scaler"):
            self._scaler.load_state_dict(fields["scaler"])

    def _whole_state(self) -> dict[str, Any]:
        return super()._whole_state() if self._fully is None else self._fully.model_state()

    def _load_model(self, state: Mapping[str, torch.Tensor]) -> None:
        (super()._load_model if self._fully is None else self._fully.load_model)(state)

    def _backward(self, batch: Batch, features: Tensors, labels: Tensors) -> float | torch.Tensor:
        """Returns the weight of this rank's mean; if fused, `grad` then holds the mean over all ranks."""
        weight = self._passes(batch, features, labels)
        if self._exchange is not None:
            self._exchange.finish()
        elif self.loss.weighted:
            self._average(weight)
            return weight
        return batch.rows

    def _average(self, weight: float | torch.Tensor) -> None:
        """By this rank's weight, or that of all where parameters are divided among them."""
        if self.loss.weighted:
            self._divide(weight if self._fully is None else self._fully.total(float(weight)))

    def _passes(self, batch: Batch, features: Tensors, labels: Tensors) -> float | torch.Tensor:
        """Forward and backward; returns the weight of the step's loss."""
        source, cuts = self._label_source(batch), self._cuts(batch.rows)
        _ = self.loss
        is_cut = len(cuts) > 1 or self._others is not None
        at_once = self._fully is not None or self.spec.process_group  # all ranks call the model, or none
        if self._trial is not None and not self._trial.over and is_cut and not at_once:
            self._modes.evaluate()
            with torch.no_grad(), self._precision():
                self._trial(partial(self._called, self.model), self._inputs(features, labels), batch.rows)
            self._modes.train()
        weight: float | torch.Tensor = 0.0
        unit = 1.0
        for number, (start, stop) in enumerate(cuts, start=1):
            if len(cuts) == 1:
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
            waits: AbstractContextManager[Any] = nullcontext()
            if self._exchange is not None and number < len(cuts):
                waits = self._exchange.paused()  # only the last backward of a step lets gradients travel
            elif self._exchange is not None and self.loss.weighted:
                self._exchange.weigh(weight / unit)
            with waits:
                self._descend(judged.loss, share)
        return weight / unit

    def _cuts(self, rows: int) -> list[tuple[int, int]]:
        """The rows of each pass."""
        passes = min(self.spec.accumulation_steps, rows)
        return list(pairwise(rows * place // passes for place in range(passes + 1)))

    def _descend(self, loss: torch.Tensor, share: float) -> None:
        """Starting backward with the share saves a kernel each way, which counts for small models on GPUs."""
        begin: torch.Tensor | None = None
        if self._scaler is not None:
            loss = self._scaler.scale(loss if share == 1.0 else loss * share)
        elif (begin := self._begins.get((share, loss.dtype))) is None:
            begin = torch.full((), share, dtype=loss.dtype, device=loss.device)
            if len(self._begins) < _MOST_BEGINS:  # none is let go: a recorded step uses the one it has seen
                self._begins[share, loss.dtype] = begin
        with backward_on(self.device.type):
            if self._gather is not None and self._gather.pending:
                self._gather.backward(loss, begin)
            else:
                loss.backward(begin)  # type: ignore[no-untyped-call]

    def _pass_without_rows(self, batch: Batch) -> None:
        """Uses a row of zeros that teaches nothing."""
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
        """What the loss's own mean is over is certain only if rows have one shape."""
        for place, (label, shape) in enumerate(zip(batch.labels, self._label_shapes or (), strict=False)):
            if label.shape[1:] != shape:
                raise ConfigError(
                    f"rows of {self._label_names[place]!r} have shape {label.shape[1:]} in this batch and"
                    f" {shape} in the first one, and the loss returns a mean: it is unknown whether over "
                    "rows, over all values or over those that are not padding, so workers cannot weight "
                    "theirs.\nHint: let the loss return one loss for each row or value, not reduced;"
                    " or use CrossEntropyLoss(ignore_index=...); or pad all batches to one length."
                )

    def _divide(self, divisor: float | torch.Tensor) -> None:
        if isinstance(divisor, float):
            if divisor == 1.0:
                return
            divisor = divisor or 1.0  # nothing weighs anything, so all gradients are zero
        private.foreach_div_(self._grads(), divisor)

    def _grads(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters.held if parameter.grad is not None]

    def _gathering(
        self, outputs: Any, labels: Tensors, rows: int, weights: torch.Tensor | None
    ) -> AbstractContextManager[None]:
        """Tries the user's own loss in the first training steps."""
        if not self.loss.unknown or not torch.is_grad_enabled():
            return nullcontext()
        if self.on_gpu and torch.cuda.is_current_stream_capturing():
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


def _one_row(columns: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(np.zeros((1, *column.shape[1:]), column.dtype) for column in columns)
