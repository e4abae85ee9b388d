"""Rows on their way from Spark are shown, and no minute is silent."""

from __future__ import annotations

import io
from typing import Any

import pytest

from kindler.train.progress import ProgressBar

COMPUTED = {"name": "ingest", "stage": "computed", "rows": 1000, "bytes": 8000, "done_tasks": 1, "tasks": 2}


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def received(worker: int, rows: int, *, done: bool = False) -> dict[str, Any]:
    return {
        "name": "ingest",
        "stage": "received",
        "worker": worker,
        "rows": rows,
        "bytes": rows * 8,
        "done": done,
    }


def shown(reports: list[tuple[float, dict[str, Any]]], *, terminal: bool, verbose: int = 1) -> str:
    now = [0.0]
    screen = Screen(terminal)
    with ProgressBar(verbose=verbose, stream=screen, clock=lambda: now[0]) as progress:
        for now[0], fields in reports:
            progress.report(fields)
    return screen.getvalue()


def test_without_a_terminal_a_line_is_printed_every_ten_seconds_and_a_last_one() -> None:
    reports = [
        (0.0, COMPUTED),
        (9.0, COMPUTED),
        (11.0, COMPUTED),
        (12.0, received(0, 300)),
        (13.0, received(1, 200)),
    ]

    assert shown(reports, terminal=False).splitlines() == [
        "rows from Spark: 1,000 computed (8.0 kB, 1 of 2 tasks)",
        "rows from Spark: 500 of 1,000 received (4.0 kB)",
    ]


def test_in_a_terminal_the_line_is_redrawn_and_stays_when_training_begins() -> None:
    reports = [(0.0, COMPUTED), (1.5, COMPUTED), (1.6, received(0, 1000, done=True))]

    text = shown(reports, terminal=True)
    assert text.count("\r") == 2
    assert text.endswith("rows from Spark: 1,000 received (8.0 kB)\n")


@pytest.mark.parametrize(("terminal", "verbose"), [(False, 1), (True, 1), (False, 0), (True, 0)])
def test_rows_that_come_at_once_are_not_worth_a_line(terminal: bool, verbose: int) -> None:
    late = [(100.0, COMPUTED)] if not verbose else []
    assert (
        shown(
            [(0.0, COMPUTED), (0.5, received(0, 1000, done=True)), *late], terminal=terminal, verbose=verbose
        )
        == ""
    )
