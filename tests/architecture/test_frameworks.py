"""What a framework can do is on its row: nobody asks for its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "kindler"


def _asks(source: str) -> Iterator[int]:
    """Lines that compare something called a framework with a text, or with a constant that stands for one."""
    tree = ast.parse(source)
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and any(map(_is_text, ast.walk(node.value)))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        inner = [part for side in sides for part in ast.walk(side)]
        named = any(_is_text(part) or (isinstance(part, ast.Name) and part.id in constants) for part in inner)
        if named and any("framework" in _last_name(side) for side in sides):
            yield node.lineno


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize(
    "comparison",
    [
        'self.framework == "keras"',
        'framework in ("torch",)',
        "model.framework == _KERAS",
        "framework in NAMES",
        'chosen.framework == "none"',
    ],
)
def test_a_comparison_with_a_name_is_noticed(comparison: str) -> None:
    assert list(_asks(f'_KERAS = "keras"\nNAMES = ("torch",)\nif {comparison}: pass')) == [3]


def test_no_framework_is_asked_for_its_name_outside_of_its_folder() -> None:
    files = [file for file in SRC.rglob("*.py") if file.relative_to(SRC).parts[0] != "frameworks"]
    found = {f"{file.relative_to(SRC)}:{line}" for file in files for line in _asks(file.read_text())}

    assert len(files) > 200
    assert found == set()
