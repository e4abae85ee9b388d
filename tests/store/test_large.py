"""Stores with very many names and versions: what is asked of the catalog does not grow with them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sqlalchemy as sa

import kindler.store.store as stores
from kindler import Store
from kindler.cli import main
from kindler.errors import ConfigError, NotFoundError
from kindler.store import tables
from kindler.store.keys import Keys

NAMES = 5_000


@pytest.fixture(scope="module")
def om(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = Store(tmp_path_factory.mktemp("large") / "store")
    made.models.put(os.path.basename, "first")
    fill(made, NAMES)
    yield made
    made.close()


def fill(om: Store, count: int) -> None:
    """Rows for so many models, written at once."""
    created = datetime.now(timezone.utc).isoformat()
    with om.store.catalog.database.writing() as connection:
        objects = [
            {"id": 1000 + i, "bucket": "default", "shelf": "models", "name": f"m/{i:06d}", "last": 1}
            for i in range(count)
        ]
        connection.execute(tables.objects.insert(), objects)
        text = '{"attributes":{},"meta":{}}'
        fixed = {
            "number": 1,
            "kind": "function",
            "created": created,
            "size": 0,
            "digest": "",
            "manifest": text,
        }
        connection.execute(tables.versions.insert(), [{"object": row["id"], **fixed} for row in objects])


@contextmanager
def counted(om: Store) -> Iterator[dict[str, int]]:
    """Statements, and the steps of SQLite's own machine that they took, in thousands."""
    found = {"statements": 0, "steps": 0}
    engine = om.store.catalog.database._engine

    def before(connection: sa.Connection, _: object, statement: str, *__: object) -> None:
        found["statements"] += not statement.startswith("BEGIN")
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_progress_handler(lambda: found.__setitem__("steps", found["steps"] + 1), 1000)

    sa.event.listen(engine, "before_cursor_execute", before)
    try:
        yield found
    finally:
        sa.event.remove(engine, "before_cursor_execute", before)


def test_a_page_reads_no_more_rows_than_it_shows(om: Store) -> None:
    for after in ("", "m/002500", "m/004900"):
        with counted(om) as found:
            page = om.models.newest(after=after, limit=50)
        assert len(page) == 50
        assert page[-1].name > after
        assert found["statements"] == 1
        assert found["steps"] < 50  # of 1000; all 5,000 names would take hundreds


def test_a_misspelled_name_is_compared_with_few_names(om: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def matches(name: str, names: list[str], n: int) -> list[str]:
        compared.append(len(names))
        return names[:n]

    monkeypatch.setattr(stores.difflib, "get_close_matches", matches)
    for name in ("m/00012x", "zzz", "q" * 200):
        with counted(om) as found, pytest.raises(NotFoundError, match="there is no model"):
            om.models.metadata(name)
        assert found["statements"] <= 6
        assert found["steps"] < 10  # of 1000; all 5,000 names would take dozens
    assert max(compared) <= 50


def test_a_misspelled_name_of_a_large_store_still_gets_a_hint(om: Store) -> None:
    with pytest.raises(NotFoundError, match="m/00012"):
        om.models.metadata("m/00012x")


def test_many_misspelled_names_cost_as_little_as_names_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    om = Store(tmp_path / "store")
    om.models.put(os.path.basename, "first")
    told = []
    for i in range(60):
        with counted(om) as found, pytest.raises(NotFoundError, match=f"no model .*firs{i}"):
            om.models.metadata(f"firs{i}")
        told.append(found["statements"])
    assert told[0] > 1  # the first were told what they may have meant
    assert told[-1] == 1
    later = time.monotonic() + 60.0
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: later))
    with pytest.raises(NotFoundError, match="first"):
        om.models.metadata("firs")
    om.close()


def test_a_key_is_found_by_its_id_without_reading_the_others(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    keys = Keys(om.store)
    key, token = keys.add(["read", "predict"], note="mine", buckets=["live"], names={"models": ["team/**"]})
    others = [
        {"id": f"k{i}", "sha256": "", "scopes": "read", "note": "", "created": f"{i:06}"}
        for i in range(2_000)
    ]
    with om.store.catalog.database.writing() as connection:
        connection.execute(tables.keys.insert(), others)
    with counted(om) as found:
        again, none = keys.find(key.id), keys.find("unknown")
    assert (again, none) == (key, None)
    assert again is not None
    assert again.is_of(token)
    assert found["statements"] == 2
    assert found["steps"] < 2  # of 1000; all 2,000 keys would take dozens
    om.close()


def test_a_missing_version_of_a_name_with_many_does_not_read_them(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    for i in range(40):
        om.datasets.put(np.array([i]), "x", mode="append")
    with counted(om) as found, pytest.raises(NotFoundError, match="x@40") as caught:
        om.datasets.metadata("x@99")
    assert found["statements"] <= 4
    assert "x@2," not in str(caught.value)
    om.close()


def test_old_versions_go_by_count_and_age_and_tags_and_splits_stay(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    for _ in range(6):
        om.models.put(os.path.basename, "net")
    om.models.put(os.path.basename, "one")
    om.models.tag("net@1", "prod")
    om.models.split("net@prod", canary={3: 0.5})
    assert om.models.prune(keep=2, dry_run=True) == ["net@2", "net@4"]
    assert om.models.prune(keep=2, days=1) == []  # all are of today
    with om.store.catalog.database.writing() as connection:
        old = (datetime.now(timezone.utc) - timedelta(days=10)).isoformat()
        connection.exec_driver_sql("UPDATE kindler_versions SET created = ? WHERE number <= 4", (old,))
    assert om.models.prune(days=5, keep=5) == []
    assert om.models.prune("net", days=5) == ["net@2", "net@4"]
    assert [version.number for version in om.models.versions("net")] == [1, 3, 5, 6]
    assert om.models.prune(days=0) == ["net@5"]  # never the newest
    with pytest.raises(ConfigError, match="keep=... or days="):
        om.models.prune()
    om.close()


def test_dropping_what_others_grew_on_leaves_them_whole(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    for i in range(8):
        om.datasets.put(np.array([i]), "x", mode="append")
    assert len(om.datasets.prune(keep=2)) == 6
    assert om.store.verify().damaged == ()
    om.sweep(0)
    assert om.datasets.get("x").tolist() == list(range(8))
    assert om.datasets.get("x^").tolist() == list(range(7))
    om.close()


def test_the_commands_find_damage_remove_debris_and_give_room_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "store")
    om = Store(url)
    version = om.datasets.put(np.arange(1000.0), "kept")
    for i in range(30):
        om.datasets.put(np.arange(100.0) + i, "gone", mode="append")
    om.datasets.drop("gone")
    own = ["--store", url]
    assert main(["store", "verify", *own]) == 0
    assert capsys.readouterr().out == "1 blobs read, 0 damaged\n"
    assert main(["store", "sweep", "--grace-s", "0", *own]) == 0
    assert capsys.readouterr().out.startswith("30 blobs and ")
    assert main(["store", "compact", *own]) == 0
    assert " -> " in capsys.readouterr().out
    sha256 = version.files[0].sha256
    blob = tmp_path / "store" / "blobs" / sha256[:2] / sha256
    blob.chmod(0o644)
    blob.write_bytes(b"x")
    assert main(["store", "verify", *own]) == 1
    out = capsys.readouterr().out
    assert sha256 in out
    assert "default/datasets/kept@1" in out
    om.datasets.put(np.arange(1000.0), "kept", mode="replace")  # the same content heals it
    assert main(["store", "verify", *own]) == 0
    blob.unlink()
    assert main(["store", "verify", *own]) == 1
    assert "missing" in capsys.readouterr().out
    assert main(["store", "prune", "--shelf", "datasets", "--keep", "1", "--dry-run", *own]) == 0
    assert capsys.readouterr().out == "kept@1\n"
    assert main(["store", "prune", *own]) == 1
    assert main(["store", "sweep", "--store", str(tmp_path / "none")]) == 1
    om.close()
