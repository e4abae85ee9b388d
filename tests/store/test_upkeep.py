"""Stores that are damaged, shared, read-only, large, full, or mistyped; and names that cannot work."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from kindler import Store
from kindler.errors import ConfigError, DamagedError, NotFoundError, StoreError
from kindler.store import Address
from kindler.store.keys import Keys


@pytest.mark.parametrize("tag", ["latest", "v1", "v0", "v12345678901234567890"])
def test_a_tag_that_would_never_be_found_is_refused(local: Store, tag: str) -> None:
    local.datasets.put(1, "x")
    for call in (
        lambda: local.datasets.tag("x", tag),
        lambda: local.datasets.put(2, "x", mode="replace", tag=tag),
        lambda: local.datasets.promote("x", tag=tag),
        lambda: local.datasets.copy("x", "y", tag=["fine", tag]),
    ):
        with pytest.raises(ConfigError, match=rf"tag='{tag}' cannot be a tag: name@{tag} always means"):
            call()
    assert (local.datasets.list(), local.datasets.tags("x")) == (["x"], {})
    with pytest.raises(NotFoundError, match="tag of 'x'"):
        local.datasets.untag("x", tag)  # one from an earlier release can be taken away


@pytest.mark.parametrize("tag", ["v1.0", "version1", "V1", "latest-1", "vv1"])
def test_tags_that_only_look_like_versions_are_found(local: Store, tag: str) -> None:
    local.datasets.put(1, "x", tag=tag)
    local.datasets.put(2, "x", mode="replace")
    assert local.datasets.get(f"x@{tag}") == 1


def test_promoting_into_the_same_bucket_needs_a_tag(local: Store) -> None:
    local.datasets.put(1, "x")
    with pytest.raises(ConfigError, match="is already in that bucket"):
        local.datasets.promote("x", bucket="default")
    assert local.datasets.tags("x") == {}
    local.datasets.promote("x", bucket="default", tag="prod")
    assert local.datasets.tags("x") == {"prod": 1}


def blob_of(om: Store, name: str) -> Path:
    (file,) = om.datasets.metadata(name).files
    return Path(om.store.blobs.url.removeprefix("file://")) / "blobs" / file.sha256[:2] / file.sha256


@pytest.mark.parametrize("damage", [b"other bytes", b"", None])
def test_a_damaged_blob_is_healed_by_putting_the_same_again(local: Store, damage: bytes | None) -> None:
    local.datasets.put([1, 2], "x")
    blob = blob_of(local, "x")
    blob.chmod(0o644)
    blob.unlink() if damage is None else blob.write_bytes(damage)
    with pytest.raises(DamagedError):
        local.datasets.get("x")
    local.datasets.put([1, 2], "y")
    assert local.datasets.get("x") == [1, 2]


NOBODY = 65534


@contextmanager
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As another user, if this one is root: root may write everywhere."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    root = os.getuid() == 0
    if root:
        os.chown(own, NOBODY, NOBODY)
        for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
            folder.chmod(folder.stat().st_mode | 0o055)
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    monkeypatch.setattr("os.getuid", os.geteuid)
    # `access` asks for the user who began the process; what counts is the one who is it now.
    real = os.access
    monkeypatch.setattr("os.access", lambda path, mode: real(path, mode, effective_ids=True))
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)


def changed(folder: Path, *, write: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | 0o222 if write and stat.S_ISDIR(mode) else mode if write else mode & ~0o222)


def test_a_store_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    om = Store(folder)
    om.datasets.put(np.arange(3), "x", tag="prod")
    om.datasets.get("x")
    om.close()
    changed(folder, write=False)
    with nobody(monkeypatch, tmp_path):
        reader = Store(folder)
        assert reader.datasets.get("x@prod").tolist() == [0, 1, 2]
        assert reader.datasets.list() == ["x"]
        with pytest.raises(StoreError, match="readonly|cannot write"):
            reader.datasets.put(1, "y")
        reader.close()
        keys = Keys(str(folder))  # of which there never were any: a server looks for them
        assert keys.list() == []
        with pytest.raises(NotFoundError, match="key"):
            keys.remove("x")
        keys.close()
    changed(folder, write=True)


def test_a_store_of_a_group_takes_what_another_member_has_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    before = os.umask(0)
    try:
        om = Store(folder)
        om.datasets.put([1, 2], "x")
        om.close()
        changed(folder, write=True)
        with nobody(monkeypatch, tmp_path):
            other = Store(folder)
            other.datasets.put([1, 2], "y")  # the same bytes, in a blob of the first one
            other.datasets.put([3], "z")
            assert (other.datasets.get("y"), other.datasets.get("z")) == ([1, 2], [3])
            other.close()
    finally:
        os.umask(before)
    assert om.datasets.get("z") == [3]
    om.close()


def test_a_full_disk_is_said_with_its_place(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kindler.store.blobs.sync", full)
    with pytest.raises(StoreError, match=rf"no space left on the disk of {local.store.blobs.stage}"):
        local.datasets.put([1], "x")


def test_a_name_that_is_forgotten_leaves_no_row_and_no_bytes(local: Store) -> None:
    local.datasets.put([1, 2], "parcel")
    local.datasets.put([1, 2], "kept")
    local.datasets.put([3], "parcel", mode="replace")
    gone, shared = blob_of(local, "parcel"), blob_of(local, "kept")
    local.store.forget(Address("default", "datasets", "parcel"))
    assert (gone.exists(), shared.exists(), local.datasets.list()) == (False, True, ["kept"])
    assert local.datasets.put([4], "parcel").number == 1


def rows_of(om: Store) -> tuple[int, int]:
    """What the catalog keeps: the characters of all manifests, and the rows of files."""
    database = om.store.catalog.database
    with database.reading() as connection:
        count = connection.exec_driver_sql("SELECT SUM(LENGTH(manifest)) FROM kindler_versions").scalar()
        return count, connection.exec_driver_sql("SELECT COUNT(*) FROM kindler_files").scalar()


def test_what_appending_takes_grows_with_what_is_appended(om: Store) -> None:
    sizes = []
    for i in range(60):
        om.datasets.put(pa.table({"a": [i]}), "x", mode="append")
        sizes.append(rows_of(om))
    (first, _), (last, files) = sizes[29], sizes[59]
    assert last < 2.2 * first
    assert files == 60
    assert om.datasets.get("x").column("a").to_pylist() == list(range(60))
    assert om.datasets.get("x@30").column("a").to_pylist() == list(range(30))
    versions = om.datasets.versions("x")
    assert [sum(v.meta["rows"]) for v in versions] == list(range(1, 61))
    assert [len(v.files) for v in versions] == list(range(1, 61))
    assert om.datasets.newest()[0] == versions[-1] == om.datasets.metadata("x")


def test_versions_can_be_dropped_from_among_those_that_grow(om: Store) -> None:
    for i in range(8):
        om.datasets.put(np.array([i]), "x", mode="append", attributes={"i": i})
    for number in (3, 4, 1, 8):  # from within, the first, and the last
        om.datasets.drop(f"x@{number}")
        om.store.sweep(grace_s=0)
        for version in om.datasets.versions("x"):
            assert om.datasets.get(str(version)).tolist() == list(range(version.number))
            assert version.attributes == {"i": version.number - 1}
    om.datasets.put(np.array([9]), "x", mode="append")
    assert om.datasets.get("x").tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    om.datasets.put(np.array([1]), "x", mode="replace")
    om.datasets.put(np.array([2]), "x", mode="append")
    om.datasets.drop("x@9")
    om.store.sweep(grace_s=0)
    assert (om.datasets.get("x").tolist(), om.datasets.get("x^").tolist()) == ([1, 2], [1])


def test_pages_follow_one_another(om: Store) -> None:
    names = sorted(["B", "_hidden/x", "a", "a/b", "a/é", "b.c", "z", "ä", *(f"n/{i:03}" for i in range(120))])
    for name in names:
        om.datasets.put(1, name, tag="t" if name == "z" else None)
    shown = [name for name in names if not name.startswith("_")]
    assert om.datasets.list() == shown
    for limit in (1, 7, 1000):
        found: list[str] = []
        while page := om.datasets.list(limit=limit, after=found[-1] if found else ""):
            assert [v.name for v in om.datasets.newest(limit=limit, after=found[-1] if found else "")] == page
            found += page
        assert found == shown
    assert om.datasets.list("n/*", limit=2, after="n/100") == ["n/101", "n/102"]
    assert om.datasets.list("**/b*", kind="json", limit=5) == ["a/b", "b.c"]
    assert om.datasets.list(hidden=True, limit=2) == ["B", "_hidden/x"]
    assert om.store.all_tags("default", "datasets") == {"z": {"t": 1}}
    with pytest.raises(ConfigError, match="limit=0"):
        om.datasets.list(limit=0)
