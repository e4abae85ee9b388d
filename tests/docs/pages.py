"""The code of a Markdown page, and a program that runs it.

    python tests/docs/pages.py PAGE... > report.jsonl

A page's ```python blocks run in order and share their names. A ```text block right after one is what it must
print, with "..." for any text. A block that is an included example (`--8<--`) is run by `tests/examples`, and
one below the line `<!-- not run: reason -->` is not run. All pages run in one process, so that they share a
Spark session.
"""

from __future__ import annotations

import contextlib
import doctest
import faulthandler
import io
import json
import os
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "blocks", "needs_compat", "problem", "run", "runs", "starts_spark"]

ROOT = Path(__file__).parents[2]
_PATHS = ("src", "packages/kindler-tfrecord/src", "packages/kindler-compat/src", ".")
_SLOW_S = 300  # a page that takes longer shows where it is
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


def run(pages: list[Path], folder: Path, limit_s: float = 900, **environ: str) -> dict[str, str | None]:
    """What went wrong on each page; all run in one process, in that folder."""
    paths = os.pathsep.join(str(ROOT / part) for part in _PATHS)
    with (folder / "report.jsonl").open("w+") as report, (folder / "errors").open("w+") as errors:
        with contextlib.suppress(subprocess.TimeoutExpired):  # which pages came to their end is in the report
            subprocess.run(
                [sys.executable, __file__, *map(str, pages)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths, **environ},
                stdout=report,
                stderr=errors,
                timeout=limit_s,
            )
        report.seek(0)
        found: dict[str, str | None] = dict(json.loads(line)[:2] for line in report)
        errors.seek(0)
        said = errors.read()[-4000:]
    ended = f"its process ended on this page or before it, or after {limit_s:.0f} s:\n{said}"
    return {str(page): found.get(str(page), ended) for page in pages}


def main(pages: list[str]) -> None:
    """Print a line of JSON for each page: its path, its problem, and the seconds that it took."""
    import pytest

    from tests.warm import inherit_imports

    inherit_imports(pytest.MonkeyPatch())
    report = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for page in pages:
            began = time.monotonic()
            faulthandler.dump_traceback_later(_SLOW_S)
            found = problem(Path(page))
            faulthandler.cancel_dump_traceback_later()
            report.write(json.dumps([page, found, round(time.monotonic() - began, 1)]) + "\n")
            report.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
