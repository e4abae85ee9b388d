"""Everything of a PyTorch replica but its training steps (`replica.py`, `step_replica.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kindler.collective import Array, Batch, Collective, share_bytes
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica, digest, with_config
from kindler.frameworks.contract import Facts, Scored, Variables
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.rng import seed_own
from kindler.frameworks.state_format import Buffer, ScoringModel
from kindler.frameworks.torch import adapters, losses, optim
from kindler.frameworks.torch import spec as specs
from kindler.frameworks.torch import state as states
from kindler.frameworks.torch.device import (
    PendingOutputs,
    PinnedStager,
    arrays,
    has_gpu_build,
    held,
    resolve_device,
    tensors,
)
from kindler.frameworks.torch.generation import SAMPLING, generated
from kindler.frameworks.torch.loss import Judge, Judged, LossRule, RowWeights, Tensors, against_row_weights
from kindler.frameworks.torch.metrics import Counter, named_metrics
from kindler.frameworks.torch.outputs import export, names_of, numbered, without_loss
from kindler.frameworks.torch.tagging import CARRIED
from kindler.frameworks.torch.trials import StepGuard, TriedLoss, TriedModel

if TYPE_CHECKING:
    from kindler.train.loss_guard import LossGuard

_UNDER_WAY = 2  # batches that are scored while the outputs of one come back


class ModuleReplica(BaseReplica):
    """Optimizer, loss and scheduler are built on first use, so a replica that only predicts needs none."""

    takes_read_only = True

    def __init__(
        self,
        spec: specs.TorchSpec,
        *,
        device: str = "auto",
        local_rank: int = 0,
        threads: int | None = None,
        feature_names: tuple[str, ...] = (),
        label_names: tuple[str, ...] = (),
        label_shapes: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = resolve_device(device, local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if spec.tf32:
                torch.set_float32_matmul_precision("high")
                torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(self.seed)
        self.model: torch.nn.Module = specs.build_model(spec).to(self.device)
        seed_own(self.seed, 0, self.rank)
        torch.manual_seed(self.seed + self.rank)
        self._names, self._label_names = feature_names, label_names
        self._label_shapes = None if label_shapes is None else [tuple(shape) for shape in label_shapes]
        self._modes = states.Modes(self.model)
        self._given = {name: p.requires_grad for name, p in self.model.named_parameters()}
        self._trial: TriedModel | None = None
        self._tried: TriedLoss | None = None
        self._row_weights: RowWeights | None = None
        self._guard: StepGuard | None = None
        self._schedules: optim.Schedules | None = None
        self._looked_at_buffers = False
        self._freezer = states.Freezer()
        self._base = adapters.Frozen.below(self.model, spec.model)

    spec_type: type[specs.TorchSpec] = specs.TorchSpec
    check = staticmethod(specs.check)

    @classmethod
    def make_spec(cls, **options: Any) -> specs.TorchSpec:
        spec = cls.spec_type(**{**options, "config": dict(options.get("config") or {})})
        if complaints := cls.check(spec):
            raise ConfigError("\n".join(complaints))
        return spec

    loads = staticmethod(specs.loads)

    @classmethod
    def facts(cls, spec: specs.TorchSpec) -> Facts:
        """A model or step that computes its own loss may have labels among its inputs."""
        learns = isinstance(spec.loss, torch.nn.Module) and any(True for _ in spec.loss.parameters())
        return Facts(
            labels="optional" if isinstance(spec, specs.StepSpec) or spec.loss == "model" else True,
            gpus=has_gpu_build(),
            process_group=spec.process_group,
            has_instance=learns or isinstance(spec.model, torch.nn.Module),
        )

    @classmethod
    def changed(
        cls, spec: specs.TorchSpec, *, config: Mapping[str, Any], learning_rate: float | None
    ) -> specs.TorchSpec:
        spec = with_config(spec, config)
        if learning_rate is None:
            return spec
        return replace(spec, optimizer=optim.with_rate(spec.optimizer, learning_rate))

    @classmethod
    def scoring_model(
        cls, spec: specs.TorchSpec, live: Any, state: Callable[[], bytes], before: ScoringModel | None
    ) -> ScoringModel:
        own = None if live is None else live._model_state
        return states.scoring_model(spec, own, state(), before)

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def set_precision(self, precision: str) -> None:
        self.spec = replace(self.spec, precision=None if precision == "fp32" else precision)

    def watch_losses(self, watch: LossGuard) -> None:
        self._guard = StepGuard(watch, self._names)

    def weigh_rows(self, classes: Mapping[int, float] | None, *, column: bool) -> None:
        self._row_weights = RowWeights(classes, column=column)

    @cached_property
    def loss(self) -> LossRule:
        varying = self._label_shapes is not None
        rule: LossRule
        if self.spec.loss == "model":
            rule = losses.ModelLoss(self.model, self._label_arguments)
            self._trial = TriedModel(rule, half=self.spec.precision is not None)
        elif (parts := losses.loss_parts(self.spec.loss)) is not None:
            rule = losses.LossList(
                {name: self._built_loss(replace(self.spec, loss=loss)) for name, loss in parts.items()},
                losses.weight_parts(self.spec.loss_weights, list(parts)),
                named=isinstance(self.spec.loss, Mapping),
                labels=self._label_names,
                varying=varying,
            )
        else:
            rule = LossRule(self._built_loss(self.spec), varying=varying)
        if rule.unknown:
            self._tried = TriedLoss(rule, self.device, accumulates=self.spec.accumulation_steps > 1)
        return rule

    def _built_loss(self, spec: specs.TorchSpec) -> Any:
        loss = specs.build_loss(spec)
        return loss.to(self.device) if isinstance(loss, torch.nn.Module) else loss

    def _learning_loss(self) -> torch.nn.Module | None:
        """The user's own module may have parameters."""
        loss = self.loss.function if self.spec.loss is not None else None
        own = isinstance(loss, torch.nn.Module) and not type(loss).__module__.startswith("torch.")
        return loss if own else None

    def _modules(self) -> dict[str, torch.nn.Module]:
        loss = self._learning_loss()
        return {"": self.model} if loss is None else {"": self.model, "loss:": loss}

    def _named_metrics(self) -> dict[str, Any]:
        loss = self.loss if self.spec.loss is not None else None
        metrics = named_metrics(self.spec.metrics, self.spec.config, loss)
        return metrics | (loss.metrics() if isinstance(loss, losses.LossList) else {})

    @cached_property
    def counter(self) -> Counter:
        return Counter(self._named_metrics(), self.device)

    @cached_property
    def parameters(self) -> states.Parameters:
        return states.Parameters(self.model, self.optimizer)

    @cached_property
    def tracked(self) -> states.Tracked:
        return states.Tracked(*self._modules().values())

    def hold(self, columns: Sequence[Array]) -> Sequence[Callable[[slice | Array], Any]] | None:
        return held(columns, self.device, self.spec.device_cache)

    def restore_requires_grad(self) -> None:
        if isinstance(self.spec.model, torch.nn.Module):
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(self._given.get(name, parameter.requires_grad))

    @cached_property
    def optimizers(self) -> optim.Optimizers:
        if self.spec.loss is not None:
            _ = self.loss  # on its device before an optimizer takes its parameters
        optimizers, self._schedules = self._build_optimizers()
        return optimizers

    def _build_optimizers(self) -> tuple[optim.Optimizers, optim.Schedules | None]:
        optimizers = optim.build_optimizers(self.spec, self.model)
        return optimizers, optim.build_schedules(self.spec, optimizers)

    @property
    def optimizer(self) -> Any:
        named = self.optimizers.named
        return next(iter(named.values())) if len(named) == 1 else self.optimizers

    def _step_schedules(self) -> None:
        if self._schedules is not None:
            self._schedules.after_step(self.step + 1)

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        if self._schedules is not None:
            self._schedules.after_epoch(self.epoch, logs or {})

    def join(self, collective: Collective) -> None:
        if self._collective is not None:
            raise ConfigError("this replica has joined others already; a replica serves one run.")
        self._collective = collective
        if collective.size == 1:
            return
        if not self.spec.process_group and (complaints := specs.synchronized(self.model)):
            raise ConfigError(complaints[0])
        if any(isinstance(one, torch.optim.SparseAdam) for one in self.optimizers.named.values()):
            raise ConfigError(specs.SPARSE)
        state = share_bytes(collective, self.state() if collective.rank == 0 else b"")
        if collective.rank != 0:
            self.load_state(state)
        self.parameters.look()
        self._before = self._buffers()

    def _seed(self, *numbers: int) -> None:
        super()._seed(*numbers)
        torch.manual_seed(states.fork_seed(*numbers))

    def _count_rows(self, batch: Batch) -> None:
        self.epoch_rows += batch.rows
        if not self._looked_at_buffers and batch.rows:  # soon, and not after an epoch
            self.tracked.refuse_new()
            self._looked_at_buffers = True

    def eval_step(self, batch: Batch) -> None:
        if not batch.rows:
            return
        self._modes.evaluate()
        features, labels = self._tensors(batch.features), self._tensors(batch.labels)
        with torch.inference_mode():
            self._judge(features, labels, batch.rows, self._label_source(batch))

    def judge_through(self, around: Callable[[Judge], Judge]) -> None:
        self._judge = around(self._judge)  # type: ignore[method-assign]

    def _judge(self, features: Tensors, labels: Tensors, rows: int, source: LabelSource) -> Judged:
        rule, weights = self.loss, None
        if self._row_weights is not None:
            trains, by_class = torch.is_grad_enabled(), rule.by_class
            labels, weights = self._row_weights.split(labels, trains=trains, by_class=by_class)
        with self._precision():
            if isinstance(rule, losses.ModelLoss):
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
        self, outputs: Any, labels: Tensors, rows: int, weights: torch.Tensor | None
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def _label_source(self, batch: Batch) -> LabelSource:
        number, rows = self.step + 1, batch.rows

        def within_step(row: int) -> str:
            return f"{row} of the {rows} that worker {self.rank} has in step {number}"

        return LabelSource(batch.labels, self._label_names, batch.where or within_step)

    def take_tallies(self) -> bytes:
        return self.counter.take()

    def _counted(self) -> dict[str, Any]:
        return self.counter.keep()

    def _count_on_from(self, counted: Sequence[Any]) -> None:
        self.counter.restore(counted)

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        merged = self.counter.merge(tallies)
        if self.spec.loss is not None and isinstance(rule := self.loss, losses.LossList):
            merged["loss"] = rule.combined(merged)
        return merged

    def running_metrics(self) -> dict[str, float]:
        return self.counter.running_metrics()

    def loss_sums(self) -> tuple[float, float]:
        return self.counter.loss_sums()

    def learning_rate(self) -> float:
        groups = self.optimizer.param_groups
        return float(groups[0]["lr"]) if groups else float("nan")

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _trained(self) -> dict[str, torch.Tensor]:
        """Parameters that belong to no module are named by their number."""
        known = {id(p): name for name, p in states.named_parameters(self._modules()).items()}
        all_ = enumerate(self.parameters.trained)
        return {known.get(id(p), f"parameter {place}"): p for place, p in all_}

    def write(self, arrays: Sequence[Array]) -> None:
        self._freezer.wait()
        with torch.no_grad():
            for parameter, array in zip(self.parameters.trained, arrays, strict=True):
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def read_into(self, arrays: Sequence[Array]) -> None:
        with torch.no_grad():
            for parameter, array in zip(self.parameters.trained, arrays, strict=True):
                torch.from_numpy(array).copy_(parameter)

    def variables(self, *groups: str) -> Variables:
        """The optimizer's state is not all arrays, and is in `state`."""
        tensors: dict[str, Callable[[], Mapping[str, torch.Tensor]]] = {
            "parameters": self._trained,
            "buffers": self._named_buffers,
        }
        wanted = [group for group in tensors if not groups or group in groups]
        return {group: {n: states.to_array(t) for n, t in tensors[group]().items()} for group in wanted}

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        return {str(place): buffer for place, buffer in enumerate(self.tracked.buffers())}

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        parameters = self._trained() if variables.get("parameters") else {}
        known = {"parameters": parameters, "buffers": self._named_buffers()}
        with torch.no_grad():
            for group, arrays_by_name in variables.items():
                for name, array in arrays_by_name.items():
                    target = known[group][name]
                    target.copy_(torch.from_numpy(np.ascontiguousarray(array)).reshape(target.shape))

    def _means_of_variances(self) -> dict[str, str]:
        places = {id(buffer): name for name, buffer in self._named_buffers().items()}
        mean_of = {}
        for module in self.tracked.modules():
            mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if id(mean) in places and id(variance) in places:
                mean_of[places[id(variance)]] = places[id(mean)]
        return mean_of

    def merge_buffers(self) -> None:
        self.tracked.refuse_new()
        super().merge_buffers()

    def _changes(self, buffers: Mapping[str, Array]) -> list[bool]:
        odd = self.tracked.reshaped(self._joined, self._before)
        return [flag and not other for flag, other in zip(super()._changes(buffers), odd, strict=True)]

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        return self._freezer.freeze(self._fields(), copy_now=self.tracked.buffers())

    def state(self) -> bytes:
        return states.dump(self._fields())

    def wait_for_copy(self) -> None:
        self._freezer.wait()

    def _fields(self) -> dict[str, Any]:
        loss = self._learning_loss()
        return {
            "model": self._model_state(),
            **({} if self._base is None else {"base": self._base.sha256}),
            "loss": loss.state_dict() if loss is not None else None,
            "trained": states.trained(self._modules()),
            "resting": sorted(self._modes.resting),
            **(self._optimizer_fields() if self._optimizes else _NO_OPTIMIZER),
            "rng": self._rng(),
            "epoch": self.epoch,
            "step": self.step,
        }

    @property
    def _optimizes(self) -> bool:
        return self.spec.optimizer is not None

    def _model_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._whole_state()
        return state if self._base is None else self._base.without(state)

    def _whole_state(self) -> dict[str, Any]:
        return self.model.state_dict()

    def _optimizer_fields(self) -> dict[str, Any]:
        """State fields "optimizer", "groups" and "scheduler"."""
        raise NotImplementedError

    def _load_optimizer_fields(self, fields: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def expected_bytes(self) -> int:
        """Includes what optimizers will add in their first step."""
        optimizers = self.optimizers.named.values() if self._optimizes else ()
        return len(self.state()) + sum(map(optim.bytes_to_come, optimizers))

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        fields = states.parse(data)
        self._freezer.wait()
        if self._base is not None:
            self._base.check(fields.get("base"))
        ModuleReplica._load_model(self, fields["model"])
        if weights_only_model:
            return
        loss = self._learning_loss()
        if fields["loss"] is not None and loss is not None:
            loss.load_state_dict(fields["loss"])
        self._modes.recall(fields["resting"])
        optimizes = fields["optimizer"] is not None and self.spec.optimizer is not None
        if optimizes:
            _ = self.optimizers  # of the parameters that the model trains by itself
        states.recall_trained(fields["trained"], self._modules())
        if optimizes:
            self._load_optimizer_fields(fields)
        self.epoch, self.step = fields["epoch"], fields["step"]
        self._load_rng(fields["rng"])

    def _packed_local(self, fields: dict[str, Any]) -> bytes:
        own = self._buffers() if self._others is not None else {}
        named, changed = self._named_buffers(), super()._changes(own)
        buffers = {int(name): named[name] for name, flag in zip(own, changed, strict=True) if flag}
        return states.dump({**fields, "rng": self._rng(), "buffers": buffers})

    def _unpacked_local(self, data: bytes) -> tuple[dict[str, Any], Variables]:
        fields = states.parse(data)
        return fields, {"buffers": {str(place): states.to_array(b) for place, b in fields["buffers"].items()}}

    def load_local_state(self, data: bytes) -> None:
        super().load_local_state(data)
        self._load_rng(states.parse(data)["rng"])

    def _rng(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {"rank": self.rank, "cpu": torch.get_rng_state(), "cuda": cuda}

    def _load_rng(self, rng: Mapping[str, Any]) -> None:
        if rng["rank"] != self.rank:  # another rank's dropout masks must not become this one's
            torch.manual_seed(states.fork_seed(self.seed, self.epoch, self.rank, self.step))
            return
        torch.set_rng_state(rng["cpu"])
        if rng["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], self.device)

    def trained_model(self) -> torch.nn.Module:
        return self.model.eval()

    def merged_model(self) -> torch.nn.Module:
        if self._base is None:
            raise ConfigError("merge: this model has no adapters.\nHint: get_model() returns it as it is.")
        return adapters.merged(self.model)

    def weights(self) -> bytes:
        return states.save_weights(self._model_state())

    def digests(self) -> dict[str, str]:
        tensors = {n: t for n, t in self._model_state().items() if isinstance(t, torch.Tensor)}
        made = {name: digest(states.to_array(tensor)) for name, tensor in tensors.items()}
        return made if self._base is None else {**made, "base": self._base.sha256}

    def load_weights(self, data: bytes) -> None:
        self._freezer.wait()
        self._load_model(states.parse_weights(data))

    def _load_model(self, state: Mapping[str, torch.Tensor]) -> None:
        (self.model.load_state_dict if self._base is None else self._base.load)(state)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        self._modes.evaluate()
        with torch.inference_mode(), self._precision():
            outputs = self._scored(features)
        self.output_names = names_of(outputs)
        return arrays(outputs)

    def predict_all(self, batches: Iterable[tuple[Array, ...]]) -> Iterator[Scored]:
        if SAMPLING in self._names:
            self._modes.evaluate()
            yield from generated(adapters.called(self.model), batches, self._names, self._precision)
            return
        if not self.on_gpu:
            yield from super().predict_all(batches)
            return
        waiting: deque[tuple[int, PendingOutputs, tuple[str, ...] | None]] = deque()
        for batch in batches:
            self._modes.evaluate()
            with torch.inference_mode(), self._precision():
                outputs = self._scored(batch)
            waiting.append((len(batch[0]), PendingOutputs(outputs), names_of(outputs)))
            if len(waiting) > _UNDER_WAY:
                yield self._arrived(*waiting.popleft())
        while waiting:
            yield self._arrived(*waiting.popleft())

    def _arrived(self, rows: int, outputs: PendingOutputs, names: tuple[str, ...] | None) -> Scored:
        self.output_names = names
        return Scored(rows, outputs.wait(), names)

    @cached_property
    def _stager(self) -> PinnedStager:
        return PinnedStager(self.device)

    def _scored(self, features: tuple[Array, ...]) -> Any:
        carried = self._stager.to_device(features) if self.on_gpu else self._tensors(features)
        if CARRIED in self._names:
            inputs = self._inputs(carried)
            rows = inputs.pop(CARRIED)
            return {**without_loss(self._called(self._compiled, inputs)), CARRIED: rows}
        outputs = self._forward(carried)
        own = self.spec.inputs == "kwargs" or self.spec.loss == "model"
        return without_loss(outputs) if own else outputs

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
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

    def _forward(self, features: Tensors) -> Any:
        if self.spec.inputs == "positional":
            try:
                return self._compiled(*features)
            except TypeError as exc:
                problem = specs.unfit_inputs(self.model, self._names_of(features))
                if problem is None:
                    raise
                raise ConfigError(problem) from exc
        return self._called(self._compiled, self._inputs(features))

    def _names_of(self, features: Sequence[Any]) -> tuple[str, ...]:
        return self._names if len(self._names) == len(features) else numbered("x", len(features))

    def _inputs(self, features: Tensors, labels: Tensors = ()) -> dict[str, torch.Tensor]:
        named = dict(zip(self._names, features, strict=True))
        return named | dict(zip(self._label_arguments, labels, strict=False))

    def _called(self, model: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> Any:
        return model(**inputs) if self.spec.inputs == "kwargs" else model(dict(inputs))

    @cached_property
    def _label_arguments(self) -> tuple[str, ...]:
        return losses.label_arguments(self.model, self._label_names, self._names)

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        if self.spec.compile not in ("default", "reduce-overhead"):
            return self.model
        compiled: Callable[..., Any] = torch.compile(self.model, mode=self.spec.compile)
        return compiled

    def _precision(self) -> AbstractContextManager[Any]:
        if self.spec.precision is None:
            return nullcontext()
        half = torch.float16 if self.spec.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=half)

    def _clip(self, parameters: Sequence[torch.Tensor]) -> None:
        if self.spec.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.spec.clip_value)
        if self.spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.spec.clip_norm)

    def _tensors(self, columns: tuple[Array, ...]) -> Tensors:
        return tensors(columns, self.device)


_NO_OPTIMIZER = {"groups": None, "optimizer": None, "scheduler": None}


def row_weight_complaints(spec: specs.TorchSpec) -> list[str]:
    """Runs the loss's creator, if it has one."""
    if spec.loss is None:  # which is complained about where one is needed
        return []
    if not callable(spec.loss):
        return against_row_weights(spec.loss)
    try:
        return against_row_weights(specs.build_loss(spec))
    except Exception:  # noqa: BLE001 - a creator of the user's: its error is the worker's to tell
        return []
