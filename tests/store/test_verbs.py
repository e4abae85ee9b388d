"""The verbs of a shelf, the same on every kind of store."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kindler import Store
from kindler.errors import AlreadyExistsError, ConfigError, DamagedError, NotFoundError, StoreError
from kindler.store import VersionStore


def test_what_was_put_comes_back_as_it_was(om: Store) -> None:
    frame = pd.DataFrame({"x": [1, 2, 3], "s": ["a", None, "c"]}, index=pd.Index([5, 6, 7], name="i"))
    om.datasets.put(frame, "table")
    om.datasets.put({"a": [1, None, "ü"]}, "value")

    pd.testing.assert_frame_equal(om.datasets.get("table"), frame)
    assert om.datasets.get("value") == {"a": [1, None, "ü"]}
    told = om.datasets.metadata("table")
    assert (told.number, told.kind, told.name, told.size > 0) == (1, "parquet", "table", True)


def test_versions_are_found_by_number_tag_and_distance(om: Store) -> None:
    for i in range(1, 5):
        om.models.put(i, "net", kind="pickle", trusted=True, tag="first" if i == 1 else None)
    om.models.tag("net@3", "prod")

    got = {
        name: om.models.get(name, trusted=True)
        for name in (
            "net",
            "net@2",
            "net@v2",
            "net@prod",
            "net@first",
            "net^",
            "net^^",
            "net@prod^",
            "net@latest",
        )
    }
    assert got == {
        "net": 4,
        "net@2": 2,
        "net@v2": 2,
        "net@prod": 3,
        "net@first": 1,
        "net^": 3,
        "net^^": 2,
        "net@prod^": 2,
        "net@latest": 4,
    }
    assert om.models.get("net", version=1, trusted=True) == 1
    assert om.models.tags("net") == {"first": 1, "prod": 3}


@pytest.mark.parametrize("name", ["nothing", "net@9", "net@unknown", "net^^^^", "net@1^", "net@9^"])
def test_what_is_not_there_is_an_error_that_says_what_is(local: Store, name: str) -> None:
    local.models.put(1, "net", kind="pickle", trusted=True)
    with pytest.raises(NotFoundError) as caught:
        local.models.get(name, trusted=True)
    assert isinstance(caught.value, KeyError)
    assert not local.models.exists(name)
    if name.startswith("net"):
        assert caught.value.available == ("net@1",)
    for call in (local.models.metadata, local.models.drop, lambda n: local.models.tag(n, "t")):
        with pytest.raises(LookupError, match=re.escape(name)):
            call(name)


def test_a_tag_moves_and_can_be_taken_away(om: Store) -> None:
    om.datasets.put(1, "x")
    om.datasets.put(2, "x", mode="replace", tag="prod")
    om.datasets.promote("x@1", tag="prod")
    assert om.datasets.get("x@prod") == 1

    om.datasets.untag("x", "prod")
    with pytest.raises(NotFoundError, match="prod"):
        om.datasets.untag("x", "prod")
    with pytest.raises(NotFoundError, match="x@prod"):
        om.datasets.get("x@prod")


def test_drop_takes_all_versions_or_one_and_numbers_are_not_given_again(om: Store) -> None:
    for i in range(3):
        om.datasets.put(i, "x", mode="replace", tag=f"t{i}")
    assert om.datasets.drop("x@2") == [2]
    assert [version.number for version in om.datasets.versions("x")] == [1, 3]
    assert om.datasets.tags("x") == {"t0": 1, "t2": 3}
    assert om.datasets.get("x^") == 0

    assert om.datasets.drop("x") == [1, 3]
    assert not om.datasets.exists("x")
    assert om.datasets.list() == []
    assert om.datasets.drop("x", force=True) == []
    assert om.sweep(grace_s=0).blobs == 3
    assert list(om.store.blobs.old(-60)) == []
    assert om.datasets.put("again", "x").number == 4


def test_lists_are_globs_that_mean_what_they_say(om: Store) -> None:
    for name in (
        "a.b",
        "axb",
        "A.b",
        "dir/a",
        "dir/sub/b",
        ".hidden",
        "_temp",
        "dir/_x",
        "50 percent",
        "a_b",
    ):
        om.datasets.put(0, name)
    names = om.datasets.list

    assert names() == ["50 percent", "A.b", "a.b", "a_b", "axb", "dir/a", "dir/sub/b"]
    assert names("a.b") == ["a.b"]
    assert names("a*") == ["a.b", "a_b", "axb"]
    assert names("*") == ["50 percent", "A.b", "a.b", "a_b", "axb"]
    assert names("a_*") == ["a_b"]
    assert names("dir/*") == ["dir/a"]
    assert names("dir/**") == ["dir/a", "dir/sub/b"]
    assert names("**/b") == ["dir/sub/b"]
    assert names("a[.x]b") == ["a.b", "axb"]
    assert names("a[!.]b") == ["a_b", "axb"]
    assert names("?.b") == ["A.b", "a.b"]
    assert names("*", hidden=True)[0] == ".hidden"
    assert names("nothing*") == []


def test_buckets_are_apart_and_versions_are_promoted_between_them(om: Store) -> None:
    om.datasets.put([1], "x", attributes={"by": "me"})
    assert om["live"].datasets.list() == []
    om.datasets.put([2], "x", mode="replace")

    there = om.datasets.promote("x@1", bucket="live", tag="prod")
    assert (there.bucket, there.number, there.attributes) == ("live", 1, {"by": "me"})
    assert om["live"].datasets.get("x@prod") == [1]
    assert om.buckets == ["default", "live"]

    om.datasets.copy("x", "y")
    om.datasets.drop("x")
    om.sweep(grace_s=0)
    assert om.datasets.get("y") == [2]
    assert om["live"].datasets.get("x") == [1]


def test_a_version_travels_as_one_file(om: Store, tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3)
    om.datasets.put(array, "dir/x", attributes={"a": 1})
    path = om.datasets.export("dir/x", tmp_path / "x.zip")

    again = om["other"].datasets.import_(path)
    assert (again.name, again.attributes, again.digest) == (
        "dir/x",
        {"a": 1},
        om.datasets.metadata("dir/x").digest,
    )
    np.testing.assert_array_equal(om["other"].datasets.get("dir/x"), array)
    assert om.datasets.import_(path, "y", tag="t").number == 1
    with pytest.raises(ConfigError, match="datasets"):
        om.models.import_(path)


def test_appending_shares_what_is_there(om: Store) -> None:
    frame = pd.DataFrame({"x": range(1000)})
    om.datasets.put(frame, "x")
    with pytest.raises(AlreadyExistsError, match="mode='replace'"):
        om.datasets.put(frame, "x")
    second = om.datasets.put(frame + 1000, "x", mode="append")

    assert second.files[0] == om.datasets.metadata("x@1").files[0]
    assert om.datasets.get("x")["x"].tolist() == list(range(2000))
    assert len(om.datasets.get("x^")) == 1000
    assert len(om.datasets.get("x", lazy=True)) == 2000


def test_files_can_be_copied_out(om: Store, tmp_path: Path) -> None:
    om.datasets.put([1, 2], "x")
    folder = om.datasets.get("x", local=tmp_path / "out")
    (folder / "value.json").write_text("changed by its owner")

    assert om.datasets.get("x") == [1, 2]
    with pytest.raises(AlreadyExistsError, match=str(folder)):
        om.datasets.get("x", local=folder)


def test_a_store_is_found_again_by_its_url_alone(
    om: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    om.datasets.put("here", "x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")  # keys are not written down
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")

    assert Store(url.partition("?")[0]).datasets.get("x") == "here"
    assert pickle.loads(pickle.dumps(om.store)).buckets() == ["default"]
    assert "secret" not in repr(om.store)


def test_bytes_that_were_changed_are_not_read(local: Store, tmp_path: Path) -> None:
    version = local.datasets.put([1, 2, 3], "x")
    blob = next(tmp_path.rglob(version.files[0].sha256))
    blob.chmod(0o644)
    blob.write_text("[1, 2, 4]")
    with pytest.raises(DamagedError, match=version.files[0].sha256):
        local.datasets.get("x")

    blob.unlink()
    with pytest.raises(DamagedError, match="it is missing"):
        local.datasets.get("x")


def test_a_folder_that_was_moved_is_the_same_store(tmp_path: Path) -> None:
    Store(tmp_path / "a").datasets.put(1, "x")
    (tmp_path / "a").rename(tmp_path / "b %20")
    assert Store(tmp_path / "b %20").datasets.get("x") == 1


def test_the_default_store_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINDLER_STORE", str(tmp_path / "named"))
    om = Store()
    om.datasets.put(1, "x")
    assert (tmp_path / "named" / "catalog.sqlite").exists()

    monkeypatch.delenv("KINDLER_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    om.setup().datasets.put(2, "x")
    assert (tmp_path / "data" / "kindler" / "store" / "catalog.sqlite").exists()
    assert om.setup(tmp_path / "named").datasets.get("x") == 1


def test_a_store_in_memory_works_and_stays_in_its_process() -> None:
    om = Store("memory://")
    om.datasets.put([1], "x")
    assert om.datasets.get("x") == [1]
    assert Store("memory://").datasets.list() == []
    with pytest.raises(StoreError, match="memory"):
        pickle.dumps(om.store)


@pytest.mark.parametrize("url", ["mongodb://x", "sqlite://", "file://host/x", "sqlite:///x.db?blobs=ftp://x"])
def test_a_url_that_cannot_be_a_store_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=(url.partition("=")[2] or url).partition("//")[0]):
        VersionStore.open(url)
