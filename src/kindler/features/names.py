"""Which columns go in and which come out. Pure: the user's words checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kindler.errors import ConfigError

Names: TypeAlias = "str | Sequence[str]"


def input_names(input_col: Names | None, who: str) -> tuple[str, ...]:
    """The columns that go in.

    >>> input_names("a", "StringIndexer"), input_names(["a", "b"], "StringIndexer")
    (('a',), ('a', 'b'))
    """
    names = (input_col,) if isinstance(input_col, str) else tuple(input_col or ())
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{who}(inputCol={input_col!r}): must be a column name, or a list of them.")
    _refuse_twice(names, f"{who}(inputCol=...)")
    return names


def output_names(output_col: Names | None, inputs: Sequence[str], who: str) -> tuple[str, ...]:
    """The columns that come out, one for each that goes in; without names those are replaced."""
    if output_col is None:
        return tuple(inputs)
    names = (output_col,) if isinstance(output_col, str) else tuple(output_col)
    if len(names) != len(inputs):
        raise ConfigError(
            f"{who}: {len(inputs)} input columns, but outputCol={output_col!r} names {len(names)}."
        )
    _refuse_twice(names, f"{who}(outputCol=...)")
    return names


def _refuse_twice(names: Sequence[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: {twice} more than once.")
