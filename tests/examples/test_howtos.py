"""The programs of examples/howto print what their pages show, and the cells of the notebooks run.

All of them run in the process of the other examples.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.examples.conftest import HOWTOS as PROGRAMS
from tests.examples.notebooks import NOTEBOOKS, code
from tests.in_turn import Printed
from tests.whole import whole_only

ROOT = Path(__file__).parents[2]
EXAMPLES, PAGES = ROOT / "examples", ROOT / "docs" / "howto"

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]


def page_of(program: Path) -> Path:
    return PAGES / f"{program.stem.replace('_', '-')}.md"


def words(text: str, lines: int | None = None) -> list[str]:
    """The words of a text; numbers, the width of a table and the slowest operations depend on the machine."""
    some = "\n".join(text.strip().splitlines()[:lines])
    return re.sub(r"-?\d[\d.,]*(e-?\d+)?|aten::\w+|[-+]{3,}", "#", some).split()


def number(pattern: str, text: str) -> float:
    found = re.search(pattern + r"\D*([\d.]+\d)", text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1])


def test_every_program_has_a_page() -> None:
    assert set(map(page_of, PROGRAMS)) == set(PAGES.glob("*.md")) - {PAGES / "index.md"}


def test_the_index_lists_every_program_and_notebook_and_nothing_else() -> None:
    linked = re.findall(r"^\| \[(\S+)\]\((\S+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    folders = {path.parent for path in EXAMPLES.glob("*/*.py")} - {EXAMPLES / "howto"}
    assert {EXAMPLES / path for _, path in linked} == {
        *EXAMPLES.glob("*.py"),
        *PROGRAMS,
        *NOTEBOOKS,
        *folders,
    }
    assert all(path.endswith(title) for title, path in linked)


@pytest.mark.spark
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_prints_what_its_page_shows(program: Path, printed: Printed) -> None:
    [included] = blocks(page_of(program).read_text())
    assert included.code.strip() == f'--8<-- "examples/howto/{program.name}"'
    assert included.expected
    lines = 1 if program.name == "embed_text.py" else None  # its others are what this Python's manual says
    assert words(printed(program.name), lines) == words(included.expected, lines)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("program", "what", "least"),
    [
        ("finetune_text.py", "test accuracy", 0.7),
        ("adapt_text.py", "phones: .*before,", 90),
        ("image_folder.py", "test accuracy", 0.9),
        ("tabular_categories.py", "test AUC", 0.75),
        ("two_tower.py", "recall at 10", 0.2),
        ("streaming.py", "scored: 178, right", 0.9),
        ("canary.py", "version 2 right", 0.8),
    ],
)
def test_a_program_is_about_as_good_as_its_page_says(
    program: str, what: str, least: float, printed: Printed
) -> None:
    assert number(what, printed(program)) > least


@pytest.mark.spark
def test_the_forecast_is_better_than_the_last_values(printed: Printed) -> None:
    text = printed("time_series_windows.py")
    others = min(number("as in the last hour", text), number("as yesterday", text))
    assert number("error of the model", text) < 0.9 * others


@whole_only
@pytest.mark.spark
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_and_what_they_assert_is_true(notebook: Path, printed: Printed) -> None:
    printed(f"{notebook.stem}_cells.py")
    assert "assert " in code(notebook)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_was_executed(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = [output for cell in cells for output in cell["outputs"]]
    assert shown
    assert not [output for output in shown if output["output_type"] == "error"]
