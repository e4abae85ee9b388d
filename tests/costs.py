"""What tests cost: the CPU seconds of each, with every process that it has started.

    python -m pytest -p tests.costs tests/torch     # writes build/costs/torch.json
    python -m tests.costs                           # the parts, and the slowest tests of all of them

CPU seconds are the same on a busy machine and on a quiet one. The first test that uses a shared fixture
pays for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

FOLDER = Path("build/costs")
SLOWEST = 30

_costs: dict[str, float] = {}
_before_all: list[float] = []  # what imports and collection took


def cpu_seconds() -> float:
    """Of this process, of those that descend from it, and of those that they have waited for."""
    total = sum(os.times()[:4])
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue  # it has ended since; whoever waited for it has its seconds
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = cpu_seconds()
    if not _before_all:
        _before_all.append(before)
    try:
        return (yield)
    finally:
        _costs[item.nodeid] = round(cpu_seconds() - before, 2)


def _folder(nodeid: str) -> str:
    """`torch` of `tests/torch/...`, `compat-bigdl` of `packages/kindler-compat/tests/bigdl/...`."""
    parts = Path(nodeid.partition("::")[0]).parts
    if parts[0] != "packages":
        return parts[2].removeprefix("with_") if parts[2].startswith("with_") else parts[1]
    package = parts[1].removeprefix("kindler-")
    return f"{package}-{parts[3]}" if len(parts) > 4 else package


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not _costs:
        return
    part = "-".join(dict.fromkeys(_folder(nodeid) for nodeid in _costs))
    flavour = os.environ.get("KINDLER_TEST_KERAS")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{part}{f'-{flavour}' if flavour else ''}.json"
    # Processes that nobody waited for, such as Spark's Python workers, take their seconds with them.
    whole = sum(_before_all) + sum(cost for cost in _costs.values() if cost > 0)
    path.write_text(json.dumps({"whole": whole, "tests": _costs}, indent=1))


def report(folder: Path = FOLDER) -> Iterator[str]:
    """Two tables of Markdown: the parts, and the slowest tests."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    yield from ("| part | tests | CPU seconds |", "|---|---:|---:|")
    for name, part in parts.items():
        yield f"| {name} | {len(part['tests'])} | {part['whole']:.0f} |"
    yield ""
    yield from ("| CPU seconds | test |", "|---:|---|")
    costs = [
        (cost, f"{test} ({name})" if name.startswith("keras-") else test)
        for name, part in parts.items()
        for test, cost in part["tests"].items()
    ]
    for cost, test in sorted(costs, reverse=True)[:SLOWEST]:
        yield f"| {cost:.0f} | `{test}` |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(report()) + "\n")
