"""Feeds between two sides in one process: in order, bounded, and no end waits for one that is gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kindler.engine.feeds import Feeds, FeedWriter
from kindler.errors import FeedError
from kindler.frame import Frame


def pair() -> tuple[Feeds, Feeds]:
    """Two sides, each of which hears at once what the other sends."""
    here, there = Feeds("worker 1"), Feeds("the driver")
    here.connect(lambda kind, *batch, **fields: there.received(Frame(kind, fields, tuple(map(bytes, batch)))))
    there.connect(lambda kind, *batch, **fields: here.received(Frame(kind, fields, tuple(map(bytes, batch)))))
    return here, there


def test_batches_come_in_order_and_then_the_end() -> None:
    here, there = pair()
    with here.writer("rows") as writer:
        for number in range(3):
            writer.put(b"%d" % number, b"more")

    assert list(there.reader("rows")) == [(b"%d" % number, b"more") for number in range(3)]
    assert there.reader("rows").get() is None


def test_what_is_written_before_the_other_side_is_there_arrives() -> None:
    here, there = Feeds("worker 1"), Feeds("the driver")
    here.writer("rows").put(b"early")
    here.connect(lambda kind, *batch, **fields: there.received(Frame(kind, fields, tuple(map(bytes, batch)))))
    here.writer("rows").end()

    assert list(there.reader("rows")) == [(b"early",)]


def test_a_writer_is_never_further_ahead_than_its_window() -> None:
    here, there = pair()
    sent: list[int] = []
    enough = threading.Event()

    def write() -> None:
        with here.writer("rows", window_bytes=4096) as writer:
            for number in range(20):
                writer.put(bytes(1000), timeout_s=30)
                sent.append(number)
                if number == 2:
                    enough.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(write)
        assert enough.wait(30)
        reader = there.reader("rows")
        for taken in range(20):
            assert len(sent) <= taken + 4
            assert reader.get(30) is not None
        assert reader.get(30) is None
        done.result(30)


def test_a_reader_that_takes_nothing_ends_the_put_in_time() -> None:
    here, _ = pair()
    writer = here.writer("rows", window_bytes=1)
    writer.put(b"first")

    with pytest.raises(FeedError, match=r"feed 'rows': worker 1 has taken nothing for 0.05 s"):
        writer.put(b"second", timeout_s=0.05)


def test_a_put_that_waits_ends_when_the_reader_closes_the_feed() -> None:
    here, there = pair()
    writer = here.writer("rows", window_bytes=1)
    writer.put(b"first")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.put, b"second")
        there.reader("rows").close("enough rows")
        with pytest.raises(FeedError, match="worker 1 closed it: enough rows"):
            waiting.result(30)


@pytest.mark.parametrize(
    ("problem", "message"),
    [("worker 1 was lost: SIGKILL", "worker 1 was lost"), (None, "worker 1 has returned and reads no more")],
)
def test_a_put_that_waits_ends_with_the_process_that_reads(problem: str | None, message: str) -> None:
    here, _ = pair()
    writer = here.writer("rows", window_bytes=1)
    writer.put(b"first")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.put, b"second")
        here.close(problem)
        with pytest.raises(FeedError, match=message):
            waiting.result(30)
    with pytest.raises(FeedError, match=message):
        here.writer("another").put(b"late")


def put_and_fail(writer: FeedWriter) -> None:
    with writer:
        writer.put(b"good")
        raise ValueError("bad row")


def test_a_reader_has_what_came_before_its_writer_failed_and_then_the_reason() -> None:
    here, there = pair()
    with pytest.raises(ValueError, match="bad row"):
        put_and_fail(here.writer("rows"))
    reader = there.reader("rows")

    assert reader.get() == (b"good",)
    with pytest.raises(FeedError, match="feed 'rows': ValueError: bad row"):
        reader.get()


def test_the_end_of_a_process_that_returned_is_the_end_of_what_it_wrote() -> None:
    here, there = pair()
    there.writer("out").put(b"last")
    here.close(None)

    assert list(here.reader("out")) == [(b"last",)]
    assert list(here.reader("never written")) == []


def test_the_end_of_a_process_that_failed_is_raised_at_the_reader() -> None:
    here, _ = pair()
    here.close("worker 1 failed with ValueError: boom")

    with pytest.raises(FeedError, match="worker 1 failed with ValueError: boom"):
        here.reader("out").get()


def test_a_reader_says_when_nothing_comes_in_time_and_that_it_waits() -> None:
    waited: list[int] = []
    feeds = Feeds("the driver", lambda *frame, **fields: None, waiting=lambda: waited.append(1))

    with pytest.raises(TimeoutError, match=r"feed 'rows': nothing was received in 0.05 s"):
        feeds.reader("rows").get(0.05)
    assert waited == [1]


def test_an_ended_feed_takes_no_more() -> None:
    here, _ = pair()
    here.writer("rows").end()

    with pytest.raises(FeedError, match="it has ended"):
        here.writer("rows").put(b"late")
