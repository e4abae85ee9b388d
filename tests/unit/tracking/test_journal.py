"""What is said is written in order, by another thread, and tried again after what failed."""

from __future__ import annotations

import logging
import threading

import pytest

from kindler.tracking.logger import Journal


def test_entries_are_written_in_order_and_all_before_it_is_closed() -> None:
    wrote: list[int] = []
    journal = Journal("a file")
    for number in range(100):
        journal.add(lambda number=number: wrote.append(number))  # type: ignore[misc]

    assert journal.close(10) == 0
    assert wrote == list(range(100))


def test_what_could_not_be_written_is_tried_again_before_what_comes_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrote: list[str] = []
    failed = threading.Event()

    def first() -> None:
        if not failed.is_set():
            failed.set()
            raise ConnectionError("nobody is there\nat all")
        wrote.append("first")

    journal = Journal("a server")
    with caplog.at_level(logging.WARNING):
        journal.add(first)
        assert failed.wait(10)
        journal.add(lambda: wrote.append("second"))
        assert journal.close(10) == 0

    assert wrote == ["first", "second"]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write to a server; training continues: nobody is there"
    ]


def test_what_is_never_written_is_counted_at_the_end_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> None:
        raise ConnectionError

    journal = Journal("a server")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            journal.add(fails)
        assert journal.close(10) == 3

    assert len(caplog.records) == 1
