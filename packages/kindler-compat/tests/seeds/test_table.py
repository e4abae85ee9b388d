"""Every code block of the pages is quoted, changes only as the table says, and is run by its test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.checkout import COMPAT
from tests.conftest import SHARED
from tests.seeds.page import pages
from tests.seeds.programs import Program, blocks_of_a_page, quoted, runnable
from tests.seeds.table import GIVEN, PAGES, ROWS, Row

ORIGINALS = SHARED.parent / "seeds"
IMPORT = re.compile(r"(import|from) \S+( |$)")
EVERY_ROW = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@pytest.mark.parametrize("page", PAGES)
def test_the_quoted_blocks_are_those_of_the_page_word_for_word(page: str) -> None:
    original = ORIGINALS / f"{page}.md"
    if not original.is_file():
        pytest.skip(f"the page is not at {original}")
    assert list(quoted(page).values()) == blocks_of_a_page(original.read_text())


def test_no_page_is_left_out() -> None:
    assert {path.stem for path in (Path(__file__).parent / "blocks").iterdir()} == set(PAGES)
    if ORIGINALS.is_dir():
        assert {path.stem for path in ORIGINALS.glob("*.md")} == set(PAGES)


def test_every_block_has_a_row_and_every_row_a_block() -> None:
    assert [block for page in PAGES for block in quoted(page)] == list(ROWS)


@EVERY_ROW
def test_only_import_lines_and_listed_pieces_of_a_block_change(row: Row) -> None:
    block = quoted(row.block.partition("/")[0])[row.block]
    for old, new in row.imports:
        assert IMPORT.match(old)
        assert IMPORT.match(new)
    for change in row.changes:
        assert change.was in block
        assert change.why
    lines = block.splitlines()
    without_pieces = runnable(Row(row.block, row.test, row.imports)).splitlines()
    altered = Counter(lines) - Counter(without_pieces)
    assert altered == Counter(line for line in lines if line in dict(row.imports))
    if not row.shell and row.block != "sparkflow/parameters":
        ast.parse(runnable(row, alpha="1"))


@EVERY_ROW
def test_what_a_block_is_given_is_explained_and_used(row: Row) -> None:
    block = quoted(row.block.partition("/")[0])[row.block]
    assert all(row.what(name) for name in row.given_names)
    assert all(re.search(rf"\b{re.escape(name)}\b", block) for name in row.given_names)
    if row.shell:
        used, set_there = re.findall(r"\$\{?(\w+)", block), re.findall(r"export (\w+)=", block)
        first = [name for name in used if name not in set_there or name == "PYTHONPATH"]
        assert {name for name in row.given_names if "." not in name} == set(first)
        assert {name for name in row.given_names if "." in name} == set(re.findall(r"\w+\.py\b", block))


def test_nothing_is_explained_that_is_not_given() -> None:
    assert {name.rpartition(":")[2] for name in GIVEN} == {
        n for row in ROWS.values() for n in row.given_names
    }


def test_a_program_does_not_run_with_anything_that_its_row_does_not_list(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"sparkflow/build-graph is given \['small_model'\]"):
        Program(tmp_path, small_model=None).run("sparkflow/build-graph")


@EVERY_ROW
def test_the_test_of_a_row_exists_and_runs_the_block(row: Row) -> None:
    path, _, name = row.test.partition("::")
    source = (COMPAT / path).read_text()
    function = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    assert row.block in (ast.get_source_segment(source, function) or "")
    assert not any("whole_only" in ast.unparse(mark) for mark in function.decorator_list)


def test_the_pages_of_the_documentation_are_made_of_the_tables() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, "run: python -m tests.seeds.page"
