"""What a framework can do is on its row: nobody asks for its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kindler.frameworks.registry import FRAMEWORKS

SRC = Path(__file__).parents[2] / "src" / "kindler"
NAMES = FRAMEWORKS.names


def _asks(source: str) -> Iterator[int]:
    """Lines that compare something called a framework with the name of one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        named = any(isinstance(n, ast.Constant) and n.value in NAMES for s in sides for n in ast.walk(s))
        if named and any("framework" in ast.unparse(side) for side in sides):
            yield node.lineno


def test_a_comparison_with_a_name_is_noticed() -> None:
    assert list(_asks('x = 1\nif self.framework == "keras" or framework in ("torch",): pass')) == [2, 2]


def test_no_framework_is_asked_for_its_name_outside_of_its_folder() -> None:
    files = [file for file in SRC.rglob("*.py") if file.relative_to(SRC).parts[0] != "frameworks"]
    found = {f"{file.relative_to(SRC)}:{line}" for file in files for line in _asks(file.read_text())}

    assert len(files) > 200
    assert found == set()
