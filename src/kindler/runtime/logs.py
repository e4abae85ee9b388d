"""The output of a worker process, in a file: nobody reads a pipe while there are no tasks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_LONGEST_BYTES = 1 << 20
_TAIL_LINES = 40


class Log:
    """The log of a process.

    Args:
        folder: The folder of the log file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log"
        self._begin = 0

    def take_over(self) -> None:
        """Redirect this process's output to the log."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)

    def begin(self) -> None:
        """A task begins; a log that has become long is truncated."""
        _flush()
        if self._path.stat().st_size > _LONGEST_BYTES:
            os.truncate(self._path, 0)
        self._begin = self._path.stat().st_size

    def tail(self) -> str:
        """The last lines since the task began; or since the start, when read by another process."""
        _flush()
        try:
            with self._path.open("rb") as file:
                file.seek(max(self._begin, self._path.stat().st_size - _LONGEST_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
