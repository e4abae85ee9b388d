"""The blocks of the pages as programs: quoted text with the changes that `table.py` allows, executed."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from tests.seeds.table import ROWS, Row
from tests.whole import WHOLE

__all__ = ["Program", "blocks_of_a_page", "quoted", "runnable"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^``` *$", re.MULTILINE | re.DOTALL)
_RST = re.compile(r"^\.\. code:: python\n\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
_QUOTED = re.compile(r"^## ([\w-]+)\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of_a_page(text: str) -> list[str]:
    """The code blocks of a page in Markdown or reStructuredText, without spaces at the ends of lines."""
    found = [textwrap.dedent(block) for block in _RST.findall(text)] or [b for _, b in _FENCE.findall(text)]
    return [_trimmed(block) for block in found]


@cache
def quoted(page: str) -> dict[str, str]:
    """The blocks of a page as they are quoted here, by name and in their order."""
    text = (Path(__file__).parent / "blocks" / f"{page}.md").read_text()
    return {f"{page}/{name}": _trimmed(block) for name, block in _QUOTED.findall(text)}


def runnable(row: Row, folder: Path | str = "", *, whole: bool = WHOLE, **places: str) -> str:
    """The text of a block with its changes; import lines that the page leaves to its reader come first.

    Args:
        row: The block's row in the table.
        folder: Where the program writes; it stands for the page's own folders.
        whole: Whether it runs as large as on the page.
        places: What else differs from machine to machine: paths and addresses, by name.
    """
    text = quoted(row.block.partition("/")[0])[row.block]
    lines = text.splitlines()
    before = [] if row.shell else [new for old, new in row.imports if old not in lines]
    now = dict(row.imports)
    text = "\n".join(now.get(line, line) for line in lines)
    for change in row.changes:
        if change.kind == "size" and whole:
            continue
        assert change.was in text, f"{row.block} has no {change.was!r}"
        text = text.replace(change.was, change.now)
    for name, value in {"folder": str(folder), **places}.items():
        text = text.replace(f"<{name}>", value)
    return "\n".join([*before, text]) + "\n"


class Program:
    """Blocks of one page that run one after another and share their names.

    Args:
        folder: Where the program writes.
        places: What differs from machine to machine, as in `runnable`.
        names: What the page leaves to its reader: data, models, settings.
    """

    def __init__(self, folder: Path, places: dict[str, str] | None = None, **names: Any) -> None:
        self._folder = folder
        self._places = places or {}
        self.names: dict[str, Any] = {"__name__": "__main__", **names}  # functions travel by value
        self._made: dict[str, Any] = {}  # what blocks have bound, and to what

    def run(self, *blocks: str) -> dict[str, Any]:
        """Run blocks; gives the names that there are afterwards."""
        for block in blocks:
            text = runnable(ROWS[block], self._folder, **self._places)
            given = sorted(name for name in _used(text) if name in self.names and not self._is_made(name))
            assert given == sorted(ROWS[block].given_names), f"{block} is given {given}"
            before = dict(self.names)
            exec(compile(text, f"<{block}>", "exec"), self.names)
            self._made.update(
                {name: value for name, value in self.names.items() if before.get(name, self) is not value}
            )
        return self.names

    def _is_made(self, name: str) -> bool:
        """Whether the name is bound to what a block has bound it to, and not to something of the test's."""
        return self._made.get(name, self) is self.names[name]


def _used(text: str) -> set[str]:
    """The names that a program reads."""
    nodes = ast.walk(ast.parse(text))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _trimmed(block: str) -> str:
    return "\n".join(line.rstrip() for line in block.strip("\n").splitlines())
