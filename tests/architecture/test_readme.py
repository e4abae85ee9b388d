"""The front pages say what the code has: extras, frameworks, strategies; and the pip line is enough."""

from __future__ import annotations

import ast
import re
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

from kindler.frameworks.registry import FRAMEWORKS
from kindler.sync.registry import SYNCS
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


FRONT_PAGES = ("README.md", "docs/index.md")
# What a reader calls them; one that is missing here has to be told to readers too.
FRAMEWORK_WORDS = {
    "torch": "PyTorch",
    "torch_step": "training step of your own",
    "lightning": "LightningModules",
    "keras": "Keras",
    "openvino": "OpenVINO",
}


@pytest.mark.parametrize("page", FRONT_PAGES)
def test_a_front_page_denies_nothing_that_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not re.search(r"not (yet )?(supported|implemented)|coming soon", text, re.IGNORECASE)


def test_the_readme_names_every_framework_and_sync() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(FRAMEWORK_WORDS) == {row.name for row in FRAMEWORKS.built_in}
    assert [word for word in FRAMEWORK_WORDS.values() if word not in text] == []
    syncs = {row.name for row in SYNCS.built_in} - {"allreduce"}
    assert [name for name in syncs if f'"{name}"' not in text] == []


def test_the_table_of_extras_has_all_and_no_other() -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (ROOT / "docs/install.md").read_text().split("| extra |", 1)[1].split("\n\n", 1)[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert named == set(project["optional-dependencies"]) - {"dev"}


def test_the_table_of_what_was_tested_names_what_the_gate_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    table = (ROOT / "README.md").read_text().split("| tested on |")[1]
    older = re.findall(r"^\$\(VENV\)/\.spark-([\d.]+):", makefile, re.MULTILINE)
    assert f"Spark {', '.join(sorted(older))} and newest" in table
    flavours = re.findall(r"^KERAS_FLAVOURS := (.*)", makefile, re.MULTILINE)[0].split()
    words = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch", "tf_keras": "Keras 2"}
    assert set(flavours) == set(words)
    assert [word for word in words.values() if word not in table] == []


def test_the_wheel_says_that_it_has_types() -> None:
    assert (ROOT / "src" / "kindler" / "py.typed").is_file()  # hatch packs every file of the package
