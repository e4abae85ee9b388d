"""What a request may do: keys, scopes, buckets and names; and whom a server without keys answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from kindler.errors import StoreError
from kindler.serve.auth import Access, Authorizer, bare_name, is_loopback
from kindler.serve.http_errors import Problem
from kindler.serve.request_log import Entry
from kindler.store.keys import Key, _hashed

NOW = datetime.now(timezone.utc)


def key_of(name: str = "a", *scopes: str, **fields: Any) -> Key:
    return Key(name, scopes or ("read",), "", NOW, None, _hashed(f"kdl_{name}_x"), **fields)


class AtOnce(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FewKeys:
    """The keys of a store that counts what it is asked, and may be out of reach."""

    def __init__(self, *keys: Key, made: bool = True) -> None:
        self.there, self.made = {key.id: key for key in keys}, made
        self.reads, self.looks, self.fails = 0, list[str](), False

    def list(self) -> list[Key]:
        self.reads += 1
        if self.fails:
            raise StoreError("out of reach")
        return list(self.there.values())

    def find(self, name: str) -> Key | None:
        self.looks.append(name)
        return self.there.get(name)

    def were_made(self) -> bool:
        return self.made


class Server:
    """An authorizer with a clock that stands still, and its requests."""

    def __init__(self, *keys: Key, made: bool = True, local: bool = True, **options: Any) -> None:
        self.keys, self.now = FewKeys(*keys, made=made), 0.0
        clock = lambda: self.now  # noqa: E731
        self.authorizer = Authorizer(self.keys, AtOnce(), local=local, clock=clock, **options)  # type: ignore[arg-type]
        self.entry = Entry("1", "GET", "/", "v2")

    async def ask(
        self, headers: Mapping[str, str], *scopes: str, in_url: str | None = None, **options: bool
    ) -> Access:
        return await self.authorizer.authorize(self.entry, headers, in_url, scopes or ("read",), **options)

    def access(self, headers: Mapping[str, str], *scopes: str, **options: Any) -> Access:
        return asyncio.run(self.ask(headers, *scopes, **options))

    def status(self, headers: Mapping[str, str], *scopes: str, **options: Any) -> int:
        try:
            self.access(headers, *scopes, **options)
        except Problem as problem:
            return problem.status
        return 200


SENT = {"x-api-key": "kdl_a_x"}


def test_a_key_covers_its_buckets_and_the_globs_of_its_shelves() -> None:
    limited = Access(key_of(buckets=("live",), names={"models": ("a/*", "b")}), "live")

    assert [limited.covers("models", name) for name in ("a/x", "b", "c", "a/x/y")] == [
        True,
        True,
        False,
        False,
    ]
    assert not limited.covers("datasets", "b"), "a shelf without globs is closed"
    assert not replace(limited, bucket="default").covers("models", "b")
    assert Access(key_of(buckets=("live",)), "live").covers("models", "c")
    assert Access(key_of(names={"models": ("b",)}), "any").covers("models", "b")
    assert Access(None, "default").covers("models", "c")
    assert (limited.key_id, Access(None, "default").key_id) == ("a", None)


def test_a_name_is_checked_without_what_says_which_version() -> None:
    access = Access(key_of(names={"models": ("net",)}), "default")
    for name in ("net", "net@prod", "net^", "net[x]", "net{x}", "net#x"):
        assert bare_name(name) == "net"
        access.check("models", name)
    with pytest.raises(
        Problem, match="the API key a has no access to models/other in the bucket 'default'"
    ) as no:
        access.check("models", "other@1")
    assert no.value.status == 403


def test_any_one_of_the_scopes_is_enough() -> None:
    access = Access(key_of("a", "read", "predict"), "default")
    access.require("write", "predict")
    Access(None, "default").require("admin")
    with pytest.raises(Problem, match="a has the scopes read, predict; this needs write or admin") as no:
        access.require("write", "admin")
    assert no.value.status == 403


def test_datasets_beside_a_model_need_the_scope_to_read_and_their_names() -> None:
    reader = Access(key_of("a", "read", names={"datasets": ("mine",)}), "default")
    reader.check_datasets(None, "mine")
    with pytest.raises(Problem, match="datasets/other"):
        reader.check_datasets("mine", None, "other")
    predicts = Access(key_of("a", "predict"), "default")
    predicts.check_datasets(None)
    with pytest.raises(Problem, match="this needs read"):
        predicts.check_datasets("mine")


def test_a_request_is_for_the_bucket_of_its_header_or_of_its_url() -> None:
    server = Server(key_of())
    for header, url, bucket in (("b", None, "b"), (None, "c", "c"), ("b", "b", "b"), (None, None, "default")):
        headers = SENT if header is None else {**SENT, "bucket": header}
        assert server.access(headers, in_url=url).bucket == server.entry.bucket == bucket
    with pytest.raises(Problem, match="the header names the bucket 'b', and the URL 'c'") as no:
        server.access({**SENT, "bucket": "b"}, in_url="c")
    assert no.value.status == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": " kdl_a_x "},
        {"authorization": "Bearer kdl_a_x"},
        {"authorization": "bearer  kdl_a_x"},
        {"authorization": "ApiKey me:kdl_a_x"},
        {"x-api-key": "kdl_a_x", "authorization": "Bearer kdl_b_x"},
    ],
    ids=str,
)
def test_a_key_is_sent_in_any_of_these_ways_and_noted(headers: dict[str, str]) -> None:
    server = Server(key_of())
    access = server.access(headers)

    assert (access.key, access.bucket, server.entry.key) == (key_of(), "default", "a")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic kdl_a_x"}, {"x-api-key": ""}], ids=str)
def test_without_a_key_a_request_is_asked_for_one(headers: dict[str, str]) -> None:
    with pytest.raises(Problem, match=r"missing API key; send 'Authorization: Bearer <key>'\.$") as no:
        Server(key_of()).access(headers)
    assert (no.value.status, no.value.headers) == (401, {"www-authenticate": "Bearer"})
    with pytest.raises(Problem, match="The store has no keys left: `kindler keys add` creates one"):
        Server().access(headers)


def test_an_unknown_wrong_or_expired_key_is_rejected_alike() -> None:
    server = Server(key_of(), replace(key_of("b"), expires=NOW))
    for token in ("kdl_c_x", "kdl_a_y", "kdl_b_x", "x"):
        with pytest.raises(Problem, match="unknown or expired API key") as no:
            server.access({"x-api-key": token})
        assert (no.value.status, no.value.headers) == (401, {"www-authenticate": "Bearer"})
    assert server.entry.key is None


def test_a_key_needs_a_scope_and_if_it_is_limited_an_endpoint_that_checks_names() -> None:
    server = Server(key_of(), key_of("b", buckets=("default",)))
    assert server.status(SENT, "predict", "read") == 200
    assert server.status(SENT, "predict") == 403
    limited = {"x-api-key": "kdl_b_x"}
    assert (server.status(limited), server.status(limited, limited=True)) == (403, 200)
    with pytest.raises(Problem, match="the API key b is restricted"):
        server.access(limited)


def test_what_needs_no_scope_needs_no_key_and_no_store() -> None:
    server = Server(key_of(), local=False)
    access = asyncio.run(server.authorizer.authorize(server.entry, {"bucket": "b"}, None, ()))

    assert (access, server.entry.bucket, server.keys.reads) == (Access(None, "b"), "b", 0)


def test_only_a_local_server_of_a_store_that_never_had_keys_is_open() -> None:
    for local in (True, False):
        for made in (True, False):
            status = Server(made=made, local=local).status({}, "admin")
            assert status == (200 if local and not made else 401), (local, made)


def test_a_server_that_was_open_is_closed_by_the_first_key_for_good() -> None:
    server = Server(made=False)
    assert server.access({}) == Access(None, "default")
    server.keys.made, server.now = True, 10.0
    assert server.status({}) == 401
    server.keys.made, server.now = False, 20.0
    assert server.status({}) == 401


def test_keys_are_read_again_after_two_seconds() -> None:
    server = Server(key_of())
    server.status(SENT)
    del server.keys.there["a"]
    server.now = 2.0
    assert (server.status(SENT), server.keys.reads) == (200, 1)
    server.now = 2.5
    assert (server.status(SENT), server.keys.reads) == (401, 2)


def test_requests_that_come_together_share_one_read_and_one_look() -> None:
    server = Server(key_of())

    async def together() -> list[Access]:
        async def ask(token: str) -> Any:
            try:
                return await server.ask({"x-api-key": token})
            except Problem as problem:
                return problem.status

        return await asyncio.gather(*(ask(token) for token in ("kdl_a_x", "kdl_b_x") * 3))

    assert asyncio.run(together()) == [Access(key_of(), "default"), 401] * 3
    assert (server.keys.reads, server.keys.looks) == (1, ["b"])


def test_a_new_key_works_at_once_and_an_unknown_one_is_looked_for_once_in_two_seconds() -> None:
    server = Server(key_of())
    assert server.status(SENT) == 200
    server.keys.there["b"] = key_of("b")
    assert [server.status({"x-api-key": "kdl_b_x"}) for _ in range(2)] == [200, 200]
    assert [server.status({"x-api-key": "kdl_c_x"}) for _ in range(2)] == [401, 401]
    assert server.keys.looks == ["b", "c"]
    server.now = 10.0
    assert server.status({"x-api-key": "kdl_c_x"}) == 401
    assert server.keys.looks == ["b", "c", "c"]


def test_an_id_that_no_key_can_have_is_not_looked_for() -> None:
    server = Server(key_of("x" * 64))
    del server.keys.there["x" * 64]
    for name in ("x" * 64, "x" * 65, ""):
        assert server.status({"x-api-key": f"kdl_{name}_x"}) == 401
    assert server.keys.looks == ["x" * 64]


def test_of_very_many_unknown_ids_only_some_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kindler.serve.auth._MOST_UNKNOWN", 2)
    server = Server(key_of())
    for name in "bcdbcd":
        server.status({"x-api-key": f"kdl_{name}_x"})

    assert server.keys.looks == ["b", "c", "d", "d"]


def test_a_store_out_of_reach_leaves_the_keys_that_were_known(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(key_of())
    assert server.status(SENT) == 200
    server.keys.fails, server.now = True, 10.0
    assert [server.status(SENT) for _ in range(2)] == [200, 200]
    assert server.keys.reads == 2, "it is not asked again for two seconds"
    assert "cannot read the API keys: out of reach" in caplog.text
    begins = Server(key_of())
    begins.keys.fails = True
    with pytest.raises(StoreError, match="out of reach"):
        begins.access(SENT)


LOCAL = ["localhost", "localhost:80", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:80", ""]
OTHERS = ["evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.1:80", "[::2]:80", ":80"]


@pytest.mark.parametrize("host", LOCAL + OTHERS)
def test_without_keys_a_server_answers_under_its_own_host_names_only(host: str) -> None:
    server = Server(made=False)
    if host in LOCAL:
        assert server.access({"host": host}) == Access(None, "default")
    else:
        with pytest.raises(
            Problem, match=f"only answers on a loopback host name, not {re.escape(repr(host))}"
        ) as no:
            server.access({"host": host})
        assert no.value.status == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://[::1]", 200),
        ("https://app.example", 200),
        ("https://app.example:444", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
        ("*", 403),
    ],
)
def test_without_keys_a_server_answers_pages_of_this_machine_and_of_its_origins(
    origin: str, status: int
) -> None:
    server = Server(made=False, origins=["https://app.example", "*"])

    assert server.status({"host": "localhost", "origin": origin}) == status


def test_an_address_is_loopback_by_its_number_or_as_localhost() -> None:
    hosts = ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]", "0.0.0.0", "::", "10.0.0.1", "a", ""]

    assert [host for host in hosts if is_loopback(host)] == hosts[:5]
