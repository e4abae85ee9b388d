"""Bodies: how much of them a server holds at once."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import MutableMapping
from typing import Any

import pytest

from kindler.serve.bodies import Bodies, ClientGoneError, Receive
from kindler.serve.http_errors import Problem
from kindler.serve.settings import ServeSettings
from kindler.serve.threads import Threads


def sending(*parts: bytes, ends: bool = True) -> Receive:
    """A client that sends these parts, and then nothing more or goes away."""
    waiting = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    waiting[-1]["more_body"] = not ends

    async def receive() -> MutableMapping[str, Any]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    return receive


def test_what_is_held_is_counted_until_it_is_let_go_however_it_ends() -> None:
    async def play() -> None:
        bodies = Bodies(ServeSettings(body_bytes=100, queue_bytes=100))
        first = await bodies.read(sending(b"x" * 40, b"x" * 40), {})
        assert bodies.held_bytes == 80
        with pytest.raises(Problem) as caught:
            await bodies.read(sending(b"x" * 10, b"x" * 20), {})
        assert caught.value.status == 503
        assert "retry-after" in caught.value.headers
        with pytest.raises(ClientGoneError):
            await bodies.read(sending(b"x" * 10, ends=False), {})
        assert bodies.held_bytes == 80
        bodies.release(first)
        assert (
            len(await bodies.read(sending(b"x" * 100), {})) == 100
        )  # one alone may always be as large as it may
        assert bodies.held_bytes == 100

    asyncio.run(play())


def test_what_is_decompressed_counts_as_what_it_became() -> None:
    async def play() -> None:
        bodies = Bodies(ServeSettings(body_bytes=1000))
        content = await bodies.read(sending(gzip.compress(b" " * 900)), {"content-encoding": "gzip"})
        assert bodies.held_bytes == len(content) == 900
        with pytest.raises(Problem) as caught:
            await bodies.read(sending(b"no gzip"), {"content-encoding": "gzip"})
        assert (caught.value.status, bodies.held_bytes) == (400, 900)

    asyncio.run(play())


def test_what_becomes_large_is_unpacked_by_another_process_with_the_same_limits() -> None:
    threads = Threads(1, "kindler-body")
    bodies = Bodies(ServeSettings(body_bytes=3 << 20), threads)
    large = bytes(3 << 20)

    async def play() -> None:
        coding = {"content-encoding": "gzip"}
        assert await bodies.read(sending(gzip.compress(large)), coding) == large
        assert bodies.held_bytes == 3 << 20
        for sent, status in ((large + b"x", 413), (bytes(1 << 20), 400)):
            with pytest.raises(Problem) as caught:
                await bodies.read(sending(gzip.compress(sent)[: None if status == 413 else -9]), coding)
            assert caught.value.status == status
        assert bodies.held_bytes == 3 << 20

    try:
        asyncio.run(play())
    finally:
        bodies.close()
        threads.shutdown()


def test_only_who_goes_on_sending_bodies_that_are_costly_to_refuse_waits_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("kindler.serve.bodies.time.monotonic", lambda: now)
    bodies = Bodies(ServeSettings())
    small, hidden = Problem(400, "no JSON"), Problem(413, "too many rows")
    hidden.costly = True

    assert bodies.pause_after(hidden, 300, 5.0) == 0
    assert bodies.pause_after(small, 300, 60.0) == 0
    assert bodies.pause_after(hidden, 300, 0.1) == pytest.approx(2.0)  # 20 times as long as it took
    assert bodies.pause_after(small, 1 << 20, 0.1) == pytest.approx(4.0)
    assert bodies.pause_after(Problem(504, "the model hangs"), 1 << 20, 60.0) == 0  # not the body's fault
    assert bodies.pause_after(hidden, 300, 60.0) == 10.0
    now += 3600
    assert bodies.pause_after(hidden, 300, 4.9) == 0


def test_a_body_that_stops_coming_is_given_up() -> None:
    async def never() -> MutableMapping[str, Any]:
        return await asyncio.get_running_loop().create_future()

    async def play() -> None:
        bodies = Bodies(ServeSettings(timeout_s=0.01))
        with pytest.raises(Problem) as caught:
            await bodies.read(never, {})
        assert (caught.value.status, caught.value.headers["connection"]) == (408, "close")
        assert bodies.held_bytes == 0

    asyncio.run(play())
