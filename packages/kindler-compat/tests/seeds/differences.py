"""What differs on purpose from the old systems: each row of the guides' tables, and the test that shows it.

`differences.json` has the tests, by guide and by the first cell of the row. `docs/migration/differences.md`
is made of it: `make docs-migration`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkout import ROOT

__all__ = ["DIFFERENCES", "GUIDES", "rows_of"]

GUIDES = ROOT / "docs" / "guides"
HEADING = "What differs on purpose"
DIFFERENCES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "differences.json").read_text())


def rows_of(guide: str) -> list[list[str]]:
    """The cells of the table below the heading of differences, without its head."""
    text = (GUIDES / guide).read_text()
    section = text.split(f"## {HEADING}\n", 1)[1].split("\n## ", 1)[0].split("\n### ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [
        [cell.strip().replace("¦", "|") for cell in line.strip("| ").replace("\\|", "¦").split("|")]
        for line in lines
    ]
