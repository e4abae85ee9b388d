"""What tests cost: the CPU seconds of each, with every process that it has started.

    python -m pytest -p tests.costs tests/torch     # writes build/costs/torch.json
    python -m tests.costs                           # the parts, and the slowest tests of all of them

CPU seconds are the same on a busy machine and on a quiet one. The first test that uses a shared fixture
pays for it. The tests run in a child of a process that adopts, and waits for, what outlives its parent: fork
servers of programs that have ended and Spark's Python workers would take their seconds with them otherwise.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

FOLDER = Path("build/costs")
SLOWEST = 30

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 20.0  # in which the processes that the tests have left end by themselves

_costs: dict[str, float] = {}


def pytest_load_initial_conftests() -> None:
    """Go on in a child; this process does nothing but wait."""
    if sys.platform == "linux":  # elsewhere the seconds of orphans are lost
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if child := os.fork():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child ends
        os._exit(_wait_for_all(child))


def _wait_for_all(child: int) -> int:
    code, ended = 1, 0.0
    while not ended or time.monotonic() < ended + _END_S:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG if ended else 0)
        except ChildProcessError:
            break
        if pid == child:
            code, ended = max(os.waitstatus_to_exitcode(status), 0) or int(status != 0), time.monotonic()
        elif not pid:
            time.sleep(0.1)
    return code


def cpu_seconds() -> float:
    """Of this process, of those that descend from it or from one that has ended, and of those waited for."""
    above = psutil.Process(os.getppid())
    total: float = sum(above.cpu_times()[:4])
    for process in above.children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue  # it has ended since; whoever waited for it has its seconds
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = cpu_seconds()
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
    # What still runs now ends with the session: its seconds count up to here.
    path.write_text(json.dumps({"whole": cpu_seconds(), "tests": _costs}, indent=1))


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
