"""Stores that earlier versions of Kindler wrote are read, completely, and written to.

`data/format2.zip` was written by `data/write_store.py`.
"""

from __future__ import annotations

import json
import shutil
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from kindler import Store
from kindler.errors import ConfigError, StoreError
from kindler.store import Address, VersionStore, tables
from kindler.store.keys import Keys, id_of
from kindler.store.splits import Split, Splits
from tests.store import jobs
from tests.store.data.write_store import plain, versions
from tests.store.test_many_writers import run
from tests.store.test_upkeep import changed, nobody

ARCHIVE = Path(__file__).parent / "data" / "format2.zip"


@pytest.fixture(params=["sqlite", "postgres"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The URL of a store of the second format, and what must be found there."""
    folder = tmp_path / "store"
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    expected = json.loads((folder / "expected.json").read_text())[request.param]
    if request.param == "sqlite":
        return str(folder), expected
    import psycopg

    (folder / "catalog.sqlite").unlink()
    server, name = request.getfixturevalue("postgres"), f"k{uuid.uuid4().hex}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(f"{server}/{name}", autocommit=True) as connection:
        connection.execute((folder / "postgres.sql").read_bytes())
        connection.execute("UPDATE kindler_store SET blobs = %s", [f"file://{folder}"])
    return f"{server}/{name}?blobs=file://{folder}", expected


def as_read(value: Any) -> Any:
    return json.loads(json.dumps(value))


def check(om: Store, expected: dict[str, Any]) -> None:
    """Every version is what it was, however it is asked for."""
    assert as_read(versions(om)) == expected["versions"]
    newest: dict[str, int] = {}
    for full, record in expected["versions"].items():
        bucket, shelf, name = full.split("/", 2)
        version = getattr(om[bucket], shelf).metadata(name)
        assert as_read([version.meta, version.attributes, version.digest]) == [
            record[5],
            record[6],
            record[3],
        ]
        assert [file.path for file in version.files] == [path for path, *_ in record[4]]
        bare, _, number = full.rpartition("@")
        newest[bare] = max(newest.get(bare, 0), int(number))
    for bucket in om.buckets:
        for shelf in (om[bucket].models, om[bucket].datasets, om[bucket].scripts):
            for version in shelf.newest(hidden=True):
                assert newest.pop(f"{bucket}/{shelf.shelf}/{version.name}") == version.number
    assert newest == {}
    for name, value in expected["values"].items():
        assert as_read(plain(om.datasets.get(name))) == value
    assert {bucket: om.store.all_tags(bucket, "models") for bucket in om.buckets} == expected["tags"]
    assert om.store.verify().damaged == ()


def test_everything_is_there(old: tuple[str, dict[str, Any]]) -> None:
    url, expected = old
    om = Store(url)
    check(om, expected)
    om.sweep(grace_s=0)
    check(om, expected)
    keys = Keys(om.store)
    told = [[key.id, key.scopes, key.note, key.buckets, key.names] for key in keys.list()]
    assert as_read(told) == expected["keys"]
    by_id = {key.id: key for key in keys.list()}
    assert all(by_id[id_of(token)].is_of(token) for token in expected["tokens"])
    assert keys.were_made()
    (split,) = Splits(om.store).list()
    assert [split.bucket, split.name, split.tag] == expected["splits"][0][:3]
    assert om.models.splits("team/net")["prod"].canary == {4: 0.25}
    assert split.shadow == {1: 0.5, 5: 1.0}
    om.close()
    again = Store(url)
    check(again, expected)
    again.close()


def test_it_is_written_to(old: tuple[str, dict[str, Any]]) -> None:
    url, _ = old
    om = Store(url)
    assert om.datasets.put(np.array([70, 80]), "grown", mode="append").number == 8
    om.datasets.drop("grown@4")
    om.datasets.drop("grown@7")
    om.sweep(grace_s=0)
    assert om.datasets.get("grown").tolist() == [n for i in range(7) for n in (i, 10 * i)] + [70, 80]
    assert om.datasets.get("grown@2").tolist() == [0, 0, 1, 10]
    assert om.datasets.put([2], "gone").number == 2  # numbers are not given again
    om.datasets.put(np.array([6.5]), "replaced", mode="append")
    assert om.datasets.get("replaced").tolist() == [3.5, 4.5, 5.5, 6.5]
    assert om.datasets.get("replaced@2").tolist() == [[1.5], [2.5]]
    om.models.split("team/net@next", canary={5: 0.5})
    assert set(om.models.splits("team/net")) == {"prod", "next"}
    assert om.store.verify().damaged == ()
    om.close()


def test_processes_that_open_it_at_once_find_all_of_it(old: tuple[str, dict[str, Any]]) -> None:
    url, expected = old
    run(jobs.append, url, 6)
    om = Store(url)
    assert om.datasets.get("rows").shape == (60, 2)
    om.datasets.drop("rows")
    check(om, expected)
    om.close()


def test_nothing_changes_where_it_fails(
    old: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, expected = old
    calls: list[Any] = []
    insert: Callable[..., None] = tables.insert_files

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        insert(*arguments)
        if len(calls) == 5:
            raise StoreError("the disk is full.")

    monkeypatch.setattr(tables, "insert_files", fails)
    with pytest.raises(StoreError, match="full"):
        VersionStore.open(url)
    monkeypatch.undo()
    om = Store(url)
    check(om, expected)
    om.close()


def test_the_first_format_and_one_that_may_only_be_read(
    old: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, expected = old
    if "://" in url:
        pytest.skip("a database server says itself who may write")
    path = tmp_path / "store" / "catalog.sqlite"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE kindler_store SET format = 1")
    engine.dispose()
    content = path.read_bytes()
    changed(tmp_path / "store", write=False)
    with nobody(monkeypatch, tmp_path):
        om = Store(url)
        check(om, expected)
        assert Keys(om.store).were_made()
        om.close()
    assert path.read_bytes() == content
    changed(tmp_path / "store", write=True)
    path.chmod(0o644)
    om = Store(url)
    check(om, expected)
    om.close()


def test_a_store_of_a_newer_kindler_says_so(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    om.datasets.put(1, "x")
    with om.store.catalog.database.writing() as connection:
        connection.exec_driver_sql("UPDATE kindler_store SET format = 4")
    om.close()
    with pytest.raises(
        ConfigError, match=r"has the format 4; this version of Kindler reads up to 3"
    ) as caught:
        VersionStore.open(tmp_path / "store")
    assert "update Kindler" in str(caught.value)


def test_keys_that_were_made_before_the_store_close_it(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    Path(url).mkdir()
    engine = sa.create_engine(f"sqlite:///{url}/catalog.sqlite")
    tables.keys.create(engine)
    engine.dispose()
    keys = Keys(url)
    assert (keys.list(), keys.were_made()) == ([], True)
    keys.close()


def test_a_new_store_is_open_until_its_first_key_and_not_again(tmp_path: Path) -> None:
    store = VersionStore.open(tmp_path / "store")
    keys = Keys(store)
    assert (keys.list(), keys.were_made()) == ([], False)
    key, _ = keys.add(["read"])
    assert keys.were_made()
    keys.remove(key.id)
    assert (keys.list(), keys.were_made()) == ([], True)
    keys.close()
    Splits(store).put(Split("default", "net", "prod", canary={2: 0.5}))
    assert Splits(store).list(Address("default", "models", "net"))[0].canary == {2: 0.5}
    store.close()
    shutil.rmtree(tmp_path / "store")
