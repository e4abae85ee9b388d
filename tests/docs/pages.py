"""The code of a Markdown page, and a program that runs it.

    python tests/docs/pages.py PAGE... > report.json

A page's ```python blocks run in order and share their names. A ```text block right after one is what it must
print, with "..." for any text. A block that is an included example (`--8<--`) is run by `tests/examples`, and
one below the line `<!-- not run: reason -->` is not run. All pages run in one process, so that they share a
Spark session.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "blocks", "needs_compat", "problem", "run", "runs", "starts_spark"]

ROOT = Path(__file__).parents[2]
_PATHS = ("src", "packages/kindler-tfrecord/src", "packages/kindler-compat/src", ".")
_COMPAT = re.compile(r"kindler\.compat|from_graph|from_model_fn|from_mxnet")

_FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A piece of code, where it is, what it must print, and why it is not run, if it is not."""

    line: int
    code: str
    expected: str | None = None
    not_run: str | None = None


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page's text."""
    found: list[Block] = []
    last_end, last_was_python = 0, False
    for fence in _FENCE.finditer(page):
        before = page[last_end : fence.start()]
        language, text = fence["language"], fence["text"]
        if language == "text" and last_was_python and not before.strip():
            block = found.pop()
            found.append(Block(block.line, block.code, text, block.not_run))
        if language == "python":
            told = _NOT_RUN.search(before)
            reason = told["reason"] if told else None
            if "--8<--" in text:
                reason = "included from a file that tests/examples runs"
            found.append(Block(page.count("\n", 0, fence.start()) + 2, text, not_run=reason))
        last_end, last_was_python = fence.end(), language == "python"
    return found


def problem(page: Path) -> str | None:
    """Run a page; what went wrong, if something did."""
    names = {"__name__": "__main__"}  # so that functions and classes travel to workers by value
    for block in blocks(page.read_text()):
        if block.not_run:
            continue
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                # Line numbers in a traceback are those of the page.
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
        except Exception:
            return f"{page}:{block.line}\n{traceback.format_exc()}"
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if block.expected is not None and not doctest.OutputChecker().check_output(
            block.expected, printed.getvalue(), flags
        ):
            return f"{page}:{block.line} should print\n{block.expected}\nbut printed\n{printed.getvalue()}"
    return None


def runs(page: Path) -> bool:
    """Whether any code of a page is run."""
    return any(not block.not_run for block in blocks(page.read_text()))


def needs_compat(page: Path) -> bool:
    """Whether code of a page that is run needs the distribution kindler-compat."""
    return any(_COMPAT.search(block.code) for block in blocks(page.read_text()) if not block.not_run)


def starts_spark(page: Path) -> bool:
    """Pages that do come last: the others run on local processes, as for their reader, and cheaper."""
    return any("kindler.init" in block.code for block in blocks(page.read_text()) if not block.not_run)


def run(pages: list[Path], folder: Path, **environ: str) -> dict[str, str | None]:
    """What went wrong on each page; all run in one process, in that folder."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, pages)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in _PATHS), **environ},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes: dict[str, str | None] = json.loads(done.stdout)
    return outcomes


def main(pages: list[str]) -> None:
    import pytest

    from tests.warm import inherit_imports

    inherit_imports(pytest.MonkeyPatch())
    report = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        found = {page: problem(Path(page)) for page in pages}
    json.dump(found, report)


if __name__ == "__main__":
    main(sys.argv[1:])
