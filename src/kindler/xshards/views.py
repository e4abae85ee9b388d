"""Shards of arrays as flat, named columns: what a model's inputs and targets are fed from.

shard                       columns
{"x": a, "y": b}            x, y
{"x": (a, b), "y": c}       x_0, x_1, y          (lists alike)
{"x": {"p": a}, "y": b}     p, y
(a, b)                      x, y
a                           x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kindler.data.columns import Array
from kindler.data.shards.codec import Info, Packed, column_to_array, leaves
from kindler.errors import DataError

__all__ = ["ArrayColumn", "RowFile", "array_columns", "row_file"]


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """One array of every shard.

    Attributes:
        name: Its flat name.
        role: Whether it is an input or a target; dicts with other keys than x and y have inputs only.
        stored: Its column in the shards' tables.
        dtype: Of its values, as numpy writes it.
        shape: Of a row.
    """

    name: str
    role: Literal["feature", "label"]
    stored: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowFile:
    """The arrays of one shard by name, all of `rows` rows: read-only views where the shard is a file."""

    rows: int
    arrays: dict[str, Array]


def array_columns(infos: Sequence[Info]) -> list[ArrayColumn]:
    """The columns of shards of arrays, which must be the same for all of them."""
    found: list[ArrayColumn] | None = None
    for number, info in enumerate(infos):
        if info.kind != "arrays":
            raise DataError(
                f"shard {number} is a {info.name}, and arrays are needed.\n"
                "Hint: shards of dicts like {'x': array, 'y': array}, of tuples (x, y), or of arrays."
            )
        columns = [_column(*leaf) for leaf in leaves(info.schema)]
        if found is not None and columns != found:
            odd = next((c for c, f in zip(columns, found, strict=False) if c != f), columns[-1])
            raise DataError(
                f"shard {number} has {odd.dtype} of shape {odd.shape}, which is not what shard 0 has.",
                column=odd.name,
            )
        found = columns
    return found or []


def row_file(packed: Packed, columns: Sequence[ArrayColumn]) -> RowFile:
    """A shard's arrays; nothing is copied that lies in one piece."""
    arrays = {}
    for column in columns:
        arrays[column.name] = column_to_array(packed, column.stored, column.dtype, column.shape)
        arrays[column.name].flags.writeable = False
    return RowFile(packed.info.rows, arrays)


def _column(path: tuple[Any, ...], stored: str, dtype: str, shape: tuple[int, ...]) -> ArrayColumn:
    head: Any = path[0] if path else 0
    rest = path[1:]
    if isinstance(head, int):  # a tuple of inputs and targets, or an array alone
        head = ("x", "y")[head] if head < 2 else f"x_{head}"
    role: Literal["feature", "label"] = "label" if head == "y" else "feature"
    inner_key = next((part for part in reversed(rest) if isinstance(part, str)), None)
    if inner_key is not None:
        numbers = [str(part) for part in rest[rest.index(inner_key) + 1 :]]
        return ArrayColumn("_".join([inner_key, *numbers]), role, stored, dtype, shape)
    return ArrayColumn("_".join([head, *map(str, rest)]), role, stored, dtype, shape)
