"""The stacks of a worker, as its supervisor reads them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kindler.engine.supervisor import Supervisor
from kindler.engine.worker import STACKS


class SlowWriter:
    """A worker on a busy machine: it pauses between two pieces of its stacks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writes: threading.Thread | None = None
        path.write_text("main 0x0000000000000001\n")

    def ask_for_stacks(self) -> None:
        self._writes = threading.Thread(target=self._write)
        self._writes.start()

    def _write(self) -> None:
        head = "Thread 0x0000000000000002 (most recent call first):\n"
        frames = 'Current thread 0x0000000000000001:\n  File "/home/me/job.py", line 3 in on_step_end\n'
        for piece, pause_s in ((head, 0.35), (frames, 0.0)):
            with self._path.open("a") as file:
                file.write(piece)
            threading.Event().wait(pause_s)

    def join(self) -> None:
        assert self._writes is not None
        self._writes.join()


def test_stacks_that_come_with_a_pause_are_told_whole(tmp_path: Path) -> None:
    supervisor: Any = object.__new__(Supervisor)
    writer = SlowWriter(tmp_path / STACKS)
    supervisor.scratch, supervisor._child, supervisor._aborted = tmp_path, writer, threading.Event()

    told = supervisor._stacks()

    writer.join()
    assert "in on_step_end" in told
