"""What the documentation says is so: its code runs, its outputs are true, its names exist."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kindler
import kindler.errors
from tests.docs.pages import blocks, needs_compat, problem, run, runs, starts_spark
from tests.warm_daemon import environment

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The README's example is a file, word for word, and tests/examples runs it.
README_EXAMPLES = ("first_steps.py",)
# Those that need kindler-compat run in its tests.
RUNNABLE = [page for page in PAGES[1:] if runs(page) and not needs_compat(page)]
# Frameworks do not share a process: pages about Keras and TensorFlow run in one of their own.
KERAS_PAGES = [p for p in RUNNABLE if re.search(r"import (keras|tensorflow\.compat)", p.read_text())]
INCLUDE = re.compile(r'--8<-- "(?P<path>[^":]+)(?::(?P<section>\w+))?"')


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def modules_with_doctests() -> list[str]:
    """Modules of Kindler with examples in their docstrings; found by text, nothing is imported."""
    sources = sorted((ROOT / "src" / "kindler").rglob("*.py"))
    paths = [path.relative_to(ROOT / "src") for path in sources if ">>> " in path.read_text()]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What went wrong on each page; all run in one process a framework, in an empty folder."""
    others = [page for page in RUNNABLE if page not in KERAS_PAGES]
    return run(sorted(others, key=starts_spark), tmp_path_factory.mktemp("pages"), **environment()) | run(
        KERAS_PAGES, tmp_path_factory.mktemp("keras-pages"), KERAS_BACKEND="tensorflow"
    )


@pytest.mark.timeout(2400)
@pytest.mark.spark
@pytest.mark.torch
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page: Path, outcomes: dict[str, Any]) -> None:
    assert outcomes[str(page)] is None, outcomes[str(page)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_that_does_not_run_is_at_least_python(page: Path) -> None:
    for block in blocks(page.read_text()):
        if "--8<--" not in block.code:
            ast.parse(block.code, filename=f"{page}:{block.line}")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_included_examples_exist(page: Path) -> None:
    for include in INCLUDE.finditer(page.read_text()):
        text = (ROOT / include["path"]).read_text()
        if include["section"]:
            assert f"[start:{include['section']}]" in text, include[0]
            assert f"[end:{include['section']}]" in text, include[0]


def test_a_page_that_prints_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Words.\n\n```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n")
    assert f"{page}:8 should print\n2\n\nbut printed\n1" in str(problem(page))

    page.write_text(page.read_text().replace("2", "1"))
    assert problem(page) is None


def test_the_readme_shows_short_example_files_word_for_word() -> None:
    examples = [(ROOT / "examples" / file).read_text() for file in README_EXAMPLES]
    shown = [block.code for block in blocks((ROOT / "README.md").read_text())]
    assert shown == examples
    assert max(len(example.splitlines()) for example in examples) <= 34


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    described = re.findall(r"^::: (\S+)$", reference, re.MULTILINE)
    missing = [n for n in kindler.__all__ if f"kindler.{n}" not in described and not n.startswith("__")]
    assert not missing
    assert "`kindler.__version__`" in reference


def test_every_error_is_in_the_guide_to_errors() -> None:
    guide = (ROOT / "docs/guides/errors.md").read_text()
    classes = [n for n in kindler.errors.__all__ if inspect.isclass(getattr(kindler.errors, n))]
    assert not [n for n in classes if f"`{n}`" not in guide]


def test_every_argument_of_from_torch_and_fit_is_in_the_guides() -> None:
    guides = "".join(page.read_text() for page in (ROOT / "docs/guides").glob("*.md"))
    for method in (kindler.Estimator.from_torch, kindler.Estimator.fit, kindler.Estimator.predict):
        arguments = set(inspect.signature(method).parameters) - {"self", "data"}
        assert not {a for a in arguments if not re.search(rf"\b{a}\b", guides)}


@pytest.mark.parametrize("module", modules_with_doctests())
def test_examples_in_docstrings_are_true(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed
