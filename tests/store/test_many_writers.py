"""Many processes at one store: nothing is lost, nothing is seen half, and killed ones leave only debris."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from kindler import Store
from kindler.store import Version, VersionStore
from tests.store import jobs

KILLS = 50


def run(target: object, url: str, count: int) -> None:
    """Start so many processes at once, and wait for them."""
    context = jobs.processes()
    start = context.Event()
    started = [context.Process(target=target, args=(url, mark, start)) for mark in range(count)]
    for process in started:
        process.start()
    start.set()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * count


def test_sixteen_processes_that_publish_one_name_make_sixteen_versions(om: Store, url: str) -> None:
    run(jobs.publish, url, 16)

    versions = om.datasets.versions("one")
    assert [version.number for version in versions] == list(range(1, 17))
    assert sorted(om.datasets.get(str(version))["mark"] for version in versions) == list(range(16))
    tags = om.datasets.tags("one")
    assert all(om.datasets.get(f"one@of-{mark}") == {"mark": mark} for mark in range(16))
    assert sorted(tags.values()) == list(range(1, 17))


def test_processes_that_append_to_one_name_lose_no_row(om: Store, url: str) -> None:
    run(jobs.append, url, 8)

    rows = om.datasets.get("rows")
    assert rows.shape == (80, 2)
    assert sorted(rows[:, 0]) == sorted(np.repeat(np.arange(8), 10))


def test_writers_that_are_killed_leave_whole_versions_and_debris_that_a_sweep_removes(
    om: Store, url: str
) -> None:
    context, chance = jobs.processes(), random.Random(0)
    om.datasets.list()  # the store is there before the first is killed
    for kill in range(KILLS):
        told, begun = context.Pipe(duplex=False)
        process = context.Process(target=jobs.publish_without_end, args=(url, kill, begun))
        process.start()
        assert told.poll(60)
        time.sleep(chance.uniform(0, 0.05))  # not to wait for something, but to hit any moment
        process.kill()
        process.join(60)

    assert whole(om)
    assert om.sweep(grace_s=0).folders  # some were killed in the middle
    assert whole(om)
    needed = {file.sha256 for version in every_version(om) for file in version.files}
    assert set(om.store.blobs.old(-60)) == needed
    assert not list(om.store.blobs.stage.glob("*"))


def every_version(om: Store) -> list[Version]:
    return [version for name in om.datasets.list() for version in om.datasets.versions(name)]


def whole(om: Store) -> int:
    """How many versions there are, after a look into the newest ones of each name, which hold all parts."""
    for name in om.datasets.list():
        versions = om.datasets.versions(name)
        assert [version.number for version in versions] == list(range(1, len(versions) + 1))
        expected = sum(version.attributes["added"] for version in versions)
        assert om.datasets.get(name).sum() == pytest.approx(expected)
    return len(every_version(om))


def test_a_sweep_beside_live_writers_takes_nothing_that_they_need(om: Store, url: str) -> None:
    context = jobs.processes()
    om.datasets.list()
    writers = [context.Process(target=jobs.publish_many, args=(url, mark, 12)) for mark in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        om.sweep(grace_s=0)
    for writer in writers:
        writer.join(60)

    assert [writer.exitcode for writer in writers] == [0] * 4
    assert om.datasets.list("of/*") == [f"of/{mark}" for mark in range(4)]
    for version in every_version(om):
        i = version.number - 1
        mark = int(version.name.removeprefix("of/"))
        assert om.datasets.get(str(version)) == [mark if i % 2 else 0, i]


def test_a_blob_that_was_swept_before_its_version_was_published_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = VersionStore.open(tmp_path)
    om = Store(tmp_path)
    put, times = store.blobs.put, []

    def put_and_sweep(source: Path, sha256: str) -> None:
        put(source, sha256)
        times.append(sha256)
        if len(times) == 1:
            assert om.sweep(grace_s=0).blobs == 1

    monkeypatch.setattr(store.blobs, "put", put_and_sweep)
    monkeypatch.setattr(om._opened, "_store", store)
    om.datasets.put({"a": 1}, "x")

    assert len(times) == 2
    assert om.datasets.get("x") == {"a": 1}
