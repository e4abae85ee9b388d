"""Whether rows of several requests may share a call: only if every row's outputs are its own.

Shapes alone cannot show that. An output without rows may be as long as the batch by chance, and a softmax
over the batch has the right shape. So a model is tried: rows are computed apart, together, and together in
the opposite order, and must come out the same each time. What a model does only for values that were not
tried stays unknown; the switch that turns batching off per model is for those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.models.signature import Array, Arrays

_CLOSE, _NEAR_ZERO = 1e-3, 1e-5  # calls of different sizes differ in their last bits


@dataclass(frozen=True, slots=True)
class Trial:
    """How a model did on some rows.

    Attributes:
        per_row: True: every row's outputs are its own. False: they are not. None: these rows cannot tell.
        first: The outputs of the first rows alone.
        second: The outputs of the other rows alone.
    """

    per_row: bool | None
    first: Arrays
    second: Arrays


def free_rows(inputs: Iterable[Sequence[Any] | None], outputs: Iterable[Sequence[Any] | None]) -> bool:
    """Whether a model declares the same free first dimension for all its inputs and outputs.

    Args:
        inputs: The declared shape of each; a free length is None or a name. None if a shape is not known.
        outputs: The same of the outputs.

    >>> free_rows([["n", 3]], [["n", 2], ["n"]]), free_rows([["n", 3]], [[4]]), free_rows([[None]], [[]])
    (True, False, False)
    """
    firsts = [shape[0] if shape else 0 for shape in (*inputs, *outputs)]
    return bool(firsts) and not any(isinstance(n, int) for n in firsts) and len(set(firsts)) == 1


def tried(call: Callable[[Arrays], Arrays], rows: Arrays, first: int) -> Trial:
    """Call a model on the first rows, on the others, and, if need be, on all of them in both orders."""
    count = len(next(iter(rows.values())))
    ours = call({name: array[:first] for name, array in rows.items()})
    theirs = call({name: array[first:] for name, array in rows.items()})
    if not _has_rows(ours, first) or not _has_rows(theirs, count - first) or ours.keys() != theirs.keys():
        return Trial(False, ours, theirs)
    if all(_same(array, array[::-1], exact=True) for array in rows.values()):
        return Trial(None, ours, theirs)
    apart = {name: np.concatenate([ours[name], theirs[name]]) for name in ours}
    try:
        together = call(rows)
        turned = call({name: np.ascontiguousarray(array[::-1]) for name, array in rows.items()})
    except Exception:  # noqa: BLE001 - it takes the rows apart and not together: that is the answer
        return Trial(False, ours, theirs)
    same = _all_same(apart, together) and _all_same(apart, {n: a[::-1] for n, a in turned.items() if a.ndim})
    if same and not all(_is_finite(array) for array in apart.values()):
        return Trial(None, ours, theirs)  # NaN is equal to NaN whatever it comes from
    return Trial(same, ours, theirs)


def _has_rows(outputs: Arrays, rows: int) -> bool:
    return all(array.ndim and len(array) == rows for array in outputs.values())


def _all_same(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(left: Array, right: Array, *, exact: bool = False) -> bool:
    if left.shape != right.shape:
        return False
    if exact or left.dtype.kind not in "fc" or right.dtype.kind not in "fc":
        return bool(np.array_equal(left, right))
    largest = float(np.max(np.abs(left), initial=0.0, where=np.isfinite(left)))
    return bool(np.allclose(left, right, rtol=_CLOSE, atol=_NEAR_ZERO * largest, equal_nan=True))


def _is_finite(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
