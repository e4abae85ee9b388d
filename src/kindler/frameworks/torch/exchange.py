"""The exchange of a model's gradients between all workers of a run, while backward still runs.

Gradients are copied into flat buckets as autograd makes them, last layer first; a full bucket sets off at
once. Ranks of one host meet in shared memory and the first of them speaks for the host in a ring; CUDA
tensors go through NCCL, or over the CPU where two ranks share one GPU. What a gradient is a mean of is the
caller's affair: ranks add up, and a weight given with `weigh` is added up with them and divides the sum. All
else that ranks share goes through the collective of `sync/host_group.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kindler.collective import GradientExchange
from kindler.errors import SyncError
from kindler.frameworks.torch.exchange_network import TORCH, Network, Wait, connect
from kindler.group import Group
from kindler.sync.shared_memory import Channel, Topology, Waiting, channels

_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
_NUMBERS = 2  # at the end of a load, for the whole step

BucketMaker = Callable[[int, torch.dtype, Channel | None], Any]


class TorchExchange(GradientExchange):
    """One rank's end of the exchange: the routes between ranks, and the buckets that travel along them.

    Every rank makes the same calls in the same order. All ranks get bit-identical results. A rank that does
    not come is named in SyncTimeoutError (shared memory, ring) or makes the others' call fail with SyncError
    (NCCL), both within `timeout_s`.

    Args:
        worker: This rank's worker.
        device: Where the tensors live.
        timeout_s: Seconds to wait for other ranks.
        shared_memory: False makes every rank count as a host of its own.

    Attributes:
        staged: Whether CUDA tensors go over the CPU, since two ranks share one GPU, which NCCL refuses.
    """

    def __init__(
        self, worker: Group, *, device: torch.device, timeout_s: float, shared_memory: bool = True
    ) -> None:
        self.rank, self.size, self.device = worker.rank, worker.size, torch.device(device)
        self.worker = worker
        self.network: Network | None = None
        self.staged = False
        self._waiting = Waiting(worker)
        if self.size == 1:
            self.where = Topology([""], 0)
            return
        if self.device.type == "cuda":
            self.staged = len(set(gpus_of(worker, self.device))) < self.size
            shared_memory = shared_memory and self.staged
        self.where = Topology.of(
            worker, timeout_s=timeout_s, waiting=self._waiting, shared_memory=shared_memory
        )
        if not self.where.one_host:
            self.network = connect(worker, self.where, torch.device("cpu") if self.staged else self.device)

    @property
    def waited_s(self) -> float:
        return self._waiting.seconds

    def bucket(self, elements: int, dtype: torch.dtype, channel: Channel | None) -> Bucket | StagedBucket:
        device = torch.device("cpu") if self.staged else self.device
        inner = Bucket(elements, dtype, device, self.where, channel, self.network)
        return StagedBucket(inner, self.device) if self.staged else inner

    def buckets(
        self, layouts: Sequence[tuple[int, torch.dtype]], make: BucketMaker | None = None
    ) -> list[Any]:
        """Buckets of (elements, dtype); every rank calls it."""
        made: Sequence[Channel | None] = [None] * len(layouts)
        if self.where.any_shared:
            sizes = [elements * dtype.itemsize for elements, dtype in layouts]
            made = channels(self.worker, self.where, sizes, TORCH) or made
        make = make or self.bucket
        return [make(elements, dtype, route) for (elements, dtype), route in zip(layouts, made, strict=True)]

    def close(self) -> None:
        """Leave the group: connections and mappings go. Idempotent."""
        if self.network is not None:
            network, self.network = self.network, None
            network.close()


def gpus_of(worker: Group, device: torch.device) -> list[bytes]:
    """Which GPU each rank uses; every rank calls it."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    identity = str(torch.cuda.get_device_properties(index).uuid)
    return worker.all_gather(f"{worker.host} {identity}".encode())


class Bucket:
    """A flat buffer that is filled, summed over ranks and read, step after step.

    A round is `begin`, filling `fill`, `launch`, `wait`; then `result` holds the sum. With a channel, `fill`
    lies in shared memory; of several hosts, the leaders take their sums to the network.

    Attributes:
        parts: What this rank needs of the sum; None is all of it.
        host_parts: What the ranks of this host need of it.
    """

    parts: Sequence[slice] | None = None
    host_parts: Sequence[slice] | None = None

    def __init__(
        self,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        where: Topology,
        channel: Channel | None,
        network: Network | None,
    ) -> None:
        self.result = torch.zeros(elements, dtype=dtype, device=device)
        self.fill = self.result if channel is None else channel.slots(dtype)[where.index][:elements]
        self.where, self.channel, self.network = where, channel, network
        self._waits: list[Wait] = []

    def begin(self) -> None:
        """Wait until `fill` may be written: the other ranks of this host have read its last values."""
        if self.channel is not None:
            self.channel.slot(self.fill.dtype)

    def launch(self) -> None:
        """Say that `fill` is complete."""
        if self.channel is not None:
            self.channel.post()
        elif self.network is not None:
            self._waits = self.start(self.network)

    def push(self, *, block: bool) -> bool:
        """Hand it on to the network if the whole host has arrived, or once it has; whether that is done."""
        if self.channel is None or self.network is None or self._waits:
            return True
        if not (block or self.channel.arrived()):
            return False
        self.channel.gather_into(self.result)
        self._waits = self.start(self.network)
        return True

    def start(self, network: Network) -> list[Wait]:
        return [network.all_reduce(self.result)]

    def wait(self) -> None:
        """Block until `result` holds the sum over all ranks."""
        if self.network is not None:
            self.push(block=True)
            waits, self._waits = self._waits, []
            for wait in waits:
                wait()
            if self.channel is not None:
                self.channel.publish(self.result, self.host_parts)
        elif self.channel is not None and self.where.one_host:
            self.channel.sum_into(self.result, self.parts)
        elif self.channel is not None:
            self.channel.fetch(self.result, self.parts)


class StagedBucket:
    """A CUDA buffer that travels over a CPU bucket."""

    def __init__(self, inner: Bucket, device: torch.device) -> None:
        self.fill = self.result = torch.zeros_like(inner.fill, device=device)
        self._inner = inner
        self.push = inner.push

    def begin(self) -> None:
        """The CUDA buffer is private: nothing to wait for."""

    def launch(self) -> None:
        self._inner.begin()
        self._inner.fill.copy_(self.fill)
        self._inner.launch()

    def wait(self) -> None:
        self._inner.wait()
        self.result.copy_(self._inner.result)


@dataclass(slots=True)
class Member:
    """One parameter's place in a load."""

    parameter: torch.nn.Parameter
    load: Load
    place: int
    fill: torch.Tensor
    result: torch.Tensor
    filled: bool = False


@dataclass(slots=True, eq=False)
class Load:
    """A bucket with its members: their gradients, one flag each (has a gradient), then two numbers.

    The first of these is 1, or 0 where the rank announces parameters of its own (see `announce`); the second
    is the weight. They count in one load only.
    """

    bucket: Any
    flags: slice
    members: list[Member]
    missing: int = 0
    begun: bool = False
    launched: bool = False

    def begin(self) -> None:
        if not self.begun:
            self.bucket.begin()
            self.bucket.fill[self.flags.start :].fill_(1.0)
            self.begun = True

    def reset(self) -> None:
        self.begun = self.launched = False
        self.missing = len(self.members)
        for member in self.members:
            member.filled = False

    def has_gradient(self) -> list[bool]:
        """Of each member, after the sum: whether any rank has a gradient of it in this step."""
        if all(member.filled for member in self.members):
            return [True] * len(self.members)
        return [flag > 0 for flag in self.bucket.result[self.flags].tolist()]


class GradientSync:
    """Sums gradients over ranks; after `finish` every rank has the same ones.

    A parameter that no rank used in this step keeps `grad` None, as in one process; one that some ranks did
    not use counts as zero there. Sparse gradients become dense. Every rank constructs it with the same
    parameters in the same order, and calls `finish` or `idle` once a step.

    Parameters may be added between two steps with `extend`. Since a rank that adds some while another does
    not would wait for ever, all of them first `announce` it, which costs a step nothing.

    Args:
        parameters: Those whose gradients are exchanged; ones that need none are left out.
        exchange: Where the buckets come from.
        first_bucket_bytes: The first to be sent is small, so that the exchange starts early.
        bucket_bytes: About how large the others are.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        exchange: TorchExchange,
        *,
        first_bucket_bytes: int = _FIRST_BUCKET_BYTES,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self.exchange, self._bucket_bytes = exchange, bucket_bytes
        self._loads = self._made(parameters, first_bucket_bytes, weigher=True)
        self._weigher = next(load for load in self._loads if _carries_weight(load.bucket.fill.dtype))
        self._weight: float | torch.Tensor | None = None
        self._factor: float | torch.Tensor | None = None
        self._announcing = False
        self._next = 0
        self._pushed = 0
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up locally, as for all micro-batches of a step but the last."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def weigh(self, weight: float | torch.Tensor) -> None:
        """Divide this step's sums by the sum of these weights.

        Called before the backward that sends, by all ranks or by none.
        """
        self._weight = weight

    def announce(self) -> None:
        """Say, with the exchange of this step, that this rank has parameters to `extend` by."""
        self._announcing = True

    def all_announced(self) -> bool:
        """After `finish`: whether every rank has announced parameters in this step."""
        return bool(self._weigher.bucket.result[-2].item() == 0)

    def finish(self) -> None:
        """Send what backward did not, wait for the sums and put them into the parameters' `grad`."""
        for load in self._loads:
            if not load.launched:
                self._complete(load)
        self._launch_complete()
        for load in self._loads:
            load.bucket.push(block=True)
        for load in self._loads:
            load.bucket.wait()
        self._factor = self._inverse_weight()
        for load in self._loads:
            self._hand_over(load)
            load.reset()
        self._next, self._pushed, self._weight, self._announcing = 0, 0, None, False

    def extend(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take these in from now on; every rank calls it, after `finish` of a step and with the same ones.

        Gradients that they have of this very step are exchanged at once.
        """
        loads = self._made(parameters, self._bucket_bytes)
        for load in loads:
            self._complete(load)
            load.bucket.launch()
        for load in loads:
            load.bucket.wait()
            self._hand_over(load)
            load.reset()
        self._loads += loads

    def idle(self, *, weighted: bool = False) -> None:
        """Take part in a step for which this rank has no rows; `weighted` where the others `weigh`."""
        if weighted:
            self.weigh(0.0)
        self.finish()

    def _buckets(self, layouts: Sequence[tuple[int, torch.dtype]]) -> list[Any]:
        return self.exchange.buckets(layouts)

    def _made(
        self, parameters: Iterable[torch.nn.Parameter], first_bytes: int, *, weigher: bool = False
    ) -> list[Load]:
        """Loads for these parameters, whose gradients are noticed from now on."""
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        plan = _plan(wanted, first_bytes, self._bucket_bytes)
        layouts = [_layout(part) for part in plan]
        if weigher and not any(_carries_weight(dtype) for _, dtype in layouts):
            plan.append([])
            layouts.append((_NUMBERS, torch.float32))
        loads = [_load(part, bucket) for part, bucket in zip(plan, self._buckets(layouts), strict=True)]
        for load in loads:
            for member in load.members:
                parameter: Any = member.parameter
                parameter.register_post_accumulate_grad_hook(partial(self._ready, member))
        return loads

    def _ready(self, member: Member, parameter: torch.Tensor) -> None:
        """Autograd's hook: the gradient of one parameter is there."""
        grad = parameter.grad
        if self._paused or grad is None:
            return
        load = member.load
        if load.launched:
            raise SyncError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one step, after the"
                " first had been sent.\nHint: run one backward a step; accumulation_steps cuts it in several."
            )
        load.begin()
        self._put(member, grad)
        parameter.grad = None  # the sum comes instead; its memory serves the next gradient
        if load.missing == 0:
            self._launch_complete()

    def _put(self, member: Member, grad: torch.Tensor) -> None:
        if grad.is_sparse:
            grad = grad.to_dense()
        if member.filled:  # reentrant checkpoints reach a parameter twice
            member.fill.add_(grad)
            return
        member.fill.copy_(grad)
        member.filled = True
        member.load.missing -= 1

    def _complete(self, load: Load) -> None:
        """Fill in what backward did not reach: gradients of earlier micro-batches, or zeros."""
        load.begin()
        for member in load.members:
            if member.filled:
                continue
            if (grad := member.parameter.grad) is not None:
                self._put(member, grad)
                continue
            member.fill.zero_()
            load.bucket.fill[load.flags.start + member.place] = 0.0
        load.missing = 0

    def _launch_complete(self) -> None:
        """Launch in one order on all ranks, whatever the order in which backward ends."""
        while self._next < len(self._loads) and self._loads[self._next].missing == 0:
            load = self._loads[self._next]
            load.begin()
            if load is self._weigher and self._weight is not None:
                load.bucket.fill[-1] = self._weight
            if load is self._weigher and self._announcing:
                load.bucket.fill[-2] = 0.0
            load.bucket.launch()
            load.launched = True
            self._next += 1
        # In order as well: the leaders of two hosts must send the same bucket first.
        while self._pushed < self._next and self._loads[self._pushed].bucket.push(block=False):
            self._pushed += 1

    def _inverse_weight(self) -> float | torch.Tensor | None:
        """What sums are multiplied by; where nothing weighs anything all gradients are zero, and stay so."""
        if self._weight is None:
            return None
        total = self._weigher.bucket.result[-1].clone()
        if total.is_cuda:
            return torch.where(total == 0, total, total.reciprocal())
        weight = total.item()
        return None if weight == 1.0 else 1.0 / weight if weight else 0.0

    def _hand_over(self, load: Load) -> None:
        if self._factor is not None:
            load.bucket.result[: load.flags.start].mul_(self._factor)
        for member, has_gradient in zip(load.members, load.has_gradient(), strict=True):
            member.parameter.grad = member.result if has_gradient else None


def _plan(
    parameters: Sequence[torch.nn.Parameter], first_bytes: int, other_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """Cut the parameters into buckets of one dtype, in the order in which backward makes gradients."""
    plan: list[list[torch.nn.Parameter]] = []
    open_parts: dict[torch.dtype, tuple[list[torch.nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        part, used = open_parts.get(parameter.dtype, ([], 0))
        if not part:
            plan.append(part)
        part.append(parameter)
        used += parameter.numel() * parameter.element_size()
        full = used >= (first_bytes if part is plan[0] else other_bytes)
        open_parts[parameter.dtype] = ([], 0) if full else (part, used)
    return plan


def _layout(parameters: Sequence[torch.nn.Parameter]) -> tuple[int, torch.dtype]:
    """Elements and dtype of the bucket for these: complex numbers travel as pairs of real ones."""
    values = sum(reals(parameter) for parameter in parameters)
    return values + len(parameters) + _NUMBERS, parameters[0].dtype.to_real()


def _load(parameters: Sequence[torch.nn.Parameter], bucket: Any) -> Load:
    ends = sum(reals(parameter) for parameter in parameters)
    load = Load(bucket=bucket, flags=slice(ends, ends + len(parameters)), members=[])
    start = 0
    for place, parameter in enumerate(parameters):
        span = slice(start, start + reals(parameter))
        # Laid out as the parameter is, which fused optimizers rely on.
        fill, result = (
            laid_out_as(parameter, flat[span].view(parameter.dtype)) for flat in (bucket.fill, bucket.result)
        )
        load.members.append(Member(parameter, load, place, fill, result))
        start = span.stop
    load.reset()
    return load


def reals(parameter: torch.Tensor) -> int:
    """How many real numbers it has."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def laid_out_as(like: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A view of a flat tensor whose elements lie in memory in the order in which those of `like` do."""
    strides = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return flat.as_strided(like.shape, strides)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def _carries_weight(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)
