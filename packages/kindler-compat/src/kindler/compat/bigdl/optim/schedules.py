"""BigDL's learning-rate schedules, as functions of the number of steps made so far.

A rate is computed with the operations it is given, numpy's or TensorFlow's, so that the same formula is a
number here and a tensor in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kindler.errors import ConfigError

__all__ = [
    "Default",
    "Exponential",
    "MultiStep",
    "NaturalExp",
    "Poly",
    "Schedule",
    "SequentialSchedule",
    "Step",
    "Warmup",
]


class Schedule:
    """Base class of schedules."""

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        """The learning rate of a step.

        Args:
            ops: A module with `exp`, `floor` and `where`: numpy, or `tensorflow.compat.v1`.
            base: The optimizer's learning rate.
            decay: The optimizer's `learningrate_decay`, which only `Default` uses.
            step: Steps made before this one, as a floating-point number.
            start: The step at which this schedule took over from another one.
        """
        raise NotImplementedError


class Default(Schedule):
    """`base / (1 + step * learningrate_decay)`."""

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        return base / (1.0 + (step - start) * decay)


class Poly(Schedule):
    """`base * (1 - step / max_iteration) ** power`, and 0 after `max_iteration` steps.

    Steps are counted from the beginning of training, even after another schedule.
    """

    def __init__(self, power: float, max_iteration: int, bigdl_type: str = "float") -> None:
        self.power, self.max_iteration = float(power), _positive("Poly", "max_iteration", max_iteration)

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        left = 1.0 - step / self.max_iteration
        return base * ops.where(
            left > 0.0, ops.where(left > 0.0, left, left * 0.0 + 1.0) ** self.power, left * 0.0
        )


class Exponential(Schedule):
    """`base * decay_rate ** (step / decay_step)`, with whole exponents if `stair_case`."""

    def __init__(
        self, decay_step: int, decay_rate: float, stair_case: bool = False, bigdl_type: str = "float"
    ) -> None:
        self.decay_step = _positive("Exponential", "decay_step", decay_step)
        self.decay_rate, self.stair_case = float(decay_rate), stair_case

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        exponent = (step - start) / self.decay_step
        return base * self.decay_rate ** (ops.floor(exponent) if self.stair_case else exponent)


class NaturalExp(Schedule):
    """`base * exp(-gamma * floor(step / decay_step))`."""

    def __init__(self, decay_step: int, gamma: float, bigdl_type: str = "float") -> None:
        self.decay_step, self.gamma = _positive("NaturalExp", "decay_step", decay_step), float(gamma)

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        return base * ops.exp(-self.gamma * ops.floor((step - start) / self.decay_step))


class Step(Schedule):
    """`base * gamma ** floor(step / step_size)`."""

    def __init__(self, step_size: int, gamma: float, bigdl_type: str = "float") -> None:
        self.step_size, self.gamma = _positive("Step", "step_size", step_size), float(gamma)

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        return base * self.gamma ** ops.floor((step - start) / self.step_size)


class MultiStep(Schedule):
    """`base`, multiplied by `gamma` at each of `step_sizes`."""

    def __init__(self, step_sizes: Sequence[int], gamma: float, bigdl_type: str = "float") -> None:
        self.step_sizes = [_positive("MultiStep", "step_sizes", size) for size in step_sizes]
        self.gamma = float(gamma)

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        made = step - start
        for size in self.step_sizes:
            base = base * ops.where(made >= size, made * 0.0 + self.gamma, made * 0.0 + 1.0)
        return base


class Warmup(Schedule):
    """`base + delta * step`."""

    def __init__(self, delta: float, bigdl_type: str = "float") -> None:
        self.delta = float(delta)

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        return base + self.delta * (step - start)


class SequentialSchedule(Schedule):
    """Schedules one after the other; each starts from the rate that the one before it reached.

    The last one goes on after its iterations.
    """

    def __init__(self, iteration_per_epoch: int, bigdl_type: str = "float") -> None:
        self.iteration_per_epoch = _positive("SequentialSchedule", "iteration_per_epoch", iteration_per_epoch)
        self._parts: list[tuple[Schedule, int]] = []

    def add(self, scheduler: Schedule, max_iteration: int, bigdl_type: str = "float") -> SequentialSchedule:
        """Append a schedule that is used for `max_iteration` steps."""
        if not isinstance(scheduler, Schedule):
            raise ConfigError(f"SequentialSchedule.add takes a schedule; received {scheduler!r}.")
        self._parts.append((scheduler, _positive("add", "max_iteration", max_iteration)))
        return self

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        if not self._parts:
            raise ConfigError(
                "SequentialSchedule has no schedules.\nHint: SequentialSchedule(...).add(Step(...), 100)."
            )
        rate: Any = None
        for schedule, iterations in self._parts:
            current = schedule.rate(ops, base, decay, step, start)
            rate = current if rate is None else ops.where(step > start, current, rate)
            end = step * 0.0 + float(start + iterations)
            base = schedule.rate(ops, base, decay, end, start)
            start += iterations
        return rate


def _positive(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ConfigError(f"{where}: {name} must be a whole number of at least 1; received {value!r}.")
    return int(value)
