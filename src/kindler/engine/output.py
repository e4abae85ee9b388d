"""What a worker process prints, line by line, and nothing of it lost: how it writes, and how it is read."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import termios
import threading
from collections.abc import Callable
from typing import IO

_READ_BYTES = 65536
_LOOK_MS = 1000


class PrintedLines:
    """Passes on the lines that come through a pipe.

    Args:
        output: The end of the pipe that is read; nobody else reads it.
        tell: Gets every line, without its end.
    """

    def __init__(self, output: IO[bytes], tell: Callable[[str], None]) -> None:
        self._output = output
        self._tell = tell
        self._rest = bytearray()  # of a line whose end has not come
        self._reading = threading.Lock()

    def pump(self) -> None:
        """Pass on lines as they come, until nobody has the other end any more."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        more = True
        while more:
            poll.poll(_LOOK_MS)
            with self._reading:  # asked again: `catch_up` may have been faster
                if self._output.closed:
                    return
                if poll.poll(0):
                    more = self._read(_READ_BYTES) > 0
        self.catch_up()

    def catch_up(self) -> None:
        """Pass on all that was written before this call, an unfinished line too."""
        with self._reading:
            left = 0 if self._output.closed else self._waiting()
            while left > 0 and (came := self._read(min(left, _READ_BYTES))):
                left -= came
            if self._rest:
                self._tell(_text(self._rest))
                self._rest.clear()

    def close(self) -> None:
        """Pass on what is left, and close this end of the pipe, which `pump` notices."""
        self.catch_up()
        with self._reading:
            self._output.close()

    def _waiting(self) -> int:
        """How many bytes are in the pipe."""
        (count,) = struct.unpack("i", fcntl.ioctl(self._output, termios.FIONREAD, bytes(4)))
        return int(count)

    def _read(self, limit: int) -> int:
        data = os.read(self._output.fileno(), limit)
        self._rest += data
        if b"\n" in data:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._tell(_text(line))
        return len(data)


def print_line(line: str) -> None:
    """Print a line whole and at once: where output is a pipe, Java may write to the same one."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def flush_output() -> None:
    """Have all that was printed in the pipe, or where else it goes."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 - a closed one, or one of the user's own
            continue


def _text(line: bytearray) -> str:
    return line.decode(errors="replace")
