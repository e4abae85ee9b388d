"""The tables of docs/benchmarks.md, made of the figures that were recorded.

    python benchmarks/_page.py                                   # write the tables
    python benchmarks/_page.py benchmarks/results/train.json     # record the results of a run first

`figures.json` has a row for each ratio: its median, the extremes of its rounds, how many they were, and the
target. Recording a result replaces all rows of its benchmark.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["page", "recorded", "rows_of"]

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "figures.json"
PAGE = ROOT / "docs" / "benchmarks.md"
_HEAD = "| benchmark | ratio | target | measured | rounds |\n|---|---|---|---|---|\n"
_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def recorded() -> list[dict[str, Any]]:
    """The rows of all tables."""
    found: list[dict[str, Any]] = json.loads(FIGURES.read_text())
    return found


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that a benchmark's JSON makes.

    Raises:
        ValueError: It is of a quick run, which only shows that the benchmark works.
    """
    if result["quick"]:
        raise ValueError(f"{result['benchmark']} was a quick run: its figures say nothing.")
    kept = ("at_least", "at_most")
    return [
        {
            "machine": "gpu" if result["benchmark"] == "gpu" else "cpu",
            "benchmark": result["benchmark"],
            "name": ratio["name"],
            "median": ratio["median"],
            "low": min(ratio["rounds"]),
            "high": max(ratio["rounds"]),
            "rounds": len(ratio["rounds"]),
            **({} if ratio["unit"] == "x" else {"unit": ratio["unit"]}),
            **{name: ratio[name] for name in kept if ratio.get(name) is not None},
        }
        for ratio in result["ratios"] or result["figures"]  # some only measure
    ]


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        lines = (_line(row) for row in rows if row["machine"] == found[2])
        return f"{found[1]}\n{_HEAD}{''.join(lines)}\n{found[3]}"

    return _TABLE.sub(table, text)


def _line(row: dict[str, Any]) -> str:
    unit = f" {row['unit']}" if "unit" in row else ""
    targets = [(">=", row.get("at_least")), ("<=", row.get("at_most"))]
    target = "; ".join(f"{sign} {value:g}{unit}" for sign, value in targets if value is not None)
    extremes = f"{_number(row['low'])} .. {_number(row['high'])}" if "low" in row else ""
    beside = "; ".join(filter(None, [extremes, row.get("note")]))
    measured = f"{_number(row['median'])}{unit}" + (f" ({beside})" if beside else "")
    return f"| {row['benchmark']} | {row['name']} | {target or 'none'} | {measured} | {row['rounds']} |\n"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _record(results: list[str]) -> None:
    rows = recorded()
    for path in results:
        new = rows_of(json.loads(Path(path).read_text()))
        places = [i for i, row in enumerate(rows) if row["benchmark"] == new[0]["benchmark"]]
        kept = [row for row in rows if row["benchmark"] != new[0]["benchmark"]]
        at = places[0] if places else len(kept)
        rows = [*kept[:at], *new, *kept[at:]]
    FIGURES.write_text(
        "[\n" + ",\n".join(f" {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n]\n"
    )


if __name__ == "__main__":
    _record(sys.argv[1:])
    PAGE.write_text(page(PAGE.read_text(), recorded()))
