"""Every line of the page on exactness names a test, and the test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = [
    line
    for line in (ROOT / "docs/exact.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| what |")
]


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip()[:40])
def test_a_line_names_tests_that_exist_or_says_that_there_is_none(line: str) -> None:
    cell = line.strip().strip("|").rpartition("|")[2].strip()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", cell)

    assert named or cell == "none"
    for file, test in named:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not test or test in functions(path), test
