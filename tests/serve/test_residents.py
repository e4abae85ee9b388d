"""Which models are in memory: loaded once, swapped without a pause, taken out when memory is short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import Omega
from kindler.errors import NotFoundError
from kindler.serve.problems import Problem
from kindler.serve.residents import Resident, Residents
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
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
        with ThreadPoolExecutor(2) as pool:
            residents = Residents(
                om, ServeSettings(**settings), looks=pool, asks=pool, loads=pool, stats=stats
            )
            await scenario(residents)
            residents.close()

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
        with pytest.raises(NotFoundError):
            await residents.find(name("net@1"))

    play(om, scenario, refresh_s=0)


def test_the_model_that_was_used_least_lately_leaves_when_memory_is_short(om: Omega) -> None:
    sizes = [om.models.put(constant(i), f"net{i}").size for i in range(3)]

    async def scenario(residents: Residents) -> None:
        for text in ("net0", "net1", "net0", "net2"):
            await residents.find(name(text))
        assert sorted(r.version.name for r in residents.shown()) == ["net0", "net2"]
        assert await value_of(await residents.find(name("net1"))) == 1

    assert play(om, scenario, memory_bytes=2 * max(sizes), refresh_s=10_000) == {"loaded": 4}
