"""Shards of arrays as flat, named columns: what a model's inputs and targets are fed from.

shard                       columns
{"x": a, "y": b}            x, y
{"x": (a, b), "y": c}       x0, x1, y            (lists too)
{"x": {"p": a}, "y": b}     p, y
(a, b)                      x, y
a                           x
{"p": a, "q": b}            p, q                 (neither inputs nor targets until somebody says so)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kindler.data.shards.codec import Info, leaves
from kindler.errors import DataError

_ROLES: dict[str, Literal["feature", "label"]] = {"x": "feature", "y": "label"}


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """One array of every shard.

    Attributes:
        name: Its flat name.
        role: Whether it is an input or a target, or None where the shard does not say.
        stored: Its column in the shards' tables.
        dtype: Of its values, as numpy writes it.
        shape: Of a row.
    """

    name: str
    role: Literal["feature", "label"] | None
    stored: str
    dtype: str
    shape: tuple[int, ...]


def array_columns(infos: Sequence[Info]) -> list[ArrayColumn]:
    """The columns of shards of arrays, which must be the same for all that have rows."""
    # Without rows, a dtype says nothing.
    known_infos = [(number, info) for number, info in enumerate(infos) if info.rows] or [(0, infos[0])]
    first, known = known_infos[0][0], columns_of(known_infos[0][1])
    for number, info in known_infos:
        if info.kind != "arrays":
            raise DataError(
                f"shard {number} is a {info.name}, and arrays are expected.\n"
                "Hint: shards of dicts like {'x': array, 'y': array}, of tuples (x, y), or of arrays."
            )
        if odd := _different(columns_of(info), known):
            raise DataError(f"shard {number} has {odd[0]}, and shard {first} has {odd[1]}.", column=odd[2])
    return known


def columns_of(info: Info) -> list[ArrayColumn]:
    """The columns of one shard; a shard of anything else than arrays has none."""
    return [_column(*leaf) for leaf in leaves(info.schema)] if info.kind == "arrays" else []


def _different(these: Sequence[ArrayColumn], known: Sequence[ArrayColumn]) -> tuple[str, str, str] | None:
    """What one shard has and the other has instead, and of which column; None if there is no difference."""
    ours, theirs = ({c.name: c for c in columns} for columns in (these, known))
    for name in [*theirs, *ours]:
        here, there = _said(ours.get(name)), _said(theirs.get(name))
        if here != there:
            return here, there, name
    return None


def _said(column: ArrayColumn | None) -> str:
    return "none" if column is None else f"{np.dtype(column.dtype).name} of shape {column.shape}"


def _column(path: tuple[Any, ...], stored: str, dtype: str, shape: tuple[int, ...]) -> ArrayColumn:
    head: Any = path[0] if path else 0
    rest = path[1:]
    if isinstance(head, int):  # a tuple of inputs and targets, or an array alone
        head = ("x", "y")[head] if head < 2 else f"z{head}"
    role = _ROLES.get(head)
    keys = [i for i, part in enumerate(rest) if isinstance(part, str)]
    if keys:
        head, rest = rest[keys[-1]], rest[keys[-1] + 1 :]
    numbers = "_".join(map(str, rest))
    name = f"{head}_{numbers}" if keys and rest else f"{head}{numbers}"
    return ArrayColumn(name, role, stored, dtype, shape)
