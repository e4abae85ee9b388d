"""The tables of docs/benchmarks.md and its chart, made of the figures that were recorded.

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

__all__ = ["chart", "page", "recorded", "rows_of"]

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "figures.json"
PAGE = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "images" / "benchmarks.svg"
# The bars: what they are called, and a pattern of the row that they show; a ratio of seconds is turned over.
_BARS = (
    ("train, 1 worker", "a torch loop", "train", "1 worker / torch loop"),
    ("train, 2 workers", "torch's DDP", "train", "2 workers / DDP"),
    ("second fit on Spark", "TorchDistributor", "start", "second fit / .*"),
    ("score a DataFrame", "predict_batch_udf", "predict", "inline / .*"),
    ("score Parquet files", "predict_batch_udf", "predict", "direct / .*"),
    ("serve, 64 clients", "MLServer", "serve", "kindler / best peer .* 64 clients"),
)
_STYLE = """\
  .bg{fill:#fff} .bar{fill:#d9480f}
  .line{stroke:#7b8794;stroke-width:1.5} .one{stroke:#9aa3ad;stroke-dasharray:4 4}
  text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#1f2933}
  .s{font-size:11px;fill:#52606d}
  @media (prefers-color-scheme: dark){
    .bg{fill:#1e2129} .bar{fill:#ff8a4c} text{fill:#e4e7eb} .s{fill:#b0b8c3} }
"""
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


def chart(rows: list[dict[str, Any]]) -> str:
    """How many times as fast as something else: a drawing of bars, from the lowest to the highest round."""
    bars = [
        (what, other, *_times(row))
        for what, other, benchmark, name in _BARS
        for row in rows
        if row["benchmark"] == benchmark and re.fullmatch(name, row["name"])
    ]
    left, unit = 200, 440 / max(high for *_, high in bars)
    title = "Kindler against others, on two cores: times as fast"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {56 + 40 * len(bars)}" role="img">',
        f"<title>{title}</title>\n<style>\n{_STYLE}</style>",
        f'<rect class="bg" width="760" height="{56 + 40 * len(bars)}" rx="8"/>',
        f'<text x="16" y="26">{title}</text>',
    ]
    for number, (what, other, median, low, high) in enumerate(bars):
        y = 44 + 40 * number
        lines += [
            f'<text x="16" y="{y + 13}">{what}</text>',
            f'<text class="s" x="16" y="{y + 28}">against {other}</text>',
            f'<rect class="bar" x="{left}" y="{y + 4}" width="{median * unit:.1f}" height="20" rx="3"/>',
            f'<path class="line" d="M{left + low * unit:.1f} {y + 14}H{left + high * unit:.1f}"/>',
            f'<text x="{left + high * unit + 8:.1f}" y="{y + 19}">{median:.1f}x</text>',
        ]
    lines += [f'<path class="one" d="M{left + unit:.1f} 40V{44 + 40 * len(bars)}"/>', "</svg>\n"]
    return "\n".join(lines)


def _times(row: dict[str, Any]) -> tuple[float, float, float]:
    median, low, high = (float(row.get(name, row["median"])) for name in ("median", "low", "high"))
    return (median, low, high) if "at_most" not in row else (1 / median, 1 / high, 1 / low)


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
    CHART.write_text(chart(recorded()))
