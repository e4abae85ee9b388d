"""Processes that are left to themselves: nobody waits for them, and they may outlive what started them.

Python warns of a `Popen` that is dropped while its process runs, and only that `Popen` can collect the
process once it has ended. So it is kept here: what has ended is collected whenever another one is left, and
at the end of the program nothing is said of those that still run.
"""

from __future__ import annotations

import atexit
import subprocess
from typing import Any

_left: list[subprocess.Popen[Any]] = []


def leave_running(process: subprocess.Popen[Any]) -> None:
    """Neither wait for a process nor warn that it still runs."""
    for one in [*_left]:
        if one.poll() is not None:
            _left.remove(one)
    _left.append(process)


@atexit.register
def _say_nothing() -> None:
    for process in _left:
        process.poll()
        if process.returncode is None:
            process.returncode = 0  # `Popen.__del__` looks at this alone
