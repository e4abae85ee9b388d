"""The store with faults at every system call that touches its files, those of SQLite and Arrow among them.

After each: what was acknowledged is there and equal, what was not is there wholly or not at all, a sweep
leaves no byte that nothing needs, and the next put works.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler import Store
from kindler.errors import NotFoundError
from tests.faults import kernel
from tests.faults.kernel import FILES, Fault, Watched, watched
from tests.faults.points import faults, told

pytestmark = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())

# Fault -> how many points of a scenario are tried in the gate.
KINDS = {"kill": 20, "error": 20, "full": 6, "torn": 8, "short": 2, "delay": 1, "swept": 5, "written": 5}
DEADLINE_S = 60.0

Facts = Mapping[str, Any]  # what is in the store: "net@3" or "net@prod" -> its value, None if it was dropped


def rows(*marks: int) -> Any:
    return np.repeat(np.array(marks, np.int64), 1000)


BEFORE: Facts = {"rows@1": rows(1), "rows@2": rows(1, 2), "rows@prod": rows(1), "old@1": {"mark": 1}}


def prepare(store: Store) -> None:
    store.datasets.put(rows(1), "rows", tag="prod")
    store.datasets.put(rows(2), "rows", mode="append")
    store.datasets.put({"mark": 1}, "old")
    store.datasets.put({"mark": "debris"}, "debris")
    store.datasets.drop("debris")


def put(store: Store) -> Facts:
    version = store.datasets.put({"mark": 2}, "new", mode="replace", tag="prod")
    return {str(version): {"mark": 2}, "new@prod": {"mark": 2}}


def put_again(store: Store) -> Facts:
    version = store.datasets.put(rows(7), "rows", mode="replace", tag=["prod", "best"])
    return {str(version): rows(7), "rows@prod": rows(7), "rows@best": rows(7)}


def put_table(store: Store) -> Facts:
    table = pa.table({"mark": rows(3, 4)})
    return {str(store.datasets.put(table, "table")): table}


def append(store: Store) -> Facts:
    before = store.datasets.get("rows")
    version = store.datasets.put(rows(5), "rows", mode="append")
    return {str(version): store.datasets.get(str(version))} if len(before) else {}


def drop(store: Store) -> Facts:
    store.datasets.drop("rows@1", force=True)
    store.datasets.drop("old", force=True)
    return {"rows@1": None, "rows@prod": None, "old@1": None}


def sweep(store: Store) -> Facts:
    store.sweep(grace_s=0)
    return {}


def tag(store: Store) -> Facts:
    store.datasets.tag("rows@2", "prod")
    return {"rows@prod": rows(1, 2), str(store.datasets.copy("rows@1", "copied")): rows(1)}


def archive(store: Store) -> Facts:
    file = store.datasets.export("rows@2", Path(store.store.url) / "rows.zip")
    version = store.datasets.import_(file, "imported")
    return {str(version): rows(1, 2)}


# Name -> the steps, and what is uncertain while they are under way.
SCENARIOS: dict[str, tuple[tuple[Callable[[Store], Facts], ...], tuple[str, ...]]] = {
    "open": ((put,), ()),
    "put": ((put, put_again), ("rows@prod",)),
    "table": ((put_table,), ()),
    "append": ((append, append), ()),
    "drop": ((drop, sweep), ("rows@1", "rows@prod", "old@1")),
    "tag": ((tag,), ("rows@prod",)),
    "archive": ((archive,), ()),
}


def perform(url: Path, steps: tuple[Callable[[Store], Facts], ...], talk: Connection) -> None:
    """Each step once, and once more after an error."""
    with Store(url) as store:
        for step in steps:
            for _ in range(2):
                try:
                    talk.send(step(store))
                    break
                except Exception as exc:
                    talk.send((type(exc), str(exc)))
                    talk.recv()
    talk.send("end")


def followed(program: Watched) -> tuple[dict[str, Any], list[tuple[type, str]]]:
    """What a program has acknowledged, and its errors; the fault is over once it has reported one."""
    facts: dict[str, Any] = {}
    errors = []
    with suppress(EOFError, ConnectionError):  # killed
        while (said := program.hear(DEADLINE_S)) != "end":
            if isinstance(said, tuple):
                errors.append(said)
                assert len(errors) < 2, f"again, though nothing fails any more: {errors}"
                program.disarm()
                program.talk.send("again")
            else:
                facts |= said
    return facts, errors


def assert_sound(url: Path, facts: Facts, uncertain: tuple[str, ...]) -> None:
    with Store(url) as store:
        for name, value in facts.items():
            if value is None:
                with pytest.raises(NotFoundError, match=name.partition("@")[0]):
                    store.datasets.get(name)
            elif name not in uncertain:
                assert same(store.datasets.get(name), value), name
        for name in store.datasets.list():
            for version in store.datasets.versions(name):
                assert is_whole(store.datasets.get(str(version))), version
        assert store.verify().damaged == ()
        store.datasets.put({"mark": "next"}, "next", mode="replace")
        store.datasets.export("next", url / "rows.zip")  # and what a killed export has left goes
        store.sweep(grace_s=0)
        versions = [version for name in store.datasets.list() for version in store.datasets.versions(name)]
        needed = {file.sha256 for version in versions for file in version.files}
    files = {path.relative_to(url) for path in url.rglob("*") if path.is_file()}
    assert {path.name for path in files if path.parts[0] == "blobs"} == needed
    assert {str(path) for path in files if path.parts[0] != "blobs"} <= {"catalog.sqlite", "rows.zip"}


def same(one: Any, other: Any) -> bool:
    return bool(one.equals(other)) if isinstance(other, pa.Table) else np.array_equal(one, other)


def is_whole(value: Any) -> bool:
    """Whether it is a value that a step may have put: pieces of 1000 equal rows."""
    if isinstance(value, dict):
        return list(value) == ["mark"]
    array = value["mark"].to_numpy() if isinstance(value, pa.Table) else value
    return len(array) % 1000 == 0 and all(len(set(piece)) == 1 for piece in array.reshape(-1, 1000).tolist())


def another(kind: str, url: Path) -> Callable[[], threading.Thread]:
    """What another process does to the store meanwhile; if it must wait for a lock, the first one goes on."""

    def act() -> None:
        with Store(url) as store:
            if kind == "swept":
                store.sweep(grace_s=0)
            else:
                store.datasets.put(rows(7), "rows", mode="append")
                store.datasets.put({"mark": 2}, "new", mode="replace")

    def begin() -> threading.Thread:
        thread = threading.Thread(target=act, name="another")
        thread.start()
        thread.join(0.1)
        return thread

    return begin


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "store"
    with Store(folder) as store:
        prepare(store)
    return folder


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_acknowledged_is_lost_and_nothing_is_left(
    scenario: str, kind: str, template: Path, tmp_path: Path
) -> None:
    steps, uncertain = SCENARIOS[scenario]
    url = tmp_path / "store"

    def run(fault: Fault | None) -> Watched:
        shutil.rmtree(url, ignore_errors=True)
        if scenario != "open":
            shutil.copytree(template, url)
        threads: list[threading.Thread] = []
        if fault is not None and fault.kind in ("swept", "written"):
            begin = another(fault.kind, url)
            fault = Fault(fault.k, "meanwhile", lambda: threads.append(begin()))
        with watched(
            lambda talk: perform(url, steps, talk),
            lambda point: point.path.startswith(f"{url}/"),
            calls=FILES,
            fault=fault,
        ) as program:
            facts, errors = followed(program)
            assert program.ended(DEADLINE_S), program.left()
        for thread in threads:
            thread.join(DEADLINE_S)
        if fault is None or kind in ("short", "delay", "swept", "written"):
            assert not errors, errors
        for cls, message in errors:
            assert cls.__module__ == "kindler.errors", (cls, message)
            assert "Hint" in message or str(url) in message, (cls, message)
        before = {} if scenario == "open" else {**BEFORE}
        assert_sound(url, {**before, **facts}, tuple(name for name in uncertain if name not in facts))
        return program

    points = run(None).points
    failures: list[str] = []
    for name, fault in faults(scenario, kind, points, sample=KINDS[kind]):
        with told(name, points[fault.k], failures):
            run(fault)
    assert not failures, "\n".join(failures)


def test_a_version_is_in_the_catalog_once_its_blob_and_the_folders_of_that_are_on_the_disk(
    tmp_path: Path,
) -> None:
    url = tmp_path / "store"
    counts = lambda point: point.path.startswith(str(tmp_path))  # noqa: E731
    with watched(lambda talk: perform(url, (put,), talk), counts, calls=FILES) as program:
        assert followed(program)[1] == []
        assert program.ended(DEADLINE_S), program.left()

    acts = [(point.kind, Path(point.path).name) for point in program.points]
    linked = next(at for at, (kind, _) in enumerate(acts) if kind == "link")
    blob = acts[linked][1]
    made = acts.index(("mkdir", blob[:2]))
    assert acts[made + 1] == ("sync", "blobs")
    assert ("sync", "store") in acts[:made]
    assert acts[linked + 1] == ("sync", blob[:2])
    assert ("write", "catalog.sqlite-wal") in acts[linked:], "where the version is published"
