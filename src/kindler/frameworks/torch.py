"""PyTorch: one replica of the user's model, stepped so that N ranks compute what one process would.

Building from what the user handed in is in `torch_spec.py` and `torch_optim.py`, the rule of each loss in
`torch_loss.py`, counting in `torch_metrics.py`. How gradients travel is the business of the group that the
replica is attached to; when to step, of the training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.frameworks.packed import Buffer
from kindler.frameworks.randomness import own_states, restore_own, seed_own
from kindler.frameworks.replica import Array, Batch
from kindler.frameworks.torch_device import arrays, preload, resolve_device, tensors
from kindler.frameworks.torch_loss import Judged, LossRule
from kindler.frameworks.torch_metrics import Counter, named_metrics
from kindler.frameworks.torch_optim import build_optimizer, build_scheduler, step_scheduler
from kindler.frameworks.torch_spec import TorchSpec, build_loss, build_model, check, dumps, loads
from kindler.frameworks.torch_state import (
    Collective,
    Freezer,
    Gradients,
    changes,
    dump,
    fork_seed,
    merge_buffers,
    parse,
    parse_weights,
    save_weights,
    share_bytes,
    snapshot,
)

__all__ = ["TorchReplica", "TorchSpec", "check", "dumps", "loads", "preload", "resolve_device"]


class TorchReplica:
    """One rank's copy of a PyTorch model; keeps the contract `Replica`.

    Optimizer, loss and scheduler are built when first needed, so a replica that only predicts needs none.

    Args:
        spec: What the user handed in.
        device: "auto", "cpu", "cuda" (one GPU a rank) or "cuda:0".
        rank: This rank; randomness other than the model's first weights differs by it.
        local_rank: Its number on its host, which chooses the GPU.
        seed: Creators see torch seeded with it.
        threads: Threads of torch's own operations; None leaves them as they are.
        feature_names: Names of the features, for `inputs="dict"`.
    """

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
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec, self.rank, self.seed = spec, rank, seed
        self.device = resolve_device(device, local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        seed_own(seed)
        torch.manual_seed(seed)
        self.model = build_model(spec).to(self.device)
        seed_own(seed, 0, rank)
        torch.manual_seed(seed + rank)
        self.epoch = self.step = 0
        self.output_names: tuple[str, ...] | None = None
        self._names = feature_names
        self._training: bool | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._loss: LossRule | None = None
        self._counter: Counter | None = None
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._group: Collective | None = None
        self._sync: Gradients | None = None
        self._buffers: list[torch.Tensor] = []
        self._changed: list[bool] = []
        self._epoch_rows = 0
        self._freezer = Freezer()

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> TorchReplica:
        """A replica of the spec that `dumps` packed; the options are the constructor's."""
        return cls(loads(spec), **options)

    @staticmethod
    def has_instance(spec: TorchSpec) -> bool:
        """Whether the user handed in a model rather than a way to make one."""
        return isinstance(spec.model, torch.nn.Module)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, built at first use together with its schedule."""
        if self._optimizer is None:
            self._optimizer = build_optimizer(self.spec, self.model)
            self._scheduler = build_scheduler(self.spec, self._optimizer)
        return self._optimizer

    @property
    def loss(self) -> LossRule:
        """The loss with its rule, built at first use."""
        if self._loss is None:
            loss = build_loss(self.spec)
            self._loss = LossRule(loss.to(self.device) if isinstance(loss, torch.nn.Module) else loss)
        return self._loss

    @property
    def counter(self) -> Counter:
        """The tallies, built at first use."""
        if self._counter is None:
            logits = self.loss.logits if self.spec.loss is not None else False
            metrics = named_metrics(self.spec.metrics, self.spec.config, logits=logits)
            self._counter = Counter(metrics, self.device)
        return self._counter

    def attach(self, group: Collective) -> None:
        """Start from rank 0's state and agree on gradients through `group` from now on."""
        if self._group is not None:
            raise ConfigError("this replica is attached to a group already; a replica serves one run.")
        self._group = group
        if group.size == 1:
            return
        state = share_bytes(group, self.state() if group.rank == 0 else b"", self.device)
        if group.rank != 0:
            self.load_state(state)
        self._sync = group.gradients(self._trained)
        self._watch_buffers()

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
        optimizer = self.optimizer
        self._set_mode(training=True)
        for parameter in self._trained:
            parameter.grad = None
        if batch.rows:
            self._backward(batch)
        elif self._sync is not None:
            self._sync.idle(weighted=self.loss.weighted)
        self._clip()
        self._freezer.settle()
        optimizer.step()
        if self._scheduler is not None and self.spec.scheduler_step == "step":
            self._scheduler.step()
        self.step += 1
        self._epoch_rows += batch.rows

    def eval_step(self, batch: Batch) -> None:
        """Count loss and metrics of a batch, learning nothing."""
        if not batch.rows:
            return
        self._set_mode(training=False)
        with torch.inference_mode():
            self._judge(self._tensors(batch.features), self._tensors(batch.labels), batch.rows)

    def merge_buffers(self) -> None:
        """Make what training changed besides weights (BatchNorm's statistics) the same on all ranks."""
        if self._sync is not None and self._group is not None:
            merge_buffers(self._group, self.model, self._buffer_changes(), self._epoch_rows)

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """Move a per-epoch schedule."""
        if self._scheduler is not None and self.spec.scheduler_step == "epoch":
            step_scheduler(self._scheduler, logs)

    def take_tallies(self) -> bytes:
        """This rank's sums and metric states since they were last taken."""
        return self.counter.take()

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """All ranks' tallies as numbers."""
        return self.counter.merge(tallies)

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
        return self._freezer.freeze(self._fields(), restless=self.model.buffers())

    def settle(self) -> None:
        """Wait until what was frozen is copied; only then may others change weights."""
        self._freezer.settle()

    def _fields(self) -> dict[str, Any]:
        optimizer = self.optimizer if self.spec.optimizer is not None else None
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict() if optimizer is not None else None,
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "rng": self._rng(),
            "epoch": self.epoch,
            "step": self.step,
        }

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`, or take only the model's weights from it."""
        fields = parse(data)
        self._freezer.settle()
        self.model.load_state_dict(fields["model"])
        if weights_only_model:
            return
        if fields["optimizer"] is not None and self.spec.optimizer is not None:
            self.optimizer.load_state_dict(fields["optimizer"])
        if fields["scheduler"] is not None and self._scheduler is not None:
            self._scheduler.load_state_dict(fields["scheduler"])
        self.epoch, self.step = fields["epoch"], fields["step"]
        self._load_rng(fields["rng"])

    def local_state(self) -> bytes:
        """What this rank alone has within an epoch: randomness, tallies, and buffers that it changed."""
        changed = self._buffer_changes()
        buffers = {i: b for i, b in enumerate(self.model.buffers()) if self._sync is not None and changed[i]}
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
            for place, buffer in enumerate(self.model.buffers()):
                if place in fields["buffers"]:
                    buffer.copy_(fields["buffers"][place])
        self.counter.restore(fields["tallies"])
        self._epoch_rows, self._changed = fields["rows"], fields["changed"]
        self._load_rng(fields["rng"])
        if "own" in fields:
            restore_own(fields["own"])

    def trained_model(self) -> torch.nn.Module:
        """The model itself, ready to predict."""
        return self.model.eval()

    def weights(self) -> bytes:
        """The model's state dict, as `torch.save` writes it."""
        return save_weights(self.model)

    def save(self, path: str) -> None:
        """Write the model's state dict to a file."""
        Path(path).write_bytes(self.weights())

    def load(self, path: str) -> None:
        """Take the weights of a file that `save` or `torch.save` wrote."""
        self.load_weights(Path(path).read_bytes())

    def load_weights(self, data: bytes) -> None:
        """Take the weights of a state dict's file, or of a checkpoint."""
        self._freezer.settle()
        self.model.load_state_dict(parse_weights(data))

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The outputs for these rows; several outputs in the model's order."""
        self._set_mode(training=False)
        with torch.inference_mode(), self._precision():
            outputs = self._forward(self._tensors(features))
        self.output_names = tuple(map(str, outputs)) if isinstance(outputs, Mapping) else None
        return arrays(outputs)

    def _watch_buffers(self) -> None:
        """From now on, note which buffers training changes; without other ranks nobody asks."""
        self._buffers = snapshot(self.model) if self._sync is not None else []
        self._changed = [False] * len(self._buffers)

    def _buffer_changes(self) -> list[bool]:
        """Which buffers this rank has changed in this epoch, also before it was interrupted."""
        if self._sync is None:
            return []
        now = changes(self.model, self._buffers)
        return [flag or before for flag, before in zip(now, self._changed, strict=True)]

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

    def _backward(self, batch: Batch) -> None:
        """All micro-batches of one step; afterwards `grad` holds the mean over the rows of all ranks."""
        features, labels = self._tensors(batch.features), self._tensors(batch.labels)
        passes = min(self.spec.accumulation_steps, batch.rows)
        weight: float | torch.Tensor = 0.0
        for number, (start, stop) in enumerate(_cuts(batch.rows, passes), start=1):
            if passes == 1:
                judged = self._judge(features, labels, batch.rows)
            else:
                parts = [tuple(t[start:stop] for t in tensors) for tensors in (features, labels)]
                judged = self._judge(parts[0], parts[1], stop - start)
            weight = weight + judged.weight
            share = 1.0 if self.loss.sums else judged.rows_scale / batch.global_rows
            loss = judged.loss if share == 1.0 else judged.loss * share
            with self._collecting(last=number == passes, weight=weight, rows=batch.global_rows):
                loss.backward()  # type: ignore[no-untyped-call]
        if self._sync is not None:
            self._sync.finish()
        elif self.loss.weighted:
            self._divide(weight / batch.global_rows)

    def _collecting(
        self, *, last: bool, weight: float | torch.Tensor, rows: int
    ) -> AbstractContextManager[Any]:
        """Around one backward: only the last of a step lets gradients travel."""
        if self._sync is None:
            return nullcontext()
        if not last:
            paused: AbstractContextManager[Any] = self._sync.paused()
            return paused
        if self.loss.weighted:
            self._sync.weigh(weight / rows)
        return nullcontext()

    def _divide(self, divisor: float | torch.Tensor) -> None:
        """Without other ranks: what the exchange of gradients does with weights."""
        if isinstance(divisor, float):
            if divisor == 1.0:
                return
            divisor = divisor or 1.0  # nothing weighs anything, so all gradients are zero
        grads = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        torch._foreach_div_(grads, divisor)

    def _judge(
        self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...], rows: int
    ) -> Judged:
        with self._precision():
            outputs = self._forward(features)
            judged = self.loss(outputs, labels, rows)
        self.counter.add(judged, outputs, labels, rows)
        return judged

    def _forward(self, features: tuple[torch.Tensor, ...]) -> Any:
        if self.spec.inputs == "dict":
            return self.model(dict(zip(self._names, features, strict=True)))
        return self.model(*features)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.spec.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _clip(self) -> None:
        if self.spec.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._trained, self.spec.clip_value)
        if self.spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, self.spec.clip_norm)

    def _set_mode(self, *, training: bool) -> None:
        if self._training is not training:  # walking all modules is not free
            self.model.train(training)
            self._training = training

    def _tensors(self, columns: tuple[Array, ...]) -> tuple[torch.Tensor, ...]:
        return tensors(columns, self.device)


def _cuts(rows: int, passes: int) -> Iterator[tuple[int, int]]:
    return ((rows * i // passes, rows * (i + 1) // passes) for i in range(passes))
