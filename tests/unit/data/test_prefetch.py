"""A thread that works ahead, ends with its iterator and hands its errors on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kindler.data.batches import ahead


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("maker")]


def test_items_come_in_order_and_the_thread_ends_with_them() -> None:
    assert list(ahead(iter(range(100)), depth=2, name="maker")) == list(range(100))
    assert not running()


def test_it_runs_no_further_ahead_than_it_may() -> None:
    made: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            if i == 2:
                third.set()
            yield i

    source = ahead(items(), depth=2, name="maker")
    assert next(source) == 0
    assert third.wait(10)  # one was taken, so there is room for a third
    assert len(made) == 3
    source.close()
    assert not running()


def test_an_error_reaches_the_one_who_waits_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    source = ahead(items(), depth=2, name="maker")

    assert next(source) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(source)
    assert not running()


def test_closing_early_ends_the_thread_and_closes_the_items() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    source = ahead(items(), depth=3, name="maker")
    next(source)
    source.close()

    assert closed.is_set()
    assert not running()
