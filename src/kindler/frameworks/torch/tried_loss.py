"""Tries the user's own losses on the first rows, on outputs that a step has computed; see `loss_trial.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from kindler.frameworks.loss_trial import Difference, LossTrial, refusal
from kindler.frameworks.rng import Drawing
from kindler.frameworks.torch.gather import join, take_rows
from kindler.frameworks.torch.loss import LossRule

_MOST_ROWS = 64
_EXACT, _HALF = 2e-5, 2e-2
HOW_TO_GATHER = (
    "look at the rows of all workers with kindler.all_gather(tensor), as docs/guides/contrastive.md shows;"
    " or train with workers=1"
)


class TriedLoss:
    def __init__(self, rule: LossRule, device: torch.device, *, accumulates: bool) -> None:
        self._rule, self._device, self._accumulates = rule, device, accumulates
        self._trial = LossTrial(_MOST_ROWS, None if accumulates else join)

    @property
    def over(self) -> bool:
        return self._trial.over

    @property
    def gathers(self) -> bool | None:
        """None before a loss was called."""
        return self._trial.gathers

    def listen(self, outputs: Any, targets: tuple[torch.Tensor, ...]) -> bool:
        """On a made-up row, if the loss saw no others."""
        if self.gathers is None:
            with undrawn(self._device), torch.no_grad(), suppress(Exception):
                self._trial.listen(lambda: self._rule.tried(outputs, targets, 1, None))
        return bool(self.gathers)

    def __call__(
        self, outputs: Any, targets: tuple[torch.Tensor, ...], rows: int, weights: torch.Tensor | None
    ) -> None:
        batch = (outputs, targets, weights)
        halves = any(_is_half(leaf) for leaf in torch.utils._pytree.tree_leaves(batch))
        try:
            found = self._found(batch, rows, wide=True)
        except Exception:  # noqa: BLE001 - the step itself shows what is wrong with the loss
            found = None
            undecided = True
        else:
            undecided = found is not None and bool(found.problem)
        if undecided and halves:  # a loss that cannot do with numbers of another precision than its own
            try:
                found = self._found(batch, rows, wide=False)
            except Exception:  # noqa: BLE001
                found = None
        if found is not None:
            name = list(self._rule.unknown_parts())[found.place]
            raise refusal(found, name, why=self._why, hint=self._hint)

    def _found(self, batch: tuple[Any, Any, Any], rows: int, *, wide: bool) -> Difference | None:
        """`wide` is single precision: half precision is too coarse to compare."""

        def judge(chosen: list[int]) -> Sequence[tuple[float, float]]:
            taken = take_rows(batch, chosen, rows)
            if wide:
                taken = torch.utils._pytree.tree_map(_widened, taken)
            outputs, targets, weights = taken
            judged = self._rule.tried(outputs, targets, len(chosen), weights)
            return [(float(one.total), float(one.weight)) for one in judged]

        with ExitStack() as stack:
            stack.enter_context(undrawn(self._device))
            stack.enter_context(torch.no_grad())
            try:
                take_rows(batch, [], rows)
            except TypeError:  # nothing can be compared
                outputs, targets, weights = batch
                self._trial.listen(lambda: self._rule.tried(outputs, targets, rows, weights))
                return None
            if wide:
                stack.enter_context(torch.autocast(self._device.type, enabled=False))
            return self._trial(judge, rows, _EXACT if wide else _HALF)

    @property
    def _why(self) -> str:
        return "the passes of accumulation_steps" if self._accumulates else "several workers"

    @property
    def _hint(self) -> str:
        how = "train with accumulation_steps=1" if self._accumulates else HOW_TO_GATHER
        return (
            f"{how}. If it is a mean over something else than rows, return one loss for each row or value,"
            " not reduced, or give it an attribute loss_divisor, a function of the same arguments that"
            " returns what it was divided by. A loss that has one is not tried."
        )


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with Drawing(0):
            yield
    finally:
        if drawn is not None:
            torch.cuda.set_rng_state(drawn, device)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)


def _widened(leaf: Any) -> Any:
    return leaf.float() if _is_half(leaf) else leaf
