"""The guide to the command line: its commands run in a shell and print what it shows."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/command-line.md"
FENCE = re.compile(
    r"(?P<not_run><!-- not run: .+? -->\n)?^```(?P<language>python|bash)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<expected>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)


def test_the_commands_of_the_guide_print_what_it_shows(tmp_path: Path) -> None:
    found = [block for block in FENCE.finditer(GUIDE.read_text()) if not block["not_run"]]
    assert len([block for block in found if block["language"] == "bash"]) >= 4

    for block in found:
        start = (
            [sys.executable, "-c"] if block["language"] == "python" else ["bash", "-euo", "pipefail", "-c"]
        )
        done = subprocess.run(
            [*start, block["code"]],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT / "src"),
                "KINDLER_STORE": "store",  # as the first command says, for all of them
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        shown = block["expected"] or ""
        assert doctest.OutputChecker().check_output(shown, done.stdout, flags), (block["code"], done.stdout)
