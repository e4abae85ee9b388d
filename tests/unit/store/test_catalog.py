"""What the catalog decides: numbers, which files a version has, what is found, listed, dropped and needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from kindler.errors import ConfigError, NotFoundError, StoreError
from kindler.store import tables
from kindler.store.catalog import Catalog, _behind
from kindler.store.names import Selector
from kindler.store.versions import Address, File, OvertakenError, Version


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    made = Catalog("memory://")
    yield made
    made.database.close()


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def address(name: str = "x", bucket: str = "default") -> Address:
    return Address(bucket, "models", name)


def draft(*files: str, at: Address | None = None, kind: str = "json", **meta: Any) -> Version:
    """A version of files, each of which has its own name as content."""
    return Version.draft(
        at or address(),
        kind=kind,
        files=[File(name, sha(name), len(name)) for name in files],
        meta=meta,
        attributes={"by": "me"},
    )


def put(catalog: Catalog, *files: str, **options: Any) -> Version:
    passed = {name: options.pop(name) for name in ("tags", "after", "grows") if name in options}
    return catalog.publish(draft(*files, **options), has=lambda _: True, **passed)


def named(catalog: Catalog, *names: str, **options: Any) -> None:
    for name in names:
        put(catalog, "f", at=address(name), **options)


def paths(version: Version | None) -> list[str]:
    return [] if version is None else [file.path for file in version.files]


def rows_of_files(catalog: Catalog) -> int:
    return len(catalog.database.rows(sa.select(tables.files.c.first)))


def test_versions_of_a_name_count_from_one_and_no_number_is_given_again(catalog: Catalog) -> None:
    assert [put(catalog, name).number for name in "ab"] == [1, 2]
    assert put(catalog, "a", at=address("y")).number == 1
    assert put(catalog, "a", at=address(bucket="live")).number == 1
    assert catalog.drop(address(), 2) == [2]
    assert put(catalog, "c").number == 3
    assert catalog.drop(address()) == [1, 3]
    assert put(catalog, "d").number == 4
    assert catalog.drop(address(), forget=True) == [4]
    assert put(catalog, "e").number == 1


def test_a_version_is_found_as_it_was_published(catalog: Catalog) -> None:
    published = put(catalog, "b", "a", kind="torch", layers=[1, {"a": None}])

    assert catalog.find(address(), Selector("x")) == published
    assert catalog.versions(address()) == catalog.newest("default", "models") == [published]
    assert (paths(published), published.kind, published.size) == (["a", "b"], "torch", 2)
    assert (published.meta, published.attributes) == ({"layers": [1, {"a": None}]}, {"by": "me"})
    assert published.created.utcoffset().total_seconds() == 0  # type: ignore[union-attr]
    assert catalog.find(address("y"), Selector("y")) is None
    assert catalog.versions(address("y")) == []


def test_a_version_appears_with_all_of_its_blobs_or_not_at_all(catalog: Catalog) -> None:
    put(catalog, "a")
    with pytest.raises(StoreError, match="'x' cannot be published: 2 of its blobs were removed") as lacking:
        catalog.publish(draft("a", "b", "c", "d"), has=lambda sha256: sha256 == sha("b"), tags=["prod"])
    assert "Hint: sweep with a longer grace_s" in str(lacking.value)
    assert (len(catalog.versions(address())), catalog.tags(address())) == (1, {})
    asked: list[str] = []
    catalog.publish(draft("a", "b"), has=lambda sha256: asked.append(sha256) is None)
    assert asked == [sha("b")], "the blob of another version is there"


def test_whoever_was_overtaken_publishes_nothing(catalog: Catalog) -> None:
    assert put(catalog, "a", after=0).number == 1
    assert put(catalog, "b", after=1).number == 2
    for after in (0, 1, 3):
        with pytest.raises(OvertakenError, match="the newest version is 2"):
            put(catalog, "c", after=after)
    assert put(catalog, "c", after=2).number == 3


def test_a_version_that_adds_to_the_newest_shares_its_rows(catalog: Catalog) -> None:
    first = put(catalog, "a", "b")
    second = put(catalog, "a", "b", "c", grows=first)
    third = put(catalog, "a", "b", "c", "d", grows=second)

    assert rows_of_files(catalog) == 4
    for number, expected in enumerate((first, second, third), start=1):
        assert catalog.find(address(), Selector("x", number)) == expected
    assert catalog.versions(address()) == [first, second, third]
    assert [len(paths(version)) for version in (first, second, third)] == [2, 3, 4]


def test_a_version_shares_no_rows_with_one_that_is_not_the_newest_or_has_other_files(
    catalog: Catalog,
) -> None:
    first = put(catalog, "a", "b")
    other = put(catalog, "a", "c", grows=first)
    assert rows_of_files(catalog) == 4
    late = put(catalog, "a", "b", "d", grows=first)
    assert rows_of_files(catalog) == 7
    assert [paths(version) for version in catalog.versions(address())] == [
        ["a", "b"],
        ["a", "c"],
        ["a", "b", "d"],
    ]
    assert catalog.versions(address()) == [first, other, late]


def test_counts_of_rows_come_back_in_the_order_of_the_parts(catalog: Catalog) -> None:
    version = put(catalog, "part-99", "part-100", "part-7", rows=[7, None, 100])

    assert version.meta == {"rows": [7, None, 100]}
    assert catalog.find(address(), Selector("x")).meta == {"rows": [7, None, 100]}  # type: ignore[union-attr]
    assert catalog.versions(address())[0].meta == {"rows": [7, None, 100]}
    assert paths(version) == paths(catalog.versions(address())[0]) == ["part-100", "part-7", "part-99"]


@pytest.mark.parametrize(
    ("ref", "back", "number"),
    [
        (None, 0, 4),
        (None, 1, 2),
        (None, 2, 1),
        (None, 3, None),
        (2, 0, 2),
        (2, 1, 1),
        (1, 1, None),
        (3, 0, None),
        (3, 1, None),
        (5, 0, None),
        (10**18, 0, None),
        ("prod", 0, 2),
        ("prod", 1, 1),
        ("unknown", 0, None),
    ],
)
def test_a_version_is_found_by_number_tag_and_distance(
    catalog: Catalog, ref: int | str | None, back: int, number: int | None
) -> None:
    made = {
        version.number: version
        for version in (put(catalog, name, tags=["prod"] if name == "b" else []) for name in "abcd")
    }
    catalog.drop(address(), 3)

    assert catalog.find(address(), Selector("x", ref, back)) == (None if number is None else made[number])


def test_the_history_has_the_newest_versions_oldest_first(catalog: Catalog) -> None:
    made = [put(catalog, name) for name in "abc"]
    told = [(version.number, version.created) for version in made]

    assert catalog.history(address()) == told
    assert catalog.history(address(), 2) == told[1:]
    assert catalog.history(address("y")) == []


def test_names_and_newest_versions_are_listed_by_glob_kind_and_place(catalog: Catalog) -> None:
    named(catalog, "b", "a/x", "a/y", "_h", "a/_h", "c")
    named(catalog, "c", kind="torch")
    put(catalog, "g", at=address("other", "live"))

    def names(pattern: str = "**", **options: Any) -> list[str]:
        listed = catalog.names("default", "models", pattern, **options)
        versions = catalog.newest("default", "models", pattern, **options)
        assert [version.name for version in versions] == listed
        return listed

    assert names() == ["_h", "a/_h", "a/x", "a/y", "b", "c"]
    assert names(hidden=False) == ["a/x", "a/y", "b", "c"]
    assert names("a/*", hidden=False) == ["a/x", "a/y"]
    assert names(after="a/x") == ["a/y", "b", "c"]
    assert names("a/*", after="a/x") == ["a/y"]
    assert names("b", after="b") == []
    assert names(limit=2) == ["_h", "a/_h"]
    assert names(limit=2, after="_h", hidden=False) == ["a/x", "a/y"]
    assert [v.number for v in catalog.newest("default", "models", "[bc]")] == [1, 2]
    assert [v.name for v in catalog.newest("default", "models", kind="torch")] == ["c"]
    assert catalog.buckets() == ["default", "live"]
    catalog.drop(address("c"))
    assert names("c") == []
    for limit in (0, -1):
        with pytest.raises(ConfigError, match=f"limit={limit}: must be at least 1"):
            catalog.names("default", "models", limit=limit)


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_a_page_is_full_however_many_names_before_it_are_skipped(
    catalog: Catalog, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kindler.store.catalog._PAGE", 1)
    shown = [f"b{i}" for i in range(5)]
    named(catalog, *(f"_{i:02}" for i in range(30)), *shown, *(f"b1/_{i:02}" for i in range(9)))

    assert catalog.names("default", "models", hidden=False, limit=limit) == shown[:limit]
    assert catalog.names("default", "models", "b*", hidden=False, limit=limit) == shown[:limit]
    assert catalog.names("default", "models", hidden=False, limit=limit, after="_28") == shown[:limit]
    assert catalog.names("default", "models", hidden=False, limit=limit, after="b1") == shown[2:][:limit]


def test_names_after_a_prefix_are_not_read() -> None:
    assert [_behind(prefix) for prefix in ("a", "az", "a/")] == ["b", "a{", "a0"]
    assert _behind("a\ud7ff") == "a\ue000", "UTF-8 has no surrogates"
    assert [_behind(prefix) for prefix in ("a\ud7fe", "a\ue000")] == ["a\ud7ff", "a\ue001"]
    assert _behind("a\U0010fffe") == "a\U0010ffff"
    assert _behind("a\U0010ffff") == "a\U0010ffff\U0010ffff"


def test_a_tag_points_to_one_version_and_moves(catalog: Catalog) -> None:
    first, second = put(catalog, "a", tags=["old", "prod"]), put(catalog, "b", tags=["prod"])
    named(catalog, "a", "y", "z", tags=["t"])

    assert catalog.tags(address()) == {"old": 1, "prod": 2}
    catalog.tag(first, "prod")
    assert catalog.tags(address()) == {"old": 1, "prod": 1}
    catalog.untag(address(), "old")
    assert catalog.tags(address()) == {"prod": 1}
    with pytest.raises(NotFoundError, match="tag of 'x'") as absent:
        catalog.untag(address(), "old")
    assert absent.value.available == ("prod",)
    with pytest.raises(ConfigError, match="tag='v1' cannot be a tag"):
        catalog.tag(first, "v1")
    catalog.drop(address(), second.number)
    with pytest.raises(NotFoundError, match="x@2"):
        catalog.tag(second, "prod")
    assert catalog.all_tags("default", "models") == {"x": {"prod": 1}} | {name: {"t": 1} for name in "ayz"}
    assert catalog.all_tags("default", "models", "x", "y") == {"x": {"prod": 1}, "y": {"t": 1}}
    assert catalog.all_tags("live", "models") == catalog.all_tags("default", "scripts") == {}


def test_tags_go_with_their_version(catalog: Catalog) -> None:
    put(catalog, "a", tags=["old"])
    put(catalog, "b", tags=["new"])
    catalog.drop(address(), 1)
    assert catalog.tags(address()) == {"new": 2}


def test_versions_that_share_rows_keep_them_whichever_of_them_is_dropped(catalog: Catalog) -> None:
    files, last = "abcdef", None
    for count in range(1, 7):
        last = put(catalog, *files[:count], grows=last)
    for number in (3, 4, 1, 6):
        assert catalog.drop(address(), number) == [number]
        for version in catalog.versions(address()):
            assert paths(version) == [*files[: version.number]]
            assert catalog.find(address(), Selector("x", version.number)) == version
    assert catalog.hashes("", 10) == sorted(map(sha, "abcde")), "nothing needs the last file"
    assert catalog.drop(address(), 6) == []
    assert catalog.drop(address()) == [2, 5]
    assert rows_of_files(catalog) == 0


def test_a_version_dropped_from_between_others_takes_the_files_that_only_it_had(catalog: Catalog) -> None:
    first = put(catalog, "a")
    put(catalog, "a", "b", grows=first)
    put(catalog, "c")
    catalog.drop(address(), 2)

    assert catalog.hashes("", 10) == sorted([sha("a"), sha("c")])
    assert [paths(version) for version in catalog.versions(address())] == [["a"], ["c"]]


def test_blobs_are_needed_while_a_version_has_them(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kindler.store.catalog._CHUNK", 2)
    put(catalog, "a", "b")
    put(catalog, "b", "c", "d", "e", at=address("y", "live"))
    hashes = [sha(name) for name in "abxcdey"]

    with catalog.unneeded(hashes) as unneeded:
        assert unneeded == [sha("x"), sha("y")]
    assert catalog.users(sha("b"), 5) == ["default/models/x@1", "live/models/y@1"]
    assert catalog.users(sha("a"), 5) == ["default/models/x@1"]
    assert len(catalog.users(sha("b"), 1)) == 1
    assert catalog.users(sha("x"), 5) == []
    known = sorted(map(sha, "abcde"))
    assert catalog.hashes("", 9) == known
    assert catalog.hashes(known[1], 2) == known[2:4]


def test_a_store_is_opened_where_it_was_made_and_nowhere_else(tmp_path: Path) -> None:
    url, elsewhere = f"sqlite:///{tmp_path}/c.db", f"?blobs=file://{tmp_path}/blobs"
    made = Catalog(url + elsewhere)
    put(made, "a")
    made.database.close()

    for again in (url, url + elsewhere):
        catalog = Catalog(again)
        assert catalog.blobs == f"file://{tmp_path}/blobs"
        assert len(catalog.versions(address())) == 1
        catalog.database.close()
    with pytest.raises(
        ConfigError, match=rf"blobs are at file://{tmp_path}/blobs, not at file:///elsewhere\."
    ):
        Catalog(f"{url}?blobs=file:///elsewhere")


def test_secrets_in_the_url_of_the_blobs_are_used_and_not_written_down(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/c.db"
    blobs = "s3%3A%2F%2Fbucket%3Fregion%3Dr%26secret_access_key%3Dhidden"
    for _ in range(2):
        catalog = Catalog(f"{url}?blobs={blobs}")
        assert catalog.blobs == "s3://bucket?region=r&secret_access_key=hidden"
        catalog.database.close()
    catalog = Catalog(url)
    assert catalog.blobs == "s3://bucket?region=r"
    catalog.database.close()


def test_a_store_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    made = Catalog(f"sqlite:///{tmp_path}/c.db")
    with made.database.writing() as connection:
        connection.execute(tables.state.update().values(format=tables.FORMAT + 1))
    made.database.close()

    with pytest.raises(
        ConfigError, match=f"has the format {tables.FORMAT + 1}; .* reads up to {tables.FORMAT}"
    ):
        Catalog(f"sqlite:///{tmp_path}/c.db")


def test_keys_that_were_there_before_the_store_protect_it(tmp_path: Path) -> None:
    for name, made_before in (("a", True), ("b", False)):
        url = f"sqlite:///{tmp_path}/{name}.db"
        if made_before:
            engine = sa.create_engine(url)
            tables.keys.create(engine)
            engine.dispose()
        catalog = Catalog(url)
        assert catalog.database.values(sa.select(tables.state.c.protected)) == [int(made_before)]
        catalog.database.close()
