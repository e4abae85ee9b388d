"""API keys: what each may do, for how long, and what the table keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa

from kindler.errors import ConfigError, NotFoundError
from kindler.store import VersionStore
from kindler.store.keys import Key, Keys, id_of
from kindler.store.tables import keys as table
from kindler.store.tables import state


@pytest.fixture
def keys() -> Iterator[Keys]:
    made = Keys("memory://")
    yield made
    made.close()


def test_a_key_is_found_again_as_it_was_made_and_by_its_token_alone(keys: Keys) -> None:
    key, token = keys.add(["predict", "read"], note="n")
    other, _ = keys.add(["admin"], buckets=["live"], names={"models": ["a/**", "b"], "scripts": []})

    assert (key.scopes, key.note, key.expires, key.is_limited) == (("read", "predict"), "n", None, False)
    assert (other.buckets, other.names, other.scopes) == (("live",), {"models": ("a/**", "b")}, ("admin",))
    assert keys.list() == [key, other]
    assert [keys.find(key.id), keys.find(other.id), keys.find("unknown")] == [key, other, None]
    assert (id_of(token), key.is_of(token), other.is_of(token)) == (key.id, True, False)
    assert not key.is_of(token + "\udcff")


def test_a_limit_of_buckets_or_of_names_makes_a_key_limited(keys: Keys) -> None:
    for limits in ({"buckets": ["live"]}, {"names": {"datasets": ["*"]}}):
        assert keys.add(["read"], **limits)[0].is_limited  # type: ignore[arg-type]


def test_releases_that_know_no_limits_read_no_scope_from_a_limited_key(keys: Keys) -> None:
    keys.add(["predict", "read"])
    keys.add(["read"], buckets=["live"])
    keys.add(["read"], names={"models": ["a"]})
    scopes = keys._database.values(sa.select(table.c.scopes).order_by(table.c.created))

    assert scopes[0] == "read predict"
    assert [set(text.split()) & {"read", "predict", "write", "admin"} for text in scopes[1:]] == [set()] * 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"scopes": []}, r"scopes=\[\]: must be one or more of read, predict, write, admin"),
        ({"scopes": ["read", "dance"]}, "'dance'"),
        ({"days": 0}, "days=0: must be greater than 0"),
        ({"days": -1}, "days=-1"),
        ({"days": 100_000}, "days=100000"),
        ({"names": {"shelf": ["a"]}}, r"names=\['shelf'\]: the keys must be shelves"),
        *(
            ({"names": {"models": [glob]}}, "is not a glob for names")
            for glob in ("", "a@1", "a^", 5, "a@1^")
        ),
        ({"names": {"models": ["a", "*" * 17]}}, "17 stars"),
        ({"buckets": ["a b"]}, "a bucket begins with a letter"),
    ],
    ids=str,
)
def test_a_key_that_could_not_work_is_not_made(keys: Keys, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        keys.add(**{"scopes": ["read"], **options})
    assert (keys.list(), keys.were_made()) == ([], False)


def test_a_key_is_over_from_the_moment_it_expires(keys: Keys) -> None:
    key, _ = keys.add(["read"], days=0.5)
    now = datetime.now(timezone.utc)

    assert key.expires == key.created + timedelta(days=0.5)
    assert keys.find(key.id) == key
    ends = [None, now + timedelta(hours=1), now - timedelta(hours=1), now]
    made = [Key("i", ("read",), "", now, expires, "") for expires in ends]
    assert [one.is_over() for one in made] == [False, False, True, True]


def test_a_key_allows_its_scopes_and_admin_allows_all(keys: Keys) -> None:
    reader, admin = keys.add(["read"])[0], keys.add(["admin"])[0]

    assert [reader.allows(scope) for scope in ("read", "predict")] == [True, False]
    assert [admin.allows(scope) for scope in ("read", "predict", "admin")] == [True] * 3


def test_a_store_that_ever_had_a_key_says_so(keys: Keys) -> None:
    assert not keys.were_made()
    key, _ = keys.add(["read"])
    assert keys.were_made()
    with keys._database.writing() as connection:  # as older releases leave it
        connection.execute(state.update().values(protected=0))
    assert keys.were_made()
    keys.add(["read"])
    for made in keys.list():
        keys.remove(made.id)
    assert (keys.list(), keys.were_made()) == ([], True)
    with pytest.raises(NotFoundError, match="key"):
        keys.remove(key.id)


def test_a_key_that_is_not_there_is_answered_with_those_that_are(keys: Keys) -> None:
    key, _ = keys.add(["read"])
    with pytest.raises(NotFoundError, match="unknown") as caught:
        keys.remove("unknown")

    assert caught.value.available == (key.id,)
    assert keys.list() == [key]


def test_keys_close_the_connections_that_they_have_opened_and_not_those_of_a_store() -> None:
    store, own = VersionStore.open("memory://"), Keys("memory://")
    shared = Keys(store)
    for keys in (shared, own):
        keys.add(["read"])
        keys.close()

    assert len(Keys(store).list()) == 1
    with pytest.raises(Exception, match="no such table"):  # a database in memory ends with its connection
        own.list()
    store.close()
    own._database.close()


@pytest.mark.parametrize(
    ("token", "name"),
    [("kdl_ab_x", "ab"), ("kdl_ab_x_y", "ab"), ("kdl_ab", ""), ("abc_ab_x", ""), ("", ""), ("kdl__x", "")],
)
def test_a_token_names_its_key(token: str, name: str) -> None:
    assert id_of(token) == name
