"""Tries once, on the first rows, whether the losses of parts of a batch make up the loss of the whole.

Workers and the passes of `accumulation_steps` each see part of a step's rows, which suits only a loss that is
a mean or sum over rows. Two uneven parts play the workers; `all_gather` in one returns the tensors of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kindler.collective import gathering
from kindler.errors import ConfigError

# For these rows: of each loss its sum, and what the sum is divided by to give the mean.
Judge: TypeAlias = Callable[[list[int]], Sequence[tuple[float, float]]]

_ATTEMPTS = 4  # batches that are looked at until one of them tells something
_DRAWS = 8  # of a loss that draws random numbers
_DEVIATIONS = 8.0


@dataclass(frozen=True, slots=True)
class Difference:
    """`rows` counts all rows and those of each part; `problem` is the error that a part raised, if any."""

    place: int
    rows: tuple[int, ...]
    whole: float = math.nan
    parts: float = math.nan
    problem: str = ""


class LossTrial:
    """Tries a loss on batches until one is conclusive; `gathers` is None until the loss was called."""

    def __init__(
        self,
        most_rows: int,
        join: Callable[[list[Any]], Any] | None,
        *,
        strict: bool = True,
        row_by_row: bool = False,
    ) -> None:
        self.most_rows, self._join, self._strict, self._row_by_row = most_rows, join, strict, row_by_row
        self._left = _ATTEMPTS
        self.gathers: bool | None = None

    @property
    def over(self) -> bool:
        return self._left <= 0

    def __call__(self, judge: Judge, rows: int, tolerance: float) -> Difference | None:
        self._left -= 1
        chosen = list(range(min(rows, self.most_rows)))
        try:
            whole = self._alone(judge, chosen)
        except Exception:
            if len(chosen) == rows:
                raise
            chosen = list(range(rows))
            whole = self._alone(judge, chosen)
        parts = [chosen[::3], [row for row in chosen if row % 3]]
        if self._row_by_row:
            parts = [[row] for row in chosen]
        counts = (len(chosen), *map(len, parts))
        again = self._alone(judge, chosen)
        finite = all(weight and math.isfinite(total / weight) for total, weight in whole)
        if not all(parts) or not whole or not finite or len(whole) != len(again):
            return None
        try:
            several = [self._together(judge, parts)]
            random = whole != again
            if random:
                several += [self._together(judge, parts) for _ in range(_DRAWS - 1)]
        except Exception as exc:  # noqa: BLE001 - the user's loss: whatever it does not do for fewer rows
            if not self._strict or min(counts) < 2:
                return None
            return Difference(0, counts, problem=f"{type(exc).__name__}: {exc}".partition("\n")[0])
        wholes = [whole, again]
        if random:
            wholes += [self._alone(judge, chosen) for _ in range(_DRAWS - 2)]
        if any(len(found) != len(whole) for found in (*wholes, *(part for one in several for part in one))):
            return None  # it does other things for other rows
        telling = False
        for place in range(len(whole)):
            mean = [_mean([found[place]]) for found in wholes]
            joined = [_mean([part[place] for part in found]) for found in several]
            sizes = [*mean, *(_mean([part[place]]) for found in several for part in found)]
            largest = max((abs(size) for size in sizes if math.isfinite(size)), default=0.0)
            off = abs(_average(joined) - _average(mean))
            if not off <= tolerance * largest + 1e-7 + _noise(mean) + _noise(joined):
                return Difference(place, counts, _average(mean), _average(joined))
            telling = telling or largest > 0
        if telling:
            self._left = 0
        return None

    def listen(self, call: Callable[[], Any]) -> None:
        """Only notes whether this call gathers: its rows are unknown."""
        self._alone(lambda _: call(), [])

    def _alone(self, judge: Judge, rows: list[int]) -> Sequence[tuple[float, float]]:
        def gather(tensor: Any) -> Any:
            self.gathers = True
            return tensor

        self.gathers = bool(self.gathers)
        with gathering(gather):
            return judge(rows)

    def _together(self, judge: Judge, parts: list[list[int]]) -> list[Sequence[tuple[float, float]]]:
        """`all_gather` returns the tensors of all parts."""
        if self._join is None:
            return [self._alone(judge, part) for part in parts]
        gathered: list[Any] = []
        while True:
            found, met = [], []
            for part in parts:
                try:
                    with gathering(_Stage(gathered)):
                        found.append(judge(part))
                except _Met as exc:
                    met.append(exc.tensor)
            if len(found) == len(parts):
                return found
            if found:
                raise ConfigError("some workers call all_gather more often than others.")
            gathered.append(self._join(met))


class _Met(BaseException):
    """Ends a call that gathers before the other parts have got there; re-run once they have."""

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.tensor = tensor


class _Stage:
    def __init__(self, gathered: Sequence[Any]) -> None:
        self._gathered = list(gathered)

    def __call__(self, tensor: Any) -> Any:
        if not self._gathered:
            raise _Met(tensor)
        return self._gathered.pop(0)


def refusal(difference: Difference, loss: str, *, why: str, hint: str, mean: str = "rows") -> ConfigError:
    rows, *parts = difference.rows
    if difference.problem:
        some = " or ".join(map(str, parts))
        cause = f"{loss} can be computed for {rows} rows, but not for {some} of them ({difference.problem})"
    else:
        some = "each" if set(parts) == {1} else " and of ".join(map(str, parts))
        cause = (
            f"{loss} of {rows} rows together is {difference.whole:.6g}, and that of {some} of them, taken"
            f" together by what each counts for, is {difference.parts:.6g}"
        )
    return ConfigError(
        f"{cause}: it is not a mean over {mean}, so {why}, which see a part of a step's rows each, would "
        f"not train what one worker does.\nHint: {hint}"
    )


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    counted = [(total, weight) for total, weight in parts if weight]
    return sum(total for total, _ in counted) / sum(weight for _, weight in counted) if counted else math.nan


def _average(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _noise(numbers: Sequence[float]) -> float:
    """How far the mean of the draws may be from its expectation."""
    if len(numbers) <= 2:
        return 0.0
    mean = _average(numbers)
    spread = math.sqrt(sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))
    return _DEVIATIONS * spread / math.sqrt(len(numbers))
