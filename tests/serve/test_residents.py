"""Which models are in memory: loaded once, swapped without a pause, taken out when memory is short."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import Omega
from kindler.errors import NotFoundError
from kindler.serve.http_errors import Problem
from kindler.serve.loaded_models import Resident, Residents
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.threads import Threads
from tests.serve.served import constant


@pytest.fixture
def om(tmp_path: Path) -> Omega:
    return Omega(tmp_path / "store")


def play(
    om: Omega, scenario: Callable[[Residents], Coroutine[Any, Any, None]], **settings: Any
) -> dict[str, float]:
    """Run a scenario on an event loop; returns how many loads there were, by outcome."""
    stats = Stats()

    async def run() -> None:
        looks, asks, loads = (Threads(8, "test") for _ in range(3))
        chosen = ServeSettings(**{"isolation": "none", **settings})
        residents = Residents(om, chosen, looks=looks, asks=asks, loads=loads, stats=stats)
        await scenario(residents)
        residents.close()
        for pool in (looks, asks, loads):
            pool.shutdown()

    asyncio.run(run())
    om.close()
    samples = [s for metric in stats.loads.collect() for s in metric.samples if s.name.endswith("_total")]
    return {s.labels["outcome"]: s.value for s in samples}


async def value_of(resident: Resident) -> float:
    ticket = resident.batcher.submit({"x": np.zeros((1, 3))}, "predict", rows=1, timeout_s=30)
    return float((await ticket.future)["predict"][0])


def name(text: str) -> tuple[str, str, str | None]:
    return ("default", text, None)


def test_many_who_ask_at_once_wait_for_one_load(om: Omega) -> None:
    om.models.put(constant(1), "net")

    async def scenario(residents: Residents) -> None:
        found = await asyncio.gather(
            *(residents.find(name(t)) for t in ("net", "net@1", "net", "net@latest"))
        )
        assert len(set(map(id, found))) == 1

    assert play(om, scenario) == {"loaded": 1}


def test_an_alias_that_moved_is_served_by_the_old_version_until_the_new_one_is_there(om: Omega) -> None:
    om.models.put(constant(1), "net", tag="prod")
    om.models.put(constant(2), "net")

    async def scenario(residents: Residents) -> None:
        old = await residents.find(name("net@prod"))
        om.models.tag("net@2", "prod")
        assert residents.at_hand(name("net@prod")) is old  # not looked up yet
        await residents.moved("default", "net")
        new = residents.at_hand(name("net@prod"))
        assert new is not None
        assert (await value_of(old), await value_of(new)) == (1, 2)  # the old one still answers what it has

    play(om, scenario, refresh_s=1000)


def test_a_new_version_that_cannot_be_loaded_changes_nothing(om: Omega) -> None:
    om.models.put(constant(1), "net")

    async def scenario(residents: Residents) -> None:
        await residents.find(name("net"))
        om.models.put(object, "net", kind="pickle", trusted=True)
        await residents.moved("default", "net")
        assert await value_of(await residents.find(name("net"))) == 1
        with pytest.raises(Problem) as caught:
            await residents.find(name("net@2"))
        assert caught.value.status == 403

    assert play(om, scenario) == {"loaded": 1, "failed": 1}


def test_a_dropped_version_is_not_found_any_more(om: Omega) -> None:
    om.models.put(constant(1), "net")

    async def scenario(residents: Residents) -> None:
        await residents.find(name("net@1"))
        om.models.drop("net")
        with pytest.raises(NotFoundError, match="net"):
            await residents.find(name("net@1"))

    play(om, scenario, refresh_s=0)


def test_a_model_that_is_unloaded_while_it_is_loaded_answers_nobody_until_it_is_loaded_again(
    om: Omega, monkeypatch: pytest.MonkeyPatch
) -> None:
    om.models.put(constant(1), "net")
    go_on = threading.Event()

    async def scenario(residents: Residents) -> None:
        read = residents._read
        monkeypatch.setattr(residents, "_read", lambda version: (go_on.wait(), read(version))[1])
        asking = [asyncio.create_task(residents.find(name(text))) for text in ("net", "net@1")]
        while not residents._loading:
            await asyncio.sleep(0)
        await residents.unload("default", "net")
        go_on.set()
        for one in asking:
            with pytest.raises(Problem, match="was unloaded"):
                await one
        assert residents.shown() == []
        with pytest.raises(Problem, match="was unloaded"):
            await residents.find(name("net"))
        assert await value_of(await residents.load("default", "net")) == 1

    assert play(om, scenario) == {"loaded": 1}


def test_the_model_that_was_used_least_lately_leaves_when_memory_is_short(om: Omega) -> None:
    sizes = [om.models.put(constant(i), f"net{i}").size for i in range(3)]

    async def scenario(residents: Residents) -> None:
        for text in ("net0", "net1", "net0", "net2"):
            await residents.find(name(text))
        assert sorted(r.version.name for r in residents.shown()) == ["net0", "net2"]
        assert await value_of(await residents.find(name("net1"))) == 1

    assert play(om, scenario, memory_bytes=2 * max(sizes), refresh_s=10_000) == {"loaded": 4}


def test_the_model_that_was_used_least_lately_leaves_when_descriptors_are_short(om: Omega) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = len(os.listdir("/proc/self/fd")) + 64
    count = files // 16 + 1  # half of the descriptors are for models, 8 for each
    for i in range(count):
        om.models.put(constant(float(i)), f"m{i}")

    async def scenario(residents: Residents) -> None:
        for i in range(count):
            await residents.find(name(f"m{i}"))
        assert residents.at_hand(name("m0")) is None
        assert residents.at_hand(name(f"m{count - 1}")) is not None

    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        assert play(om, scenario, isolation="process", processes=1, timeout_s=300)["loaded"] == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_version_that_cannot_be_loaded_is_tried_less_and_less_often(om: Omega) -> None:
    om.models.put(constant(1), "net")

    async def scenario(residents: Residents) -> None:
        await residents.find(name("net"))
        om.models.put(object, "net", kind="pickle", trusted=True)
        waits = []
        for _ in range(3):
            for _ in range(20):  # refresh_s is 0: each looks again
                assert await value_of(await residents.find(name("net"))) == 1
            (failed,) = residents._failed.values()
            waits.append(failed.wait_s)
            (key,) = residents._failed
            residents._failed[key] = replace(failed, until=0.0)
        assert waits == [2, 4, 8]
        await residents.moved("default", "net")  # who moves an alias has it tried at once
        (failed,) = residents._failed.values()
        assert failed.wait_s == 2

    assert play(om, scenario, refresh_s=0) == {"loaded": 1, "failed": 4}


def test_a_name_that_there_is_not_is_looked_up_once_and_apart_from_others(om: Omega) -> None:
    om.models.put(constant(1), "net")
    looked: list[str] = []

    async def scenario(residents: Residents) -> None:
        found = residents.version

        def counted(asked: Any, executor: Any = None) -> Any:
            looked.append(asked[1])
            assert (executor is residents._asks) == (asked[1] == "nte" or looked.count("net") == 1)
            return found(asked, executor)

        residents.version = counted  # type: ignore[method-assign]
        for _ in range(5):
            with pytest.raises(NotFoundError, match="nte"):
                await residents.find(name("nte"))
        await residents.find(name("net"))
        await residents.moved("default", "net")

    play(om, scenario, refresh_s=1000)
    assert looked == ["nte", "net", "net"]


def test_a_model_that_never_ends_loading_does_not_keep_others_from_it(
    om: Omega, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    found = Residents._read

    def read(self: Residents, version: Any) -> Any:
        if version.name != "net":
            over.wait(60)
        return found(self, version)

    monkeypatch.setattr(Residents, "_read", read)
    for text in ("a", "b", "c", "net"):
        om.models.put(constant(1), text)

    async def scenario(residents: Residents) -> None:
        hung = [asyncio.create_task(residents.find(name(text))) for text in "abc"]
        results = await asyncio.gather(*hung, return_exceptions=True)
        assert [(r.status, "still being loaded" in r.message) for r in results if isinstance(r, Problem)] == [
            (504, True)
        ] * 3
        assert await value_of(await residents.find(name("net"))) == 1
        over.set()

    play(om, scenario, timeout_s=2)


def test_models_of_the_same_name_in_two_buckets_are_counted_apart(om: Omega) -> None:
    om.models.put(constant(1), "net")
    om["other"].models.put(constant(2), "net")

    async def scenario(residents: Residents) -> None:
        first = await residents.find(name("net"))
        second = await residents.find(("other", "net", None))
        assert first.stats is not second.stats
        assert sorted(residents._stats.models) == ["net", "other:net"]

    play(om, scenario)
