"""The tables of the documentation that are made by programs are those that the programs make now."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kindler.frameworks.registry import FRAMEWORKS
from tests.docs import cli_page, front_pages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmarks() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "_page.py"))


def test_the_tables_of_the_benchmarks_are_made_of_recorded_figures(benchmarks: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text == benchmarks["page"](text, benchmarks["recorded"]()), "run: python benchmarks/_page.py"
    drawing = (ROOT / "docs" / "images" / "benchmarks.svg").read_text()
    assert drawing == benchmarks["chart"](benchmarks["recorded"]()), "run: python benchmarks/_page.py"
    assert drawing.count('class="bar"') == len(benchmarks["_BARS"]), "each bar has its row"
    assert "| benchmark | ratio |" in text
    known = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {
        "serve_mobilenet"
    }  # serve --mobilenet
    assert {row["benchmark"] for row in benchmarks["recorded"]()} <= known


def test_the_page_of_the_command_line_is_made_of_its_parser() -> None:
    assert cli_page.PAGE.read_text() == cli_page.text(), "run: python -m tests.docs.cli_page"


def test_the_lists_of_the_readme_and_of_install_are_made_of_the_repository() -> None:
    page = front_pages.README.read_text()
    assert page == front_pages.readme(page), "run: python -m tests.docs.front_pages"
    page = front_pages.INSTALL.read_text()
    assert page == front_pages.install(page), "run: python -m tests.docs.front_pages"
    assert {row.name for row in FRAMEWORKS.built_in} <= set(front_pages.FRAMEWORKS_IN_WORDS)


def test_every_page_is_in_the_navigation_and_every_old_system_in_the_readme() -> None:
    tabs = front_pages.navigation()
    listed = list(front_pages.pages_of(tabs))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages)
    readme = front_pages.README.read_text()
    systems = [page for page in front_pages.pages_of(tabs["Migrate"]) if "moving-from" in page]
    assert [page for page in systems if f"](docs/{page})" not in readme] == []


TABLE = re.compile(r"^(\|.*\|)\n\|(?:\s*:?-+:?\s*\|)+$", re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_column_of_a_table_has_a_heading(page: Path) -> None:
    """Screen readers name a cell by it."""
    heads = [head[1].strip("|").split("|") for head in TABLE.finditer(page.read_text())]
    assert [head for head in heads if not all(cell.strip() for cell in head)] == []


def test_a_result_becomes_rows_with_the_extremes_of_its_rounds(benchmarks: dict[str, Any]) -> None:
    ratio = {
        "name": "a / b",
        "median": 2.0,
        "unit": "x",
        "at_least": 1.5,
        "at_most": None,
        "rounds": [3, 1, 2],
    }
    result = {"benchmark": "train", "quick": False, "ratios": [ratio], "figures": []}
    text = "<!-- figures: cpu -->\nold\n<!-- end of figures -->\n"
    rows = benchmarks["rows_of"](json.loads(json.dumps(result)))
    assert "| train | a / b | >= 1.5 | 2.00 (1.00 .. 3.00) | 3 |" in benchmarks["page"](text, rows)
    with pytest.raises(ValueError, match="quick run"):
        benchmarks["rows_of"]({**result, "quick": True})
