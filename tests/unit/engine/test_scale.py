"""A meeting point with hundreds of members: coroutines that speak the real protocol."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from benchmarks._members import Member, each, join_all

from kindler.config import RunSettings
from kindler.engine.hub import Hub
from kindler.engine.job import Job, equal_ranks
from kindler.engine.meeting import read_numbers, write_numbers

SECRET = b"s" * 32
SIZE = 200


async def take_part(hub: Hub) -> dict[str, Any]:
    members = await join_all(hub.address, SECRET, SIZE)
    seen: dict[str, Any] = {"threads": threading.active_count()}
    seen["all"] = await each(members, lambda m: m.gather(b"%d" % m.rank))
    seen["sum"] = await each(members, lambda m: m.gather(write_numbers([m.rank, 1]), "sum"))
    state = bytes(5_000)
    seen["first"] = await each(members, lambda m: m.gather(state, () if m.rank else range(SIZE)))
    seen["next"] = await each(members, lambda m: m.gather(b"%d" % m.rank, [(m.rank + 1) % SIZE]))
    await each(members, lambda m: m.send("result", b"%d" % m.rank))
    seen["kept"] = await each(members, Member.receive)
    await each(members, lambda m: m.send("done"))
    done: list[int] = []
    while len(done) < SIZE and (events := list(hub.events(10))):
        done += [event.rank for event in events if event.kind == "done"]
    seen["events"] = sorted(done)
    for member in members:
        member.close()
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    before = threading.active_count()
    with Hub(Job(ranks=equal_ranks("", SIZE), secret=SECRET, settings=RunSettings())) as hub:
        strangers = [socket.create_connection(hub.address, timeout=60) for _ in range(200)]
        seen = asyncio.run(take_part(hub))
        seen["finished"], seen["results"] = hub.finished, hub.results
        for stranger in strangers:
            stranger.close()
    return {**seen, "before": before}


def test_two_hundred_members_and_as_many_strangers_are_served_by_one_thread(seen: dict[str, Any]) -> None:
    assert seen["threads"] == seen["before"] + 1


def test_all_get_what_all_bring_in_the_order_of_ranks(seen: dict[str, Any]) -> None:
    assert seen["all"] == [[b"%d" % rank for rank in range(SIZE)]] * SIZE


def test_all_get_the_sum(seen: dict[str, Any]) -> None:
    assert [read_numbers(parts[0]) for parts in seen["sum"]] == [[sum(range(SIZE)), SIZE]] * SIZE


def test_what_only_one_asks_for_goes_to_that_one(seen: dict[str, Any]) -> None:
    assert [len(parts) for parts in seen["first"]] == [SIZE] + [0] * (SIZE - 1)


def test_each_gets_its_own_choice(seen: dict[str, Any]) -> None:
    assert seen["next"] == [[b"%d" % ((rank + 1) % SIZE)] for rank in range(SIZE)]


def test_every_result_is_kept_before_its_rank_is_done(seen: dict[str, Any]) -> None:
    assert seen["finished"]
    assert {frame.kind for frame in seen["kept"]} == {"kept"}
    assert seen["results"] == {rank: (b"%d" % rank,) for rank in range(SIZE)}
    assert seen["events"] == list(range(SIZE))
