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
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b)"
    r"|\b(?:told|whoever|somebody|anybody|everybody|nobody|heed(?:s|ed)?|locked in|mend(?:s|ed)?)\b"
    r"|\b(?:went on|is said|made of|made again|are there twice)\b",
    re.IGNORECASE,
)
# Pages of documentation avoid these as well.
IN_PAGES = re.compile(
    rf"{STUMBLES.pattern}|\b(?:judge[ds]?|goes on|went on|dealt|so many|refuse[ds]?|of other people)\b",
    re.IGNORECASE,
)
# Messages of these parts avoid more; those of the others are not checked yet.
IN_PARTS = re.compile(
    rf"{IN_PAGES.pattern}|\b(?:goes? on|refuse[ds]?|besides?|whatever|sign of life|by others|stands in"
    r"|cannot follow|of (?:yours|its own))\b",
    re.IGNORECASE,
)
PARTS = [
    ROOT / "src" / "kindler" / part
    for part in ("serve", "store", "shelves", "runtime", "models", "sandbox", "cli", "tune", "tracking", "ml")
]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        page
        for part in ("deploy", "design", "guides", "howto", "reference")
        for page in sorted((ROOT / "docs" / part).glob("*.md"))
    ),
]
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|<!-- figures.*?<!-- end", re.DOTALL | re.MULTILINE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a module that may be shown, with their lines; docstrings and single words are not."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        shown = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements
        if shown and " " in node.value:
            yield node.lineno, node.value


def stumbles(folder: Path, words: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted(folder.rglob("*.py"))
        for line, text in texts(path.read_text())
        if words.search(text)
    ]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_messages_say_not_a_file_rather_than_no_file(folder: Path) -> None:
    assert stumbles(folder, STUMBLES) == []


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_messages_of_parts_avoid_private_words(part: Path) -> None:
    assert stumbles(part, IN_PARTS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_in_plain_english(page: Path) -> None:
    prose = " ".join(CODE.sub("", page.read_text()).split())
    assert [prose[max(0, found.start() - 30) : found.end() + 30] for found in IN_PAGES.finditer(prose)] == []


def test_the_check_sees_messages_and_not_docstrings() -> None:
    source = 'def f():\n    """It is no file."""\n    raise ValueError(f"{1} is no file.")\n'
    assert [text for _, text in texts(source) if STUMBLES.search(text)] == [" is no file."]
