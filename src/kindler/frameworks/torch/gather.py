"""`all_gather` of a training step in torch: the rows of all ranks, with gradients that go back to each.

Every rank's loss counts for its share of the step. So what flows back to the rows of a rank is the sum over
all ranks of what they made of them, each by its share; whatever a loss does with rows of others, the step is
that of the mean of all ranks' losses. Backward passes meet in the reverse order of the forward passes, which
is why ranks must gather alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kindler.collective import Collective, gathering
from kindler.errors import ConfigError

__all__ = ["Gather", "join", "refuse_to_gather", "take_rows", "without_rows"]


class Gather:
    """What `all_gather` is in the training steps of one rank.

    Attributes:
        share: What a gradient that begins on this rank counts for, where that is applied to the gradients of
            parameters afterwards; 1 where backward begins with it.
        pending: What was gathered since the last backward, as far as gradients flow through it.

    Args:
        collective: Where all ranks meet in every step.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.share = 1.0
        self.pending: list[torch.Tensor] = []
        self._idle = False
        self._calls = 0

    @contextmanager
    def step(self, *, idle: bool = False) -> Iterator[None]:
        """Around what may gather; `idle` where this rank computes on made-up rows, of which it gives none."""
        self._idle = idle
        try:
            with gathering(self):
                yield
        finally:
            self._idle = False

    def begin(self) -> None:
        """Before the first forward pass of a step."""
        self._calls, self.share, self.pending = 0, 1.0, []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks."""
        return self._gathered(tensor)[0]

    def even(self, tensor: torch.Tensor, *, gradients: bool) -> torch.Tensor:
        """The tensors of all ranks in a new first dimension; a single number may be one of them."""
        rows = tensor if tensor.dim() else tensor.reshape(1)
        whole, counts = self._gathered(rows if gradients else rows.detach())
        if len(set(counts)) > 1:
            raise ConfigError(
                f"self.all_gather puts the tensors of all workers beside one another, and they have {counts}"
                " rows in this step.\nHint: kindler.all_gather(tensor) joins their rows, however many each"
                " has; or choose a batch_size that gives all workers the same number in every step."
            )
        return whole.reshape(len(counts), *tensor.shape)

    def _gathered(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise ConfigError(
                "all_gather needs a tensor with rows along its first dimension; received"
                f" {'a single number' if isinstance(tensor, torch.Tensor) else type(tensor).__name__}."
            )
        if self._idle:
            tensor = tensor[:0]
        counts = self._agree(tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            whole: torch.Tensor = _Rows.apply(tensor, self, counts)  # type: ignore[no-untyped-call]
            self.pending.append(whole)
            return whole, counts
        return self.exchanged(tensor, counts), counts

    def _agree(self, tensor: torch.Tensor) -> list[int]:
        """How many rows each rank has of this tensor."""
        self._calls += 1
        flows = tensor.requires_grad and torch.is_grad_enabled()
        what = f"{self._calls} {tensor.dtype} {tuple(tensor.shape[1:])} {flows}"
        mine = np.zeros((self._collective.size, 2), np.int64)
        mine[self._collective.rank] = len(tensor), zlib.crc32(what.encode())
        [told] = self._collective.sum([mine])
        if len(set(told[:, 1].tolist())) > 1:
            raise ConfigError(
                "workers called all_gather with different tensors: this one has"
                f" {tensor.dtype} of shape {tuple(tensor.shape)} in call {self._calls} of the step, another"
                " has another dtype, other dimensions after the first, or no gradient.\nHint: let nothing"
                " that only one worker knows decide what is gathered."
            )
        return [int(count) for count in told[:, 0]]

    def exchanged(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks, bit by bit."""
        own = tensor.detach().contiguous()
        whole = torch.zeros((sum(counts), *own.shape[1:]), dtype=own.dtype)
        start = sum(counts[: self._collective.rank])
        whole[start : start + len(own)] = own.cpu()
        if not whole.numel():
            return whole.to(tensor.device)
        [data] = self._collective.sum([whole.reshape(-1).view(torch.uint8).numpy()])
        return torch.from_numpy(data).view(own.dtype).reshape(whole.shape).to(tensor.device)

    def returned(self, gradient: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """What flows back to this rank's rows."""
        small = gradient.dtype in (torch.float16, torch.bfloat16)
        carried = gradient.detach().to("cpu", torch.float32 if small else gradient.dtype)
        if self.share != 1.0:  # not a product where it counts for nothing: NaN times 0 is NaN
            carried = carried * self.share if self.share else torch.zeros_like(carried)
        if not carried.numel():
            return gradient
        [summed] = self._collective.sum([carried.resolve_conj().contiguous().numpy()])
        start = sum(counts[: self._collective.rank])
        own = torch.from_numpy(summed[start : start + counts[self._collective.rank]])
        return (own / self.share if self.share else own).to(gradient.device, gradient.dtype)

    def backward(self, loss: torch.Tensor | None, begin: torch.Tensor | None = None, **options: Any) -> None:
        """Backward from a loss, or from none, and through all that was gathered for it.

        Also where this rank's loss has made nothing of it: the others wait for this rank.
        """
        pending, self.pending = self.pending, []
        ends = [*([] if loss is None else [loss]), *pending]
        begins = [*([] if loss is None else [begin]), *(torch.zeros_like(whole) for whole in pending)]
        if ends:
            torch.autograd.backward(ends, begins, **options)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gather: Gather, counts: list[int]) -> torch.Tensor:
        ctx.gather, ctx.counts = gather, counts
        return gather.exchanged(tensor, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.gather.returned(gradients[0], ctx.counts), None, None


def refuse_to_gather(tensor: Any) -> Any:
    """What `all_gather` is where workers do not all compute the same part of a step at the same time."""
    raise ConfigError(
        "all_gather needs workers that meet in every step and compute it in one pass.\n"
        "Hint: sync='allreduce' (or 'sharded', 'fsdp') with accumulation_steps=1, or workers=1."
    )


def join(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all of them."""
    return torch.cat(tensors)


def take_rows(tree: Any, rows: Sequence[int], of: int) -> Any:
    """Copies of some of `of` rows of whatever has so many, in dicts, tuples and the like; the rest as it is.

    Raises:
        TypeError: There is something in it of which nobody knows what its rows are.
    """
    leaves, kind = torch.utils._pytree.tree_flatten(tree)
    return torch.utils._pytree.tree_unflatten([_taken(leaf, rows, of) for leaf in leaves], kind)


def without_rows(tree: Any) -> Any:
    """The same without a row; nothing flows back to what made-up rows have made."""
    return torch.utils._pytree.tree_map(_emptied, tree)


def _emptied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return leaf
    return leaf.detach()[:0].requires_grad_(leaf.requires_grad)


def _taken(leaf: Any, rows: Sequence[int], of: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach()
        return leaf[list(rows)] if leaf.dim() and len(leaf) == of else leaf.clone()
    if leaf is None or isinstance(leaf, int | float | str):
        return leaf
    raise TypeError(f"a {type(leaf).__name__} has no rows that are known")
