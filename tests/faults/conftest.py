"""At the end, how many points were tried."""

from __future__ import annotations

from typing import Any

from tests.faults.points import tried


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if tried:
        counts = ", ".join(f"{suite} {count}" for suite, count in tried.items())
        terminalreporter.write_line(f"points tried: {counts}; together {tried.total()}")
