"""The README's first example needs nothing that the README's pip line does not install."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.wheels.smoke import ROOT, readme

DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def test_the_pip_line_installs_what_the_first_example_imports() -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    line, program = readme()
    asked = [Requirement(word.strip("'")) for word in line.split()]
    installed = {requirement.name for requirement in asked}
    for requirement in asked:
        if requirement.name == "kindler":
            extras = [
                project["dependencies"],
                *(project["optional-dependencies"][e] for e in requirement.extras),
            ]
            installed |= {Requirement(text).name for extra in extras for text in extra}

    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(program))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    needed = {DISTRIBUTIONS.get(name, name) for name in imported - set(sys.stdlib_module_names)}
    assert needed
    assert needed <= installed
