"""The exchange of a model's gradients, while backward still runs.

Gradients are copied into flat buckets as autograd makes them, last layer first; a full bucket sets off at
once. What a gradient is a mean of is the caller's affair: ranks add up, and a weight given with `weigh` is
added up with them and divides the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from kindler.errors import SyncError
from kindler.sync.buckets_torch import Bucket

_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
_NUMBERS = 2  # at the end of a load, for the whole step


class BucketGroup(Protocol):
    """What makes buckets: a `TorchExchange`."""

    @property
    def device(self) -> torch.device: ...

    def buckets(self, layouts: Sequence[tuple[int, torch.dtype]]) -> list[Bucket]: ...


@dataclass(slots=True)
class Member:
    """One parameter's place in a load."""

    parameter: torch.nn.Parameter
    load: Load
    place: int
    fill: torch.Tensor
    result: torch.Tensor
    filled: bool = False


@dataclass(slots=True)
class Load:
    """A bucket with its members: their gradients, one flag each (has a gradient), then two numbers.

    The first of these is 1, or 0 where the rank announces parameters of its own (see `announce`); the second
    is the weight. They count in one load only.
    """

    bucket: Bucket
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


class GradientSync:
    """Sums gradients over ranks; after `finish` every rank has the same ones.

    A parameter that no rank used in this step keeps `grad` None, as in one process; one that some ranks did
    not use counts as zero there. Sparse gradients become dense. Every rank constructs it with the same
    parameters in the same order, and calls `finish` or `idle` once a step.

    Parameters may be added between two steps with `extend`. Since a rank that adds some while another does
    not would wait for ever, all of them first `announce` it, which costs a step nothing.

    Args:
        parameters: Those whose gradients are exchanged; ones that need none are left out.
        group: Where the buckets come from.
        first_bucket_bytes: The first to be sent is small, so that the exchange starts early.
        bucket_bytes: About how large the others are.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: BucketGroup,
        *,
        first_bucket_bytes: int = _FIRST_BUCKET_BYTES,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._hooks: list[Any] = []
        self._loads = self._made(parameters, first_bucket_bytes, weigher=True)
        self._weigher = next(load for load in self._loads if _carries_weight(load.bucket.fill.dtype))
        self._weight: float | torch.Tensor | None = None
        self._factor_used: float | torch.Tensor | None = None
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

    def finish(self, scale: torch.Tensor | None = None) -> None:
        """Send what backward did not, wait for the sums and put them into the parameters' `grad`."""
        for load in self._loads:
            if not load.launched:
                self._complete(load)
        self._launch_complete()
        for load in self._loads:
            load.bucket.push(block=True)
        for load in self._loads:
            load.bucket.wait()
        self._factor_used = self._factor(scale)
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
            load.bucket.push(block=True)
            load.bucket.wait()
            self._hand_over(load)
            load.reset()
        self._loads += loads

    def idle(self, *, weighted: bool = False) -> None:
        """Take part in a step for which this rank has no rows; `weighted` where the others `weigh`."""
        if weighted:
            self.weigh(0.0)
        self.finish()

    def close(self) -> None:
        """Take the hooks off the parameters. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

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
        buckets = self._group.buckets(layouts)
        loads = [_load(part, bucket) for part, bucket in zip(plan, buckets, strict=True)]
        self._hooks += [
            _hook(member.parameter, partial(self._ready, member)) for load in loads for member in load.members
        ]
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
            grad = member.parameter.grad
            if grad is not None:
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

    def _factor(self, scale: torch.Tensor | None) -> float | torch.Tensor | None:
        if self._weight is None:
            return scale
        total = self._weigher.bucket.result[-1].clone()
        if not total.is_cuda:
            weight = total.item()
            # Nothing weighs anything: all gradients are zero, and stay so.
            inverse = 1.0 / weight if weight else 0.0
            return (None if inverse == 1.0 else inverse) if scale is None else scale * inverse
        inverse_there = torch.where(total == 0, total, total.reciprocal())
        return inverse_there if scale is None else scale * inverse_there

    def _hand_over(self, load: Load) -> None:
        if self._factor_used is not None:
            load.bucket.result[: load.flags.start].mul_(self._factor_used)
        flags: list[float] | None = None
        for member in load.members:
            used = member.filled
            if not used:
                flags = load.bucket.result[load.flags].tolist() if flags is None else flags
                used = flags[member.place] > 0
            member.parameter.grad = member.result if used else None


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


def reals(parameter: torch.Tensor) -> int:
    """How many real numbers it has."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _load(parameters: Sequence[torch.nn.Parameter], bucket: Bucket) -> Load:
    ends = sum(reals(parameter) for parameter in parameters)
    load = Load(bucket=bucket, flags=slice(ends, ends + len(parameters)), members=[])
    start = 0
    for place, parameter in enumerate(parameters):
        fill, result = (_shaped(flat, start, parameter) for flat in (bucket.fill, bucket.result))
        load.members.append(Member(parameter, load, place, fill, result))
        start += reals(parameter)
    load.reset()
    return load


def _hook(parameter: Any, ready: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(ready)


def _shaped(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """A view of the flat buffer that is laid out as the parameter is, which fused optimizers rely on."""
    return laid_out_as(like, flat[start : start + reals(like)].view(like.dtype))


def laid_out_as(like: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A view of a flat tensor whose elements lie in memory in the order in which those of `like` do."""
    strides = like.stride() if lies_dense(like) else torch.empty(like.shape, device="meta").stride()
    return flat.as_strided(like.shape, strides)


def lies_dense(tensor: torch.Tensor) -> bool:
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
