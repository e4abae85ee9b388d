"""Processes that are left to themselves: Python says nothing of them, and collects those that have ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kindler.engine import fork_server

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, subprocess, sys
from kindler.engine.fork_server import leave_running

until_i_end, _ = os.pipe()
{what}(subprocess.Popen([sys.executable, "-c", "input()"], stdin=until_i_end, stderr=subprocess.DEVNULL))
"""


@pytest.mark.parametrize(("what", "warned"), [("leave_running", False), ("print", True)])
def test_no_warning_is_given_of_a_process_that_is_left(what: str, warned: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM.format(what=what)],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert ("is still running" in done.stderr) == warned


def test_what_has_ended_is_collected_when_another_one_is_left() -> None:
    first, second = (subprocess.Popen(["true"]) for _ in range(2))
    first.wait(60)

    fork_server.leave_running(first)
    fork_server.leave_running(second)

    assert first not in fork_server._left_running
    assert second in fork_server._left_running
    second.wait(60)
