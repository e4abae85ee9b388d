"""`all_gather` in a torch training step; see `row_gather.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kindler.collective import gathering
from kindler.errors import ConfigError
from kindler.frameworks.row_gather import RowGather
from kindler.frameworks.torch import private


class Gather:
    """`all_gather` in the training steps of one rank.

    `share` is the weight of this rank's gradients if applied after backward, else 1; `pending` was gathered
    since the last backward and carries gradients; `idle`: this rank contributes no rows.
    """

    def __init__(self, ranks: RowGather) -> None:
        self._ranks = ranks
        self.share = 1.0
        self.pending: list[torch.Tensor] = []
        self.idle = False

    @contextmanager
    def step(self, *, idle: bool = False) -> Iterator[None]:
        self.idle = idle
        try:
            with gathering(self):
                yield
        finally:
            self.idle = False

    def begin(self) -> None:
        self._ranks.begin()
        self.share, self.pending = 1.0, []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise ConfigError(
                "all_gather needs a tensor with rows along its first dimension; received"
                f" {'a single number' if isinstance(tensor, torch.Tensor) else type(tensor).__name__}."
            )
        if self.idle:
            tensor = tensor[:0]
        flows = tensor.requires_grad and torch.is_grad_enabled()
        what = f"{tensor.dtype} {tuple(tensor.shape[1:])} {'with' if flows else 'without'} gradient"
        counts = self._ranks.agree(len(tensor), what)
        if flows:
            whole: torch.Tensor = _Rows.apply(tensor, self, counts)  # type: ignore[no-untyped-call]
            self.pending.append(whole)
            return whole
        return self.exchanged(tensor, counts)

    def exchanged(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        own = tensor.detach().cpu().contiguous()
        bits = own.view(torch.int16) if own.dtype is torch.bfloat16 else own  # which numpy does not know
        whole = torch.from_numpy(self._ranks.rows(bits.numpy(), counts))
        return whole.view(own.dtype).to(tensor.device)

    def returned(self, gradient: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        small = gradient.dtype in (torch.float16, torch.bfloat16)
        carried = gradient.detach().to("cpu", torch.float32 if small else gradient.dtype).resolve_conj()
        own = self._ranks.returned(carried.contiguous().numpy(), counts, self.share)
        return torch.from_numpy(own).to(gradient.device, gradient.dtype)

    def backward(self, loss: torch.Tensor | None, begin: torch.Tensor | None = None, **options: Any) -> None:
        """Goes through everything gathered, used or not: the other ranks wait for this one."""
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.gather.returned(gradients[0], ctx.counts), None, None


def join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tensors)


def take_rows(tree: Any, rows: Sequence[int], of: int) -> Any:
    """Tensors without `of` rows are copied whole."""
    return private.tree_map(lambda leaf: _taken(leaf, rows, of), tree)


def without_rows(tree: Any) -> Any:
    """Nothing flows back to what made-up rows have made."""
    return private.tree_map(_emptied, tree)


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
    raise TypeError(f"a {type(leaf).__name__} has no known rows")
