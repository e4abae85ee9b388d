"""Writes the pages of `docs/migration` from the tables beside this: `make docs-migration`."""

from __future__ import annotations

from pathlib import Path

from tests.checkout import ROOT
from tests.seeds.differences import DIFFERENCES, rows_of
from tests.seeds.programs import quoted
from tests.seeds.table import PAGES, ROWS, Row

__all__ = ["pages"]

FOLDER = ROOT / "docs" / "migration"

_HEAD = """\
<!-- Made by `make docs-migration` of tests/seeds/table.py: change that file instead. -->

# Programs of the old systems, block by block

These are all code blocks of five pages about the systems that Kindler replaces. Each is quoted in
`tests/seeds/blocks/` of packages/kindler-compat and run by a test there. Import lines change. The column
"other changes" lists every other change word for word, with its reason; `<...>` is a path or an address in the
test. The column "test adds" lists all that the test adds to the program because the page leaves it to the
reader. The tests allow no other changes or additions. Import lines in parentheses are not in the block, which
uses their names. No block is omitted.

The tests run with few rows. `make test-compat-whole` runs them with MNIST, CIFAR-10 and a Spark cluster.

"""
_DIFFERENCES = """\
<!-- Made by `make docs-migration` of the guides and of differences.json. -->

# What differs on purpose, and its tests

Every row of the guides' tables "What differs on purpose", with the test that shows Kindler's behavior.

"""
_TITLES = {
    "moving-from-bigdl.md": "BigDL",
    "moving-from-omegaml.md": "omegaml",
    "moving-from-orca.md": "Orca",
    "moving-from-sparkflow.md": "SparkFlow",
    "moving-from-tensorflowonspark.md": "TensorFlowOnSpark",
    "moving-from-tfpark.md": "TFPark",
}
_BAR = "\\|"
_GUIDES = {
    "omegaml": "moving-from-omegaml.md",
    "orca": "moving-from-orca.md",
    "sparkflow": "moving-from-sparkflow.md",
    "tensorflowonspark-resnet": "moving-from-tensorflowonspark.md",
    "tfpark": "moving-from-tfpark.md",
}


def pages() -> dict[Path, str]:
    """The text of each page."""
    return {FOLDER / "blocks.md": _blocks(), FOLDER / "differences.md": _differences()}


def _blocks() -> str:
    return _HEAD + "\n".join(_section(page, title) for page, title in PAGES.items())


def _differences() -> str:
    return _DIFFERENCES + "\n".join(_of_guide(guide) for guide in DIFFERENCES)


def _of_guide(guide: str) -> str:
    head = f"## {_TITLES[guide]}\n\n[The guide](../guides/{guide}) explains the differences.\n\n"
    topics = [cells[0] for cells in rows_of(guide)]
    rows = (f"| {topic.replace('|', _BAR)} | {_test(DIFFERENCES[guide][topic])} |\n" for topic in topics)
    return f"{head}| topic | test |\n|---|---|\n{''.join(rows)}"


def _test(test: str) -> str:
    path, _, name = test.partition("::")
    return f"`{path}`<br>`{name}`"


def _section(page: str, title: str) -> str:
    rows = "\n".join(_line(ROWS[block]) for block in quoted(page))
    return (
        f"## {title}\n\nFor other differences, see [the guide](../guides/{_GUIDES[page]}).\n\n"
        f"| block | import lines | become | other changes | test adds | run by |\n"
        f"|---|---|---|---|---|---|\n{rows}\n"
    )


def _line(row: Row) -> str:
    page, _, name = row.block.partition("/")
    shown = quoted(page)[row.block].splitlines()
    olds = "<br>".join(_code(old) if old in shown else f"({_code(old)})" for old, _ in row.imports)
    news = "<br>".join(_code(new) for _, new in row.imports)
    changes = "<br>".join(
        f"{_code(change.was)} becomes {_code(change.now)} ({change.kind}: {change.why})"
        for change in row.changes
    )
    given = "<br>".join(f"{_code(name)}: {row.what(name)}" for name in row.given_names)
    cells = (name, olds or "none", news, changes, given, _test(row.test))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text.replace(chr(10), ' ↵ ')}`"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
