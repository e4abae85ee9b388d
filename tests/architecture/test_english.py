"""What users read is plain English: the turns of phrase that strangers stumble over stay out of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "src", *sorted((ROOT / "packages").glob("*/src"))]
STUMBLES = re.compile(
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b)|\b(?:told|whoever|somebody|nobody)\b", re.IGNORECASE
)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a module that may be shown, with their lines; docstrings and single words are not."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        shown = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements
        if shown and " " in node.value:
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_messages_say_not_a_file_rather_than_no_file(folder: Path) -> None:
    stumbles = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted(folder.rglob("*.py"))
        for line, text in texts(path.read_text())
        if STUMBLES.search(text)
    ]
    assert stumbles == []


def test_the_check_sees_messages_and_not_docstrings() -> None:
    source = 'def f():\n    """It is no file."""\n    raise ValueError(f"{1} is no file.")\n'
    assert [text for _, text in texts(source) if STUMBLES.search(text)] == [" is no file."]
