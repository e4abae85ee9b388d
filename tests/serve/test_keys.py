"""Keys: made by the command, kept as hashes, asked for, and good for their scopes only."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kindler import Store
from kindler.serve.auth import Access, Authorizer, is_loopback
from kindler.serve.http_errors import Problem
from kindler.serve.request_log import Entry
from kindler.serve.stats import Stats
from kindler.serve.threads import Threads
from kindler.store.keys import Key, Keys
from tests.serve.served import command, constant, serving

BODY = {"instances": [[1, 2, 3]]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("keys") / "store"
    om = Store(folder)
    om.models.put(constant(1), "net")
    om.models.put(constant(2), "net")
    om.close()
    return str(folder)


@pytest.fixture(scope="module")
def tokens(store: str) -> dict[str, str]:
    made = {}
    for scope in ("read", "predict", "write", "admin"):
        done = command("keys", "add", "--store", store, "--scope", scope, "--note", f"for {scope}")
        assert done.returncode == 0, done.stderr
        made[scope] = done.stdout.strip()
    return made


@pytest.fixture(scope="module")
def client(store: str, tokens: dict[str, str]) -> Iterator[httpx.Client]:
    with serving(store, "--host", "0.0.0.0") as served, httpx.Client(timeout=60) as made:
        made.base_url = httpx.URL(f"http://127.0.0.1:{served.port}")
        yield made


REQUESTS = {
    "read": ("GET", "/api/v1/models", None),
    "predict": ("POST", "/v1/models/net:predict", BODY),
    "write": ("PUT", "/api/v1/dataset/d", {"data": {"x": [1]}, "mode": "replace"}),
    "admin": ("PUT", "/api/v1/model/net/tags/prod", {"version": 1}),
}


def test_a_key_is_good_from_the_moment_it_is_made(client: httpx.Client, store: str) -> None:
    keys = Keys(store)
    for _ in range(5):  # within the time for which a server keeps those it knows
        _, token = keys.add(["read"])
        assert client.get("/api/v1/models", headers={"x-api-key": token}).status_code == 200
    keys.close()


@pytest.mark.parametrize("scope", REQUESTS)
def test_a_request_needs_a_key_with_its_scope(
    client: httpx.Client, tokens: dict[str, str], scope: str
) -> None:
    method, path, body = REQUESTS[scope]
    assert client.request(method, path, json=body).status_code == 401
    wrong = {"authorization": f"Bearer {tokens[scope][:-1]}x"}
    assert client.request(method, path, json=body, headers=wrong).status_code == 401
    for name, token in tokens.items():
        reply = client.request(method, path, json=body, headers={"authorization": f"Bearer {token}"})
        assert reply.status_code == (200 if name in (scope, "admin") else 403), (name, reply.text)


OPEN = {"/healthz", "/readyz", "/ping", "/health", "/version", "/v2", "/v2/health/live", "/v2/health/ready"}
OPEN |= {"/api/v1/ping", "/"}


def test_every_route_of_the_document_asks_for_a_key(client: httpx.Client, tokens: dict[str, str]) -> None:
    reader = {"authorization": f"Bearer {tokens['read']}"}
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method in operations:
            url = re.sub(r"{[^}]+}", "x", path)
            status = client.request(method, url, json={}).status_code
            assert status == (200 if path in OPEN else 401), (method, path)
            allowed = client.request(method, url, json={}, headers=reader).status_code
            reads = method == "get" and "/task/" not in path
            assert (allowed != 403) is (reads or path == "/v2/repository/index"), (method, path, allowed)


@pytest.mark.parametrize("tag", ["score", "fit", "partial_fit", "predict", "run", "predict_proba"])
def test_the_scope_is_that_of_the_route_whatever_its_words(
    client: httpx.Client, tokens: dict[str, str], tag: str
) -> None:
    url = f"/api/v1/model/net/tags/{tag}"
    for scope in ("predict", "write", "read"):
        headers = {"x-api-key": tokens[scope]}
        assert client.put(url, json={"version": 1}, headers=headers).status_code == 403
        assert client.delete(url, headers=headers).status_code == 403
    headers = {"x-api-key": tokens["admin"]}
    assert client.put(url, json={"version": 1}, headers=headers).json()["tags"][tag] == 1
    assert client.delete(url, headers=headers).status_code == 200


def test_metadata_of_a_model_is_for_those_who_may_ask_it_and_datasets_are_not(
    client: httpx.Client, tokens: dict[str, str]
) -> None:
    headers = {"x-api-key": tokens["predict"]}
    for path in ("v2/models/net", "v2/models/net/ready", "v1/models/net", "v1/models/net/metadata"):
        assert client.get(f"/{path}", headers=headers).status_code == 200
    for path in ("api/v1/model/net", "api/v1/model/net/signature", "api/v1/key"):
        assert client.get(f"/{path}", headers=headers).status_code == 200
    for path in ("api/v1/datasets", "api/v1/dataset/d", "api/v1/models", "metrics", "api/v1/stats"):
        assert client.get(f"/{path}", headers=headers).status_code == 403
    for path in ("v2/models/net", "api/v1/model/net"):
        assert client.get(f"/{path}", headers={"x-api-key": tokens["write"]}).status_code == 403
    assert client.put("/api/v1/model/net/fit?datax=d", headers=headers).status_code == 403
    assert client.put("/api/v1/model/net/dance", headers=headers).status_code == 403


def test_who_may_not_ask_is_no_failure(client: httpx.Client, tokens: dict[str, str]) -> None:
    url, reader = "/api/v1/stats", {"x-api-key": tokens["read"]}
    for headers in ({}, reader):
        assert client.post("/v1/models/net:predict", json=BODY, headers=headers).status_code in (401, 403)
    stats = Stats()
    for status in (200, 400, 401, 403, 503):
        stats.answered("v2", status, 0.1, "net", 1)
    assert stats.live._seconds[-1].failures == 2
    assert client.get(url, headers=reader).status_code == 200


def test_health_is_asked_by_head_too(client: httpx.Client) -> None:
    for path in sorted(OPEN):
        assert (client.head(path).status_code, client.head(path).content) == (200, b"")


def test_health_needs_no_key_and_other_clients_send_theirs_in_their_own_way(
    client: httpx.Client, tokens: dict[str, str]
) -> None:
    for path in ("/healthz", "/readyz", "/ping", "/v2/health/ready"):
        assert client.get(path).status_code == 200
    for headers in ({"x-api-key": tokens["predict"]}, {"authorization": f"ApiKey me:{tokens['predict']}"}):
        assert client.post("/v1/models/net:predict", json=BODY, headers=headers).status_code == 200


def test_a_tag_moves_over_http_and_the_next_answer_is_of_the_new_version(
    client: httpx.Client, tokens: dict[str, str]
) -> None:
    headers = {"authorization": f"Bearer {tokens['admin']}"}
    for number in (1, 2, 1):
        url = "/api/v1/model/net/tags/live"
        assert client.put(url, json={"version": number}, headers=headers).json()["tags"]["live"] == number
        reply = client.post("/v1/models/net/labels/live:predict", json=BODY, headers=headers)
        assert reply.json() == {"predictions": [float(number)]}
    assert client.delete(url, headers=headers).status_code == 200
    reply = client.post("/v1/models/net/labels/live:predict", json=BODY, headers=headers)
    assert reply.status_code == 404
    assert client.put(url, json={"version": 9}, headers=headers).status_code == 404


def test_only_hashes_are_kept_and_a_removed_key_is_gone(store: str, tokens: dict[str, str]) -> None:
    kept = b"".join(path.read_bytes() for path in Path(store).glob("catalog*"))
    for token in tokens.values():
        assert token.encode() not in kept
        assert token.split("_", 2)[2].encode() not in kept  # the secret may have underscores
    keys = Keys(store)
    made, token = keys.add(["predict"], days=1)
    assert made.is_of(token)
    assert not made.is_over()
    listed = command("keys", "ls", "--store", store).stdout
    assert made.id in listed
    assert token not in listed
    assert command("keys", "rm", "--store", store, made.id).returncode == 0
    again = command("keys", "rm", "--store", store, made.id)
    assert (again.returncode, "there is no key" in again.stderr) == (1, True)
    keys.close()


def test_a_store_without_keys_is_served_on_this_machine_only(tmp_path: Path) -> None:
    done = command("serve", "--store", str(tmp_path / "s"), "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 1
    assert "kindler keys add" in done.stderr


def test_a_server_is_for_this_machine_only_under_its_own_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example"))


def authorizer_of(keys: Keys, clock: Callable[[], float] = time.monotonic) -> Authorizer:
    return Authorizer(keys, Threads(1, "test"), local=True, clock=clock)


async def access(authorizer: Authorizer, scope: str, token: str = "") -> Access:
    headers = {"x-api-key": token} if token else {}
    return await authorizer.authorize(Entry("1", "GET", "/", "v2"), headers, None, (scope,))


def test_a_store_whose_last_key_was_removed_is_not_open_again(tmp_path: Path) -> None:
    async def play() -> None:
        keys = Keys(str(tmp_path / "store"))
        now = 0.0
        authorizer = authorizer_of(keys, lambda: now)
        assert (await access(authorizer, "admin")).key is None  # it never had one
        keys.remove(keys.add(["read"])[0].id)
        now = 10.0
        for asked in (authorizer, authorizer_of(keys)):  # one that was open, and one that starts now
            with pytest.raises(Problem, match="no keys left: `kindler keys add`") as caught:
                await access(asked, "admin")
            assert caught.value.status == 401
            assert not asked.is_open
        keys.close()

    asyncio.run(play())


class CountedKeys(Keys):
    lists = finds = 0

    def list(self) -> list[Key]:
        self.lists += 1
        return super().list()

    def find(self, name: str) -> Key | None:
        self.finds += 1
        return super().find(name)


def test_an_unknown_key_costs_one_read_of_one_row_however_often_it_is_sent(tmp_path: Path) -> None:
    async def play() -> None:
        now = 0.0
        keys = CountedKeys(str(tmp_path / "store"))
        keys.add(["read"])
        authorizer = authorizer_of(keys, lambda: now)

        async def ask(key_id: str) -> None:
            with pytest.raises(Problem, match="unknown or expired"):
                await access(authorizer, "read", f"kdl_{key_id}_x")

        for _ in range(3):
            await asyncio.gather(*(ask(f"{i:08x}") for i in range(200)))
        await ask("x" * 10_000)  # no key has such an id
        assert (keys.lists, keys.finds) == (1, 200)
        made, token = keys.add(["read"])  # still good from the moment it is made
        assert (await access(authorizer, "read", token)).key == made
        keys.remove(made.id)
        keys.lists, keys.finds, now = 0, 0, 10.0
        await ask(made.id)
        assert (keys.lists, keys.finds) == (1, 1)
        keys.close()

    asyncio.run(play())
