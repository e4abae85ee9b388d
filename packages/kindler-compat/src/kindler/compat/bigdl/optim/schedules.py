"""BigDL's learning-rate schedules, as functions of the number of steps made so far.

A rate is computed with the operations it is given, numpy's or TensorFlow's, so that the same formula is a
number here and a tensor in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kindler.compat.bigdl.arguments import Configured, arguments, classes
from kindler.errors import ConfigError

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the classes of the table


class Schedule(Configured, takes=arguments()):
    """Base class of schedules."""

    def setup(self) -> None:
        for name in ("max_iteration", "decay_step", "step_size", "iteration_per_epoch"):
            if name in vars(self):
                setattr(self, name, _whole(type(self).__name__, name, vars(self)[name]))

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        """The learning rate after so many steps, as a number of `ops`: numpy, or `tensorflow.compat.v1`.

        `base` and `decay` are the optimizer's, `start` is the step at which it took over from another one.
        """
        raise NotImplementedError


def _poly(o: Any, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
    """Steps are counted from the beginning of training, even after another schedule."""
    left = 1.0 - step / o.max_iteration
    power = ops.where(left > 0.0, left, left * 0.0 + 1.0) ** o.power
    return base * ops.where(left > 0.0, power, left * 0.0)


_TABLE: dict[str, Callable[..., Any]] = {
    "Default": lambda o, ops, base, decay, step, start=0: base / (1.0 + (step - start) * decay),
    "NaturalExp(decay_step, gamma)": lambda o, ops, base, decay, step, start=0: (
        base * ops.exp(-o.gamma * ops.floor((step - start) / o.decay_step))
    ),
    "Step(step_size, gamma)": lambda o, ops, base, decay, step, start=0: (
        base * o.gamma ** ops.floor((step - start) / o.step_size)
    ),
    # With whole exponents if `stair_case`.
    "Exponential(decay_step, decay_rate, stair_case=False)": lambda o, ops, base, decay, step, start=0: (
        base
        * o.decay_rate ** (ops.floor if o.stair_case else lambda steps: steps)((step - start) / o.decay_step)
    ),
    # `base * (1 - step / max_iteration) ** power`, and 0 after `max_iteration` steps.
    "Poly(power, max_iteration)": _poly,
    "Warmup(delta)": lambda o, ops, base, decay, step, start=0: base + o.delta * (step - start),
}
_ROWS = classes(__name__, Schedule, _TABLE, "rate")
globals().update(_ROWS)


class MultiStep(Schedule, takes=arguments("step_sizes, gamma")):
    """`base`, multiplied by `gamma` at each of `step_sizes`."""

    def setup(self) -> None:
        vars(self)["step_sizes"] = [_whole("MultiStep", "step_sizes", size) for size in self.step_sizes]

    def rate(self, ops: Any, base: Any, decay: float, step: Any, start: int = 0) -> Any:
        steps = step - start
        for size in self.step_sizes:
            base = base * ops.where(steps >= size, steps * 0.0 + self.gamma, steps * 0.0 + 1.0)
        return base


class SequentialSchedule(Schedule, takes=arguments("iteration_per_epoch")):
    """Schedules one after the other; each starts from the rate that the one before it reached.

    The last one goes on after its iterations.
    """

    def setup(self) -> None:
        super().setup()
        self._parts: list[tuple[Schedule, int]] = []

    def add(self, scheduler: Schedule, max_iteration: int, bigdl_type: str = "float") -> SequentialSchedule:
        """Append a schedule that is used for `max_iteration` steps."""
        if not isinstance(scheduler, Schedule):
            raise ConfigError(f"SequentialSchedule.add takes a schedule; received {scheduler!r}.")
        self._parts.append((scheduler, _whole("add", "max_iteration", max_iteration)))
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


def _whole(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ConfigError(f"{where}: {name} must be a whole number of at least 1; received {value!r}.")
    return int(value)


__all__ = ["MultiStep", "Schedule", "SequentialSchedule", *_ROWS]  # noqa: PLE0604 - names
