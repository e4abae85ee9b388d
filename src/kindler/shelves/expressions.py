"""What may follow a dataset's name: columns, arguments of a function, and an operation. Pure text.

`iris[a,b]`, `iris[a:c]` and `iris[^a]` are columns, `rows{n=3}` calls a stored function with arguments,
`iris#rows:start=2,end=4` and `iris#iterchunks:chunksize=10` are parts of a table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kindler.errors import ConfigError

_FORM = re.compile(
    r"(?P<name>[^\[\]{}#@^]+)(?P<first>[@^][^\[\]{}#]*)?"
    r"(?:\[(?P<columns>[^\[\]{}#]*)\])?(?P<second>[@^][^\[\]{}#]*)?"
    r"(?:\{(?P<arguments>[^\[\]{}]*)\})?(?:#(?P<operation>\w*)(?::(?P<options>.*))?)?",
    re.DOTALL,
)
_FORMS = "name[a,b], name[a:c], name[^a], name{k=v}, name#iterchunks:chunksize=10, name#rows:start=2,end=4"
_OPERATIONS = ("iterchunks", "rows")


@dataclass(frozen=True, slots=True)
class Expression:
    """A dataset, and which part of it."""

    name: str  # may say which version
    columns: str | None = None  # what stood in brackets
    arguments: dict[str, str] = field(default_factory=dict)  # what stood in braces
    operation: str | None = None  # "iterchunks" or "rows"
    options: dict[str, int] = field(default_factory=dict)

    def chosen(self, available: Sequence[str]) -> list[str] | None:
        """The columns that are meant, in the order in which they were named; None for all.

        >>> parse_expression("iris[b:]").chosen(["a", "b", "c"])
        ['b', 'c']
        """
        if self.columns is None:
            return None
        text, columns = self.columns.strip(), [str(name) for name in available]
        if text.startswith("^"):
            others = self._known(text[1:].split(","), columns)
            return [name for name in columns if name not in others]
        if ":" in text:
            first, _, last = (part.strip() for part in text.partition(":"))
            ends = self._known([name for name in (first, last) if name], columns)
            start = columns.index(first) if first else 0
            stop = columns.index(last) + 1 if last else len(columns)
            if start >= stop and ends:
                raise ConfigError(f"{self.name}[{self.columns}]: {last!r} comes before {first!r}.")
            return columns[start:stop]
        return self._known(text.split(","), columns)

    def _known(self, names: Sequence[str], columns: Sequence[str]) -> list[str]:
        wanted = [name.strip() for name in names if name.strip()]
        missing = [name for name in wanted if name not in columns]
        if missing or (not wanted and ":" not in str(self.columns)):
            raise ConfigError(
                f"{self.name}[{self.columns}] selects the columns {missing or wanted};"
                f" available: {', '.join(columns) or 'none'}."
            )
        return wanted


def parse_expression(text: str) -> Expression:
    """Read a name and what follows it.

    >>> parse_expression("iris@prod[a]#rows:start=2,end=4")
    Expression(name='iris@prod', columns='a', arguments={}, operation='rows', options={'start': 2, 'end': 4})
    """
    match = _FORM.fullmatch(text)
    if match is None or (match["first"] and match["second"]):
        raise ConfigError(f"{text!r} is not the name of a dataset.\nHint: use {_FORMS}.")
    operation = match["operation"]
    if operation not in (None, "", *_OPERATIONS):
        raise ConfigError(f"{text!r}: unknown operation {operation!r}; available: {', '.join(_OPERATIONS)}.")
    name = match["name"] + (match["first"] or match["second"] or "")
    return Expression(
        name,
        match["columns"],
        _pairs(text, match["arguments"]),
        "iterchunks" if operation == "" else operation,
        {key: _number(text, value) for key, value in _pairs(text, match["options"]).items()},
    )


def _pairs(text: str, inside: str | None) -> dict[str, str]:
    pairs = [part.partition("=") for part in (inside or "").split(",") if part.strip()]
    if any(not key.strip() or not separator for key, separator, _ in pairs):
        raise ConfigError(f"{text!r}: expected pairs such as k=v, separated by commas.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _number(text: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{text!r}: {value!r} is not a whole number.") from None
