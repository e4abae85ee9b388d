"""Lines that come through a pipe."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kindler.engine.fork_server import PrintedLines


@contextmanager
def pipe() -> Iterator[tuple[int, PrintedLines, list[str]]]:
    """The end to write to, what reads the other, and the lines that it has told."""
    reading, writing = os.pipe()
    told: list[str] = []
    with os.fdopen(reading, "rb") as output:
        yield writing, PrintedLines(output, told.append), told


def test_lines_are_told_as_they_come_until_the_other_end_is_closed() -> None:
    with pipe() as (writing, lines, told):
        pumping = threading.Thread(target=lines.pump)
        pumping.start()
        os.write(writing, b"first\nsec")
        os.write(writing, "ond \u00e9\n\nlast".encode())
        os.close(writing)
        pumping.join()

    assert told == ["first", "second \u00e9", "", "last"]


def test_catching_up_tells_what_is_in_the_pipe_and_does_not_wait_for_more() -> None:
    with pipe() as (writing, lines, told):
        lines.catch_up()
        os.write(writing, b"first\nsecond")
        lines.catch_up()
        assert told == ["first", "second"]
        os.write(writing, b"third\n")
        lines.catch_up()
        os.close(writing)

    assert told == ["first", "second", "third"]


def test_nothing_is_lost_between_one_that_pumps_and_one_that_catches_up() -> None:
    with pipe() as (writing, lines, told):
        pumping = threading.Thread(target=lines.pump)
        pumping.start()
        for number in range(2_000):
            os.write(writing, b"%d\n" % number)
            if number % 3 == 0:
                lines.catch_up()
                assert len(told) == number + 1
        os.close(writing)
        pumping.join()

    assert told == [str(number) for number in range(2_000)]
