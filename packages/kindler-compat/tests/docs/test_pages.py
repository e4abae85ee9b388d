"""The code of pages that need kindler-compat, and of its docstrings, runs and prints what it shows."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import COMPAT, ROOT
from tests.docs.pages import needs_compat, run, runs, starts_spark
from tests.warm_daemon import environment

PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if runs(page) and needs_compat(page)]
# Frameworks do not share a process, and `kindler.compat.tensorflow` turns eager execution off for all of one.
GRAPH_PAGES = [page for page in PAGES if "compat import tensorflow" in page.read_text()]
KERAS_PAGES = [
    page
    for page in PAGES
    if page not in GRAPH_PAGES and re.search(r"import (keras|tensorflow\.compat)", page.read_text())
]
SOURCES = COMPAT / "src"
MODULES = [
    ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    for path in sorted(SOURCES.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    others = [page for page in PAGES if page not in (*GRAPH_PAGES, *KERAS_PAGES)]
    return (
        run(sorted(others, key=starts_spark), tmp_path_factory.mktemp("pages"), **environment())
        | run(KERAS_PAGES, tmp_path_factory.mktemp("keras-pages"), KERAS_BACKEND="tensorflow")
        | run(GRAPH_PAGES, tmp_path_factory.mktemp("graph-pages"))
    )


@pytest.mark.timeout(1200)
@pytest.mark.spark
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page: Path, outcomes: dict[str, Any]) -> None:
    assert outcomes[str(page)] is None, outcomes[str(page)]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_are_true(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed
