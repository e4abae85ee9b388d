"""Watches training steps for losses that are not finite, and undoes and tries those of the user's own.

Losses and steps are tried on the first rows; see `loss_trial.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from kindler.errors import ConfigError
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.loss_trial import Difference, LossTrial, refusal
from kindler.frameworks.rng import Drawing
from kindler.frameworks.torch import private
from kindler.frameworks.torch.gather import join, take_rows
from kindler.frameworks.torch.loss import LossRule, Tensors
from kindler.frameworks.torch.losses import Inputs, ModelLoss
from kindler.frameworks.torch.outputs import own_loss

if TYPE_CHECKING:
    from kindler.frameworks.torch.step_replica import StepReplica
    from kindler.train.loss_guard import LossGuard

_SHOWN_ROWS = 8  # of a step whose loss is not finite
_MOST_ROWS = 64
_MOST_ROWS_OF_STEP = 16  # the model is called for them
_EXACT, _OF_STEP, _HALF = 2e-5, 1e-4, 2e-2
_HOW_TO_GATHER = (
    "gather the rows of all workers with kindler.all_gather(tensor), as docs/guides/contrastive.md shows;"
    " or train with workers=1"
)
_STEP_HINT = (
    f"{_HOW_TO_GATHER}. If it is a mean over anything but rows, pass what it was divided by:"
    " run.backward(loss, weight=...), or run.minimize(loss, weight=...). A loss with a weight is not checked."
)
_MODEL_HINT = (
    "give the model a method loss_divisor(outputs, inputs), which returns what its loss was divided by (such "
    "as the tokens that count); or pass a loss function; or train with workers=1 and accumulation_steps=1."
)

Undo = Callable[[], None]


class StepGuard:
    def __init__(self, watch: LossGuard, names: Sequence[str]) -> None:
        self._watch, self._names = watch, names
        self._bad = False

    @property
    def skips(self) -> bool:
        """Skipping needs every loss at once."""
        return self._watch.skips

    def begin_step(self) -> None:
        self._bad = False

    @property
    def bad(self) -> bool:
        """Knows only this rank's losses and gradients."""
        return self.skips and self._bad

    def look_at_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        if self.skips and not self._bad:
            self._bad = not _all_finite([gradient for gradient in gradients if gradient is not None])

    def skip(self) -> None:
        self._watch.skip()

    def passes(
        self, step: int, loss: torch.Tensor, features: Sequence[torch.Tensor], source: LabelSource, rows: int
    ) -> bool:
        """False if the loss is not finite and steps are skipped."""
        if loss.is_cuda and not self.skips:
            if not torch.cuda.is_current_stream_capturing():
                self.replayed(step, loss.detach(), source, rows)
            return True
        describe = lambda: (_first_rows(source, rows), self._oddity(features, source))  # noqa: E731
        if not self._watch.saw(step, loss.item(), describe):
            self._bad = True
        return not (self._bad and self.skips)

    def replayed(self, step: int, loss: torch.Tensor, source: LabelSource, rows: int) -> None:
        """Looks at it soon, without waiting for the GPU."""
        where = LabelSource((), (), source.where)  # which does not keep the batch
        self._watch.note(step, loss, lambda: (_first_rows(where, rows), ""), _values)

    def _oddity(self, features: Sequence[torch.Tensor], source: LabelSource) -> str:
        for place, feature in enumerate(features):
            if not feature.is_floating_point() or not len(feature):
                continue
            bad = ~torch.isfinite(feature.reshape(len(feature), -1)).all(dim=1)
            if bool(bad.any()):
                row = int(bad.int().argmax())
                name = repr(self._names[place]) if place < len(self._names) else f"input {place}"
                return f"Row {source.where(row)} has a value in {name} that is not finite."
        return ""


def _first_rows(source: LabelSource, rows: int) -> list[int | str]:
    return [source.where(row) for row in range(min(rows, _SHOWN_ROWS))]


def _values(losses: Sequence[torch.Tensor]) -> list[float]:
    values: list[float] = torch.stack([loss.float() for loss in losses]).tolist() if losses else []
    return values


def _all_finite(gradients: list[torch.Tensor]) -> bool:
    return not gradients or bool(
        torch.isfinite(torch.stack(private.foreach_norm(gradients, float("inf")))).all()
    )


def attributes_of(modules: Iterable[torch.nn.Module]) -> Undo:
    """Includes the lists, dicts and sets in modules' attributes."""
    before = [(module, dict(module.__dict__)) for module in modules]
    within = [
        (value, copy.copy(value))
        for _, attributes in before
        for value in attributes.values()
        if type(value) in (list, dict, set)
    ]

    def put_back() -> None:
        for value, kept in within:
            value.clear()
            value.extend(kept) if isinstance(value, list) else value.update(kept)
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)

    return put_back


def undo_parameter(parameter: torch.nn.Parameter) -> Undo:
    value, grad, learns = parameter.detach().clone(), parameter.grad, parameter.requires_grad
    held = None if grad is None else grad.detach().clone()

    def put_back() -> None:
        parameter.copy_(value)
        parameter.grad = None if grad is None else _given_back(grad, held)
        parameter.requires_grad_(learns)

    return put_back


def undo_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    states = {p: {name: _kept(v) for name, v in state.items()} for p, state in optimizer.state.items()}
    groups = [
        {name: _kept(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]

    def put_back() -> None:
        for parameter in [p for p in optimizer.state if p not in states]:
            del optimizer.state[parameter]
        for parameter, state in states.items():
            now = optimizer.state[parameter]
            optimizer.state[parameter] = {name: _given_back(now.get(name), v) for name, v in state.items()}
        del optimizer.param_groups[len(groups) :]
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            group.update({name: _given_back(group.get(name), value) for name, value in values.items()})

    return put_back


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _given_back(now: Any, kept: Any) -> Any:
    """Restores into the current tensor: others may hold it."""
    if isinstance(now, torch.Tensor) and isinstance(kept, torch.Tensor) and now.shape == kept.shape:
        return now.copy_(kept)
    return kept


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

    def listen(self, outputs: Any, targets: Tensors) -> bool:
        """On a made-up row, if the loss saw no others."""
        if self.gathers is None:
            with undrawn(self._device), torch.no_grad(), suppress(Exception):
                self._trial.listen(lambda: self._rule.tried(outputs, targets, 1, None))
        return bool(self.gathers)

    def __call__(self, outputs: Any, targets: Tensors, rows: int, weights: torch.Tensor | None) -> None:
        batch = (outputs, targets, weights)
        halves = any(_is_half(leaf) for leaf in private.tree_leaves(batch))
        difference: Difference | None = None
        # Again for a loss that cannot do with numbers of another precision than its own.
        for wide in (True, False) if halves else (True,):
            try:
                difference = self._difference(batch, rows, wide=wide)
            except Exception:  # noqa: BLE001 - the step itself shows what is wrong with the loss
                difference = None
            else:
                if difference is None or not difference.problem:
                    break
        if difference is not None:
            name = list(self._rule.unknown_parts())[difference.place]
            why, how = "several workers", _HOW_TO_GATHER
            if self._accumulates:
                why, how = "the passes of accumulation_steps", "train with accumulation_steps=1"
            hint = (
                f"{how}. If it is a mean over anything but rows, return one loss for each row or"
                " value, not reduced, or give it an attribute loss_divisor, a function of the same arguments"
                " that returns what it was divided by. A loss that has one is not checked."
            )
            raise refusal(difference, name, why=why, hint=hint)

    def _difference(self, batch: tuple[Any, Any, Any], rows: int, *, wide: bool) -> Difference | None:
        """`wide` is single precision: half precision is too coarse to compare."""

        def judge(chosen: list[int]) -> Sequence[tuple[float, float]]:
            taken = take_rows(batch, chosen, rows)
            if wide:
                taken = private.tree_map(lambda leaf: leaf.float() if _is_half(leaf) else leaf, taken)
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


class TriedModel:
    """Tries once or twice whether a loss that the model computes is the mean that the rule assumes."""

    def __init__(self, rule: ModelLoss, *, half: bool) -> None:
        self._rule, self._tolerance = rule, _HALF if half else 1e-3
        self._first = self._telling = not rule.declared

    @property
    def over(self) -> bool:
        return not (self._first or self._telling)

    def __call__(self, call: Callable[[Inputs], Any], inputs: Inputs, rows: int) -> None:
        telling = self._telling and self._rule.differ(inputs)
        if rows < 2 or not (self._first or telling):
            return
        self._first, self._telling = False, self._telling and not telling
        if len(chosen := self._rule.tried_rows(inputs, rows)) < 2:
            return

        def judge(places: list[int]) -> Sequence[tuple[float, float]]:
            taken = {name: tensor[[chosen[place] for place in places]] for name, tensor in inputs.items()}
            outputs = call(taken)
            divisor = self._rule.divisor(outputs, taken, len(places))
            loss = own_loss(outputs)
            return [] if loss is None else [(float(loss) * divisor, divisor)]

        trial = LossTrial(len(chosen), None, strict=False, row_by_row=True)
        difference = trial(judge, len(chosen), self._tolerance)
        if difference is not None:
            why, hint = "several workers, or the passes of accumulation_steps", _MODEL_HINT
            mean = "rows, or over the labels that are not ignored"
            raise refusal(difference, "loss='model': the loss", why=why, hint=hint, mean=mean)


class TriedStep:
    """The step is undone; what it minimizes is only noted.

    Leaf modules (BatchNorm, Dropout) are in evaluation mode meanwhile, so that only the loss is tried.
    `running`: the current step is a trial and must leave nothing behind.
    """

    def __init__(self, replica: StepReplica) -> None:
        self._replica = replica
        self._trial = LossTrial(_MOST_ROWS_OF_STEP, join, strict=False)
        self._noted: list[tuple[float, float]] = []
        self._declared = False
        self._rows = 0
        self.running = False

    def notes(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> bool:
        """A loss with a `weight` says what it is a mean over, and is not tried."""
        if self.running and weight is None:
            self._noted.append((float(loss.detach()) * self._rows, float(self._rows)))
        self._declared = self._declared or weight is not None
        return self.running

    def __call__(self, features: Tensors, labels: Tensors, rows: int) -> None:
        if self._trial.over:
            return
        undo = self._replica.undo()
        self.running = True
        try:
            with undrawn(self._replica.device):
                half = self._replica.spec.precision is not None
                difference = self._trial(
                    lambda chosen: self._losses(take_rows((features, labels), chosen, rows), len(chosen)),
                    rows,
                    _HALF if half else _OF_STEP,
                )
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - the step itself shows what is wrong with it
            difference = None
        finally:
            self.running = False
            undo()
        if difference is not None:
            place = difference.place
            loss = "the loss of the step" if place == 0 else f"loss {place + 1} of the step"
            raise refusal(difference, loss, why="several workers", hint=_STEP_HINT)

    def _losses(self, batch: tuple[Any, Any], rows: int) -> Sequence[tuple[float, float]]:
        replica = self._replica
        self._noted, self._declared, self._rows = [], False, rows
        replica.run.rows = replica.run.global_rows = rows
        buffers = replica.tracked.copies()
        attributes = attributes_of(replica.model.modules())
        for part in replica.model.modules():
            if next(part.children(), None) is None:
                part.training = False
        try:
            returned = replica.losses_of(*batch, rows)
        finally:
            attributes()
            replica.tracked.put_back(buffers)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not self._noted and not self._declared and isinstance(loss, torch.Tensor):
            self.notes(loss, None)
        return self._noted
