"""Checks label values before the loss sees them, and names column and row.

Frameworks would truncate 0.5 to class 0, answer an unknown class with an IndexError, by ending the process
(on a GPU) or not at all, and train on a probability of 7. Arrays are checked, so no GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import DataError


@dataclass(frozen=True, slots=True)
class LabelSource:
    """`where` names a row of the batch in complaints."""

    arrays: tuple[Array, ...]
    names: tuple[str, ...]
    where: Callable[[int], int | str]

    def part(self, start: int, stop: int) -> LabelSource:
        arrays = tuple(array[start:stop] for array in self.arrays)
        return LabelSource(arrays, self.names, lambda row: self.where(start + row))


def refuse_non_classes(source: LabelSource, place: int, *, classes: int | None, ignored: int | None) -> bool:
    """False if some labels are the ignored value."""
    values = source.arrays[place]
    if not values.size:
        return True
    low, high = values.min(), values.max()
    most = np.inf if classes is None else classes
    whole = values.dtype.kind != "f" or bool((values == np.floor(values)).all())
    if whole and low >= 0 and high < most:
        return ignored is None or not 0 <= ignored < most or not bool((values == ignored).any())
    with np.errstate(invalid="ignore"):
        fits = (values >= 0) & (values < most) & (values == np.floor(values))
    kept = fits if ignored is None else fits | (values == ignored)
    _complain(source, place, ~kept, lambda value: _class_complaint(value, classes, ignored))
    return False


def refuse_non_probabilities(source: LabelSource, place: int) -> None:
    values = source.arrays[place]
    if not values.size or values.dtype.kind == "b" or (values.min() >= 0 and values.max() <= 1):
        return
    with np.errstate(invalid="ignore"):
        bad = ~((values >= 0) & (values <= 1))
    _complain(
        source,
        place,
        bad,
        lambda value: (
            f"is {value}; this loss needs labels from 0 to 1.\n"
            "Hint: labels of two classes are 0 and 1; for other numbers use a regression loss."
        ),
    )


def _complain(source: LabelSource, place: int, bad: Array, problem: Callable[[Any], str]) -> None:
    if not bad.any():
        return
    position = int(bad.reshape(-1).argmax())
    row = position // max(1, bad.size // len(bad))
    name = source.names[place] if place < len(source.names) else None
    value = source.arrays[place].reshape(-1)[position]
    raise DataError(problem(value), column=name, row=source.where(row))


def _class_complaint(value: Any, classes: int | None, ignored: int | None) -> str:
    if np.isnan(value):
        return "is NaN; this loss needs class numbers.\nHint: fill or drop such rows first."
    meant = "whole numbers from 0" + ("" if classes is None else f" to {classes - 1}")
    if value != np.floor(value):
        return (
            f"is {value}, which is not a class number: this loss needs {meant}.\n"
            "Hint: number the classes 0, 1, 2, ...; for measured values use a regression loss."
        )
    hint = "Hint: number the classes from 0, and give the model's last layer one output per class."
    if value < 0 and ignored is not None:
        hint = f"Hint: mark targets that are not to count with {ignored}, which the loss ignores."
    if classes is None:
        return f"is {value}: class numbers must be {meant}.\n{hint}"
    kept = f" (or {ignored}, which is ignored)" if ignored is not None and ignored >= 0 else ""
    return (
        f"is {value}, but the model's output has {classes} classes:"
        f" labels must be from 0 to {classes - 1}{kept}.\n{hint}"
    )
