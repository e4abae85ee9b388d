"""Training steps as CUDA graphs: small models spend most of a step launching kernels.

Recorded is the whole step, or all of it up to the gradients where the rest needs Python: an exchange with
other workers, scaled losses, a rate that changes in each step, an optimizer that cannot be recorded. There is
a graph for each shape of batches. What Python decides (rates, which parameters are trained) is recorded, too:
if it changes, the graphs are thrown away.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_WARM_UP_STEPS = 3  # libraries choose their kernels, and optimizers make their state
_MOST_CAPTURES = 40
_MOST_SHAPES = 8
_UNTIMED_STEPS, _TIMED_STEPS = 6, 12  # of each way; a graph is recorded in the fourth or fifth
_SCALARS = (int, float, bool, str, type(None))
_OF_ALL = frozenset(vars(torch.nn.Module()))  # what every module has

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Attributes:
    made: What the recorded function returned; replaying writes its tensors anew.
    """

    graph: torch.cuda.CUDAGraph
    columns: Tensors
    made: Any

    def replay(self, columns: Tensors) -> None:
        for place, rows in zip(self.columns, columns, strict=True):
            place.copy_(rows, non_blocking=True)
        self.graph.replay()


class GraphedStep:
    """`problem` says why there is no graph, once tried."""

    problem: str | None = None

    def __init__(
        self,
        compute: Callable[[Tensors, Tensors], Any],
        facts: Callable[[], Hashable],
        in_python: Callable[[], Any],
    ) -> None:
        self._compute, self._facts, self._in_python = compute, facts, in_python
        self._recordings: dict[Hashable, Recording] = {}
        self._known: Hashable = None
        self._met: set[Hashable] = set()
        self._steps = self._captures = 0

    def run(self, features: Tensors, labels: Tensors, decided: Hashable) -> tuple[bool, Any]:
        """Whether a recording was replayed, and what the function has returned, now or when it was recorded.

        `decided` is what else differs from batch to batch; a batch is recorded when one like it was seen.
        """
        key = _shapes(features, labels), decided
        if self._steps < _WARM_UP_STEPS:
            self._met.add(key)
            return False, self._warm_up(features, labels)
        if self.problem is not None:
            return False, self._alone(features, labels)
        if (facts := self._facts()) != self._known:
            self._known = facts
            self._recordings.clear()
        recording = self._recordings.get(key)
        if recording is None:
            if key in self._met and self._captures < _MOST_CAPTURES:
                recording = self._captured(features, labels)
            if recording is None:
                if len(self._met) < _MOST_SHAPES:
                    self._met.add(key)
                return False, self._alone(features, labels)
            self._recordings[key] = recording
        recording.replay((*features, *labels))
        return True, recording.made

    def _warm_up(self, features: Tensors, labels: Tensors) -> Any:
        before = self._in_python()
        made = self._alone(features, labels)
        self._steps += 1
        if self._in_python() != before:
            self.problem = "the model draws random numbers in Python, or changes its own numbers in each step"
        return made

    def _alone(self, features: Tensors, labels: Tensors) -> Any:
        """On a side stream, as recording needs it."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            made = self._compute(features, labels)
        current.wait_stream(side)
        return made

    def _captured(self, features: Tensors, labels: Tensors) -> Recording | None:
        """Does not run the step; None if it cannot be recorded."""
        columns = tuple(tensor.clone() for tensor in (*features, *labels))
        graph = torch.cuda.CUDAGraph()
        pool = next((each.graph.pool() for each in self._recordings.values()), None)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.clone_state()
        try:
            # Other threads (those that make batches) may go on meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                made = self._compute(columns[: len(features)], columns[len(features) :])
        except RuntimeError as exc:
            generator.graphsafe_set_state(drawn)  # it would go on as if it were recorded
            self.problem = (
                "something in the model, its loss or its metrics reads a value back from the GPU (.item(), an"
                f" if on a tensor, indexing with a mask): {str(exc).partition(chr(10))[0]}"
            )
            return None
        self._captures += 1
        return Recording(graph, columns, made)


@dataclass(frozen=True, slots=True)
class Way:
    """How steps are computed."""

    compiled: bool = False
    recorded: bool = False

    def __str__(self) -> str:
        return " of ".join(["graphs"] * self.recorded + ["torch.compile"] * self.compiled) or "eager"


class FastestWay:
    """Which way to compute steps: some steps in each, then the fastest.

    Attributes:
        now: The way of the next step.
        over: Whether it stays.
    """

    def __init__(
        self,
        *,
        records: bool,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[], None] = torch.cuda.synchronize,
    ) -> None:
        self._left = [
            Way(compiled, recorded)
            for compiled in (False, True)
            for recorded in ((False, True) if records else (False,))
        ]
        self._clock, self._wait = clock, wait
        self._took: dict[Way, float] = {}
        self._steps, self._seconds, self._rows = 0, 0.0, 0
        self.now, self.over = self._left.pop(0), False

    @contextmanager
    def timed(self, rows: int) -> Iterator[None]:
        """Around a step. The first batch says how many rows count; shorter ones are not compared."""
        self._rows = self._rows or rows
        counts = rows == self._rows and self._steps >= _UNTIMED_STEPS
        if counts:
            self._wait()
        began = self._clock()
        yield
        if counts:
            self._wait()
            self._seconds += self._clock() - began
        self._steps += rows == self._rows
        if self._steps == _UNTIMED_STEPS + _TIMED_STEPS:
            self._took[self.now] = self._seconds
            self._next()

    def give_up(self, *, recorded: bool = False, compiled: bool = False) -> None:
        """Steps cannot be recorded, or the model cannot be compiled."""
        out = {way for way in (self.now, *self._left) if way.recorded & recorded | way.compiled & compiled}
        self._left = [way for way in self._left if way not in out]
        if self.now in out:
            self._next()

    def _next(self) -> None:
        self._steps, self._seconds = 0, 0.0
        if self._left:
            self.now = self._left.pop(0)
        else:
            self.now, self.over = min(self._took, key=self._took.__getitem__), True


def set_capturable(optimizer: torch.optim.Optimizer, device: torch.device, *, wanted: bool) -> None:
    """A loaded state brings the option along from where it was saved."""
    for group in optimizer.param_groups:
        # Where it is kept although it is not wanted, the state is where it demands it to be.
        if "capturable" in group and (wanted or device.type == "cpu" or group.get("fused")):
            group["capturable"] = wanted and device.type == "cuda"


def why_not(
    spec: Any,
    device: torch.device,
    *,
    gathers: bool,
    divided: bool,
    skips: bool = False,
) -> str | None:
    reasons = {
        f"the device is {device.type}": device.type != "cuda",
        "strategy='fsdp' gathers parameters in each step": divided,
        "with process_group=True the model may exchange values with other workers": spec.process_group,
        "the loss is your own and may gather rows of other workers": gathers,
        "the model computes its own loss": isinstance(spec.loss, str),
        "there are several losses": isinstance(spec.loss, list | tuple | dict),
        "nan_loss='skip' decides in Python whether a step counts": skips,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def moves_in_graph(spec: Any, optimizer: torch.optim.Optimizer, *, exchanged: bool) -> bool:
    """Whether the optimizer's step can be recorded, too."""
    in_steps = spec.scheduler is not None and spec.scheduler_step == "step"
    known = (
        all("capturable" in group for group in optimizer.param_groups) or type(optimizer) is torch.optim.SGD
    )
    return known and not (exchanged or in_steps or spec.precision == "fp16")


def facts_of(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None) -> Hashable:
    """What a recording holds on to; `optimizer` is None if its step is not in it."""
    weights = tuple((p.data_ptr(), p.requires_grad) for p in parameters)
    groups = [] if optimizer is None else optimizer.param_groups
    numbers = tuple(
        tuple((key, value) for key, value in group.items() if _is_plain(value)) for group in groups
    )
    return weights, numbers


def numbers_in_python(*modules: torch.nn.Module) -> Any:
    kept = [
        {name: repr(value) for name, value in vars(part).items() if name not in _OF_ALL and _is_plain(value)}
        for module in modules
        for part in module.modules()
    ]
    drawn: Any = np.random.get_state()
    return kept, random.getstate(), drawn[1].tobytes(), drawn[2], torch.get_rng_state().numpy().tobytes()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _SCALARS)


def _shapes(features: Tensors, labels: Tensors) -> Hashable:
    return tuple((tensor.shape, tensor.dtype) for tensor in (*features, *labels)), len(features)
