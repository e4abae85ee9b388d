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

from kindler import Store
from kindler.errors import NotFoundError
from kindler.serve import model_loading
from kindler.serve.http_errors import Problem
from kindler.serve.model_registry import LoadedModel, ModelRegistry
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.threads import Threads
from tests.serve.served import constant


@pytest.fixture
def om(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def play(
    om: Store, scenario: Callable[[ModelRegistry], Coroutine[Any, Any, None]], **settings: Any
) -> dict[str, int]:
    """Run a scenario on an event loop; returns how many loads there were, by outcome."""
    stats = Stats()

    async def run() -> None:
        threads = [Threads(8, "test") for _ in range(3)]
        named = dict(zip(("catalog_threads", "lookup_threads", "load_threads"), threads, strict=True))
        models = ModelRegistry(om, ServeSettings(**{"isolation": "none", **settings}), stats=stats, **named)
        await scenario(models)
        models.close()
        for pool in threads:
            pool.shutdown()

    asyncio.run(run())
    om.close()
    return dict(stats.loads)


async def value_of(model: LoadedModel) -> float:
    ticket = model.batcher.submit({"x": np.zeros((1, 3))}, "predict", rows=1, timeout_s=30)
    return float((await ticket.future)["predict"][0])


def name(text: str) -> tuple[str, str, str | None]:
    return ("default", text, None)


def test_many_who_ask_at_once_wait_for_one_load(om: Store) -> None:
    om.models.put(constant(1), "net")

    async def scenario(models: ModelRegistry) -> None:
        found = await asyncio.gather(*(models.find(name(t)) for t in ("net", "net@1", "net", "net@latest")))
        assert len(set(map(id, found))) == 1

    assert play(om, scenario) == {"loaded": 1}


def test_a_tag_that_moved_is_served_by_the_old_version_until_the_new_one_is_there(om: Store) -> None:
    om.models.put(constant(1), "net", tag="prod")
    om.models.put(constant(2), "net")

    async def scenario(models: ModelRegistry) -> None:
        old = await models.find(name("net@prod"))
        om.models.tag("net@2", "prod")
        assert models.at_hand(name("net@prod")) is old  # not looked up yet
        await models.moved("default", "net")
        new = models.at_hand(name("net@prod"))
        assert new is not None
        assert (await value_of(old), await value_of(new)) == (1, 2)  # the old one still answers what it has

    play(om, scenario, refresh_s=1000)


def test_a_new_version_that_cannot_be_loaded_changes_nothing(om: Store) -> None:
    om.models.put(constant(1), "net")

    async def scenario(models: ModelRegistry) -> None:
        await models.find(name("net"))
        om.models.put(object, "net", kind="pickle", trusted=True)
        await models.moved("default", "net")
        assert await value_of(await models.find(name("net"))) == 1
        with pytest.raises(Problem) as caught:
            await models.find(name("net@2"))
        assert caught.value.status == 403

    assert play(om, scenario) == {"loaded": 1, "failed": 1}


def test_a_dropped_version_is_not_found_any_more(om: Store) -> None:
    om.models.put(constant(1), "net")

    async def scenario(models: ModelRegistry) -> None:
        await models.find(name("net@1"))
        om.models.drop("net")
        with pytest.raises(NotFoundError, match="net"):
            await models.find(name("net@1"))

    play(om, scenario, refresh_s=0)


def test_a_model_that_is_unloaded_while_it_is_loaded_answers_nobody_until_it_is_loaded_again(
    om: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    om.models.put(constant(1), "net")
    go_on = threading.Event()

    async def scenario(models: ModelRegistry) -> None:
        load = model_loading.load
        monkeypatch.setattr(model_loading, "load", lambda *args, **kw: (go_on.wait(), load(*args, **kw))[1])
        asking = [asyncio.create_task(models.find(name(text))) for text in ("net", "net@1")]
        while not models._loading:
            await asyncio.sleep(0)
        await models.unload("default", "net")
        go_on.set()
        for one in asking:
            with pytest.raises(Problem, match="was unloaded"):
                await one
        assert models.loaded() == []
        with pytest.raises(Problem, match="was unloaded"):
            await models.find(name("net"))
        assert await value_of(await models.load("default", "net")) == 1

    assert play(om, scenario) == {"loaded": 1}


def test_the_model_that_was_used_least_lately_leaves_when_memory_is_short(om: Store) -> None:
    sizes = [om.models.put(constant(i), f"net{i}").size for i in range(3)]

    async def scenario(models: ModelRegistry) -> None:
        for text in ("net0", "net1", "net0", "net2"):
            await models.find(name(text))
        assert sorted(r.version.name for r in models.loaded()) == ["net0", "net2"]
        assert await value_of(await models.find(name("net1"))) == 1

    assert play(om, scenario, memory_bytes=2 * max(sizes), refresh_s=10_000) == {"loaded": 4}


def test_the_model_that_was_used_least_lately_leaves_when_descriptors_are_short(om: Store) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = len(os.listdir("/proc/self/fd")) + 64
    count = files // 16 + 1  # half of the descriptors are for models, 8 for each
    for i in range(count):
        om.models.put(constant(float(i)), f"m{i}")

    async def scenario(models: ModelRegistry) -> None:
        for i in range(count):
            await models.find(name(f"m{i}"))
        assert models.at_hand(name("m0")) is None
        assert models.at_hand(name(f"m{count - 1}")) is not None

    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        assert play(om, scenario, isolation="process", processes=1, timeout_s=300)["loaded"] == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_version_that_cannot_be_loaded_is_tried_less_and_less_often(om: Store) -> None:
    om.models.put(constant(1), "net")

    async def scenario(models: ModelRegistry) -> None:
        await models.find(name("net"))
        om.models.put(object, "net", kind="pickle", trusted=True)
        waits = []
        for _ in range(3):
            for _ in range(20):  # refresh_s is 0: each looks again
                assert await value_of(await models.find(name("net"))) == 1
            (failed,) = models._failed.values()
            waits.append(failed.wait_s)
            (key,) = models._failed
            models._failed[key] = replace(failed, until=0.0)
        assert waits == [2, 4, 8]
        await models.moved("default", "net")  # who moves a tag has it tried at once
        (failed,) = models._failed.values()
        assert failed.wait_s == 2

    assert play(om, scenario, refresh_s=0) == {"loaded": 1, "failed": 4}


def test_a_name_that_there_is_not_is_looked_up_once_and_apart_from_others(om: Store) -> None:
    om.models.put(constant(1), "net")
    looked: list[str] = []

    async def scenario(models: ModelRegistry) -> None:
        found = models.version

        def counted(asked: Any, executor: Any = None) -> Any:
            looked.append(asked[1])
            assert (executor is models._lookup_threads) == (asked[1] == "nte" or looked.count("net") == 1)
            return found(asked, executor)

        models.version = counted  # type: ignore[method-assign]
        for _ in range(5):
            with pytest.raises(NotFoundError, match="nte"):
                await models.find(name("nte"))
        await models.find(name("net"))
        await models.moved("default", "net")

    play(om, scenario, refresh_s=1000)
    assert looked == ["nte", "net", "net"]


def test_a_model_that_never_ends_loading_does_not_keep_others_from_it(
    om: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    load = model_loading.load

    def slow(store: Any, version: Any, **options: Any) -> Any:
        if version.name != "net":
            over.wait(60)
        return load(store, version, **options)

    monkeypatch.setattr(model_loading, "load", slow)
    for text in ("a", "b", "c", "net"):
        om.models.put(constant(1), text)

    async def scenario(models: ModelRegistry) -> None:
        hung = [asyncio.create_task(models.find(name(text))) for text in "abc"]
        results = await asyncio.gather(*hung, return_exceptions=True)
        assert [(r.status, "is still loading" in r.message) for r in results if isinstance(r, Problem)] == [
            (504, True)
        ] * 3
        assert await value_of(await models.find(name("net"))) == 1
        over.set()

    play(om, scenario, timeout_s=2)


def test_models_of_the_same_name_in_two_buckets_are_counted_apart(om: Store) -> None:
    om.models.put(constant(1), "net")
    om["other"].models.put(constant(2), "net")

    async def scenario(models: ModelRegistry) -> None:
        first = await models.find(name("net"))
        second = await models.find(("other", "net", None))
        assert first is not second
        assert sorted(models.stats.models) == ["net", "other:net"]

    play(om, scenario)
