"""What operators rely on: limited keys, logs, canaries, shadows, TLS, CORS; mostly in this process."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest

from kindler import Store
from kindler.cli import main
from kindler.errors import ConfigError
from kindler.serve.app import create_app
from kindler.serve.request_log import JsonLog, request_id
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.traffic import Traffic, same_outputs
from kindler.store.keys import Key, Keys
from kindler.store.splits import Split, Splits
from tests.serve.served import constant, serving

Work = Callable[[httpx.AsyncClient], Awaitable[Any]]
BODY = {"instances": [[1, 2, 3]]}


@pytest.fixture
def om(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    for value in (1.0, 2.0, 3.0):
        made.models.put(constant(value), "net", tag="prod" if value == 1.0 else None)
    made.models.put(constant(7.0), "team/net")
    made["side"].models.put(constant(9.0), "net")
    made.datasets.put(pd.DataFrame({"a": [1.0], "b": [2.0], "c": [3.0]}), "team/rows")
    made.datasets.put(pd.DataFrame({"a": [1.0], "b": [2.0], "c": [3.0]}), "rows")
    return made


def with_app(om: Store, work: Work, *, local: bool = True, **settings: Any) -> Any:
    async def run() -> Any:
        front = create_app(om, ServeSettings(**settings), local=local)
        started, stopped = asyncio.Event(), asyncio.Event()
        over: asyncio.Queue[Any] = asyncio.Queue()
        await over.put({"type": "lifespan.startup"})

        async def tell(message: Any) -> None:
            (started if "startup" in message["type"] else stopped).set()

        life = asyncio.create_task(front({"type": "lifespan"}, over.get, tell))
        await started.wait()
        transport = httpx.ASGITransport(front)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await work(client)
        finally:
            await over.put({"type": "lifespan.shutdown"})
            await stopped.wait()
            await life

    return asyncio.run(run())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_limited_key_opens_its_buckets_and_names_and_nothing_beside(om: Store) -> None:
    keys = Keys(om.store.url)
    every = ["read", "predict", "write"]
    team = keys.add(every, names={"models": ["team/**"], "datasets": ["team/*"]})[1]
    side = keys.add(["admin"], buckets=["side"])[1]
    keys.close()

    async def work(client: httpx.AsyncClient) -> None:
        async def status(key: str, method: str, path: str, body: Any = None, **headers: str) -> int:
            given = {"x-api-key": key, **headers}
            return (await client.request(method, path, json=body, headers=given)).status_code

        predict = "/v1/models/{}:predict"
        for path, found in [
            (predict.format("team/net"), 200),
            (predict.format("team/net@1"), 200),
            (predict.format("net"), 403),
            (predict.format("net@prod"), 403),
            (predict.format("team"), 403),
            (predict.format("team/net") + "?bucket=side", 404),  # its names, but not there
        ]:
            assert await status(team, "POST", path, BODY) == found, path
        for path, found in [
            ("/v2/models/team/net", 200),
            ("/v2/models/net", 403),
            ("/v2/models/net/config", 403),
            ("/api/v1/model/net", 403),
            ("/api/v1/model/team/net/metadata", 200),
            ("/api/v1/dataset/team/rows", 200),
            ("/api/v1/dataset/rows", 403),
            ("/api/v1/scripts", 200),
            ("/metrics", 403),  # of all models
            ("/api/v1/stats", 403),
            ("/api/v1/task/none/result", 404),
        ]:
            assert await status(team, "GET", path) == found, path
        datax = "/api/v1/model/team/net/predict?datax="
        assert await status(team, "PUT", datax + "team/rows") == 200
        assert await status(team, "PUT", datax + "rows") == 403
        assert await status(team, "PUT", datax + "rows[a]", None, **{"async": "true"}) == 403
        assert await status(team, "PUT", "/api/v1/model/net/fit?datax=team/rows") == 403
        assert await status(team, "DELETE", "/api/v1/dataset/rows") == 403

        listed = await client.get("/api/v1/models", headers={"x-api-key": team})
        assert [model["name"] for model in listed.json()["models"]] == ["team/net"]
        for path in ("/v2/models", "/v1/models"):
            found = (await client.get(path, headers={"x-api-key": team})).json()
            assert found["models"] == ["team/net"]
            assert found.get("data", []) == []  # text models, as OpenAI's clients list them
        index = await client.post("/v2/repository/index", headers={"x-api-key": team})
        assert [one["name"] for one in index.json()] == ["team/net"]

        assert await status(side, "POST", predict.format("net"), BODY) == 403
        assert await status(side, "POST", predict.format("net"), BODY, bucket="side") == 200
        assert await status(side, "POST", predict.format("net") + "?bucket=side", BODY) == 200
        # Whichever of the two a route would take.
        assert await status(side, "GET", "/api/v1/model/net?bucket=default", bucket="side") == 400
        assert await status(side, "PUT", "/api/v1/model/net/tags/x", {"version": 1}) == 403
        shown = (await client.get("/api/v1/key", headers={"x-api-key": side})).json()
        assert (shown["buckets"], shown["names"]) == (["side"], {})
        buckets = await client.get("/api/v1/buckets", headers={"x-api-key": side})
        assert buckets.json() == {"buckets": ["side"]}

    with_app(om, work)


def test_no_body_is_read_and_no_route_is_named_before_the_key_is_known(om: Store) -> None:
    keys = Keys(om.store.url)
    reader = keys.add(["read"])[1]
    keys.close()

    async def work(client: httpx.AsyncClient) -> None:
        async def endless() -> Any:
            yield b"x" * (1 << 20)
            raise AssertionError("the body was read")

        for method, path in (("PUT", "/api/v1/dataset/x"), ("POST", "/v2/models/net/infer")):
            for headers, status in (({}, 401), ({"x-api-key": reader}, 403)):
                reply = await client.request(method, path, content=endless(), headers=headers)
                assert reply.status_code == status, path
        for method, status in (("GET", 404), ("POST", 403)):
            assert (await client.request(method, "/api/v1/none")).status_code == 401
            reply = await client.request(method, "/api/v1/none", headers={"x-api-key": reader})
            assert reply.status_code == status

    with_app(om, work)


def test_what_prometheus_reads_keeps_its_names(om: Store) -> None:
    async def work(client: httpx.AsyncClient) -> str:
        for name in ("net", "none"):
            await client.post(f"/v1/models/{name}:predict", json=BODY)
        return (await client.get("/metrics")).text

    text = with_app(om, work, isolation="none")
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    counters = (
        "prompt_tokens",
        "generated_tokens",
        "answers",
        "requests",
        "model_failures",
        "version_requests",
        "shadow_requests",
        "payload_rows",
        "process_restarts",
    )
    assert names == {
        *(f"kindler_{name}_total" for name in (*counters, "refused", "loads")),
        *(f"kindler_{name}_seconds" for name in ("request", "model", "queue", "first_token", "token")),
        "kindler_batch_rows",
        "kindler_loaded_models",
        "kindler_loaded_bytes",
        "kindler_device_bytes",
        "kindler_waiting_rows",
        "kindler_waiting_answers",
        "kindler_running_answers",
        *(f"kindler_drift_{name}" for name in ("psi", "ks", "missing", "new", "alarm")),
    }
    for line in (
        'kindler_requests_total{protocol="tfserving",status="200"} 1.0',
        'kindler_requests_total{protocol="tfserving",status="404"} 1.0',
        'kindler_version_requests_total{model="net",outcome="answered",version="3"} 1.0',
        'kindler_batch_rows_bucket{le="1.0",model="net"} 1.0',
        'kindler_model_seconds_count{model="net"} 1.0',
        'kindler_loads_total{outcome="loaded"} 1.0',
        "kindler_loaded_models 1.0",
    ):
        assert line in text.splitlines(), text


def test_limits_of_a_key_are_kept_and_earlier_versions_find_no_scope_in_it(om: Store) -> None:
    limits = ["--bucket", "side", "--model", "a b/*"]
    assert main(["keys", "add", "--store", om.store.url, "--scope", "predict", *limits]) == 0
    keys = Keys(om.store.url)
    (key,) = keys.list()
    assert (key.scopes, key.buckets, key.names) == (("predict",), ("side",), {"models": ("a b/*",)})
    with om.store.catalog.database.reading() as connection:
        written = connection.exec_driver_sql("SELECT scopes FROM kindler_keys").scalar()
    assert not {"read", "predict", "write", "admin"} & set(written.split())
    for wrong in ({"models": ["net@1"]}, {"things": ["x"]}, {"models": ["[z-a]"]}, {"models": ["*" * 17]}):
        with pytest.raises(ConfigError, match="glob|keys must be shelves"):
            keys.add(["read"], names=wrong)
    keys.close()
    assert not Key("i", ("read",), "", key.created, None, "x").is_limited


def test_logs_have_every_request_with_its_id_and_audits_have_changes_and_refusals(
    om: Store, tmp_path: Path
) -> None:
    access, audit = tmp_path / "access.log", tmp_path / "audit.log"
    keys = Keys(om.store.url)
    key, token = keys.add(["predict", "admin"])
    keys.close()
    own = {"x-api-key": token}

    async def work(client: httpx.AsyncClient) -> None:
        replies = [
            await client.post("/v1/models/net:predict", json=BODY, headers={**own, "x-request-id": "abc-1"}),
            await client.post("/v1/models/none:predict", json=BODY, headers=own),
            await client.put("/api/v1/model/net/tags/prod", json={"version": 2}, headers=own),
            await client.get("/api/v1/models"),
            await client.get("/healthz", headers={"x-request-id": 'no\t"id'}),
        ]
        assert [reply.status_code for reply in replies] == [200, 404, 200, 401, 200]
        assert replies[0].headers["x-request-id"] == "abc-1"
        assert replies[0].headers["x-model-version"] == "3"
        assert len({reply.headers["x-request-id"] for reply in replies}) == 5
        assert '"' not in replies[4].headers["x-request-id"]

    with_app(om, work, access_log=str(access), audit_log=str(audit))
    found = lines(access)
    assert [line["status"] for line in found] == [200, 404, 200, 401, 200]
    assert [line["level"] for line in found] == ["info", "warning", "info", "warning", "info"]
    first = found[0]
    assert first["request_id"] == "abc-1"
    assert (first["key"], first["model"], first["version"], first["rows"]) == (key.id, "net", 3, 1)
    assert first["path"] == "/v1/models/net:predict"
    assert token not in access.read_text()
    audited = [(line["path"], line["status"]) for line in lines(audit)]
    assert audited == [("/api/v1/model/net/tags/prod", 200), ("/api/v1/models", 401)]

    with_app(om, work, access_log=str(access), log_level="error")
    assert len(lines(access)) == 5


def test_a_log_that_was_rotated_is_written_anew_and_one_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = JsonLog(str(path))
    log.write({"n": 1})
    log.close()
    log = JsonLog(str(path))
    os.rename(path, tmp_path / "old")
    log.write({"n": 2})
    log.close()
    assert (lines(tmp_path / "old"), lines(path)) == ([{"n": 1}], [{"n": 2}])
    with pytest.raises(ConfigError, match="cannot write the log"):
        JsonLog(str(tmp_path / "none" / "log"))
    assert request_id({"x-request-id": "x" * 129}) != "x" * 129


def test_a_line_that_cannot_be_written_is_left_out_and_the_next_one_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = JsonLog(str(tmp_path / "log"))
    for line in ({"n": {1: "a key that is not text"}}, {"n": 2}):
        log.write(line)
    log.close()
    assert lines(tmp_path / "log") == [{"n": 2}]
    assert "cannot write to the log" in caplog.text


def test_a_canary_answers_its_share_and_a_session_stays_where_it_is(om: Store) -> None:
    om.models.split("net@prod", canary={2: 0.25})

    async def work(client: httpx.AsyncClient) -> None:
        async def version(path: str = "/v1/models/net@prod:predict", **headers: str) -> str:
            reply = await client.post(path, json=BODY, headers=headers)
            assert reply.status_code == 200
            return reply.headers["x-model-version"]

        while await version() != "2":  # it is loaded beside the first requests
            await asyncio.sleep(0)
        found = [await version() for _ in range(400)]
        assert set(found) == {"1", "2"}
        assert 50 < found.count("2") < 150
        assert {await version("/v1/models/net/labels/prod:predict") for _ in range(60)} == {"1", "2"}
        for session in ("a", "b", "c"):
            assert len({await version(**{"x-session-id": session}) for _ in range(10)}) == 1
        assert {await version(**{"x-session-id": str(n)}) for n in range(60)} == {"1", "2"}
        assert {await version("/v1/models/net:predict") for _ in range(20)} == {"3"}  # no tag, no split
        stats = (await client.get("/api/v1/stats")).json()["models"]["net"]["versions"]
        assert stats["2"]["requests"] > 100
        assert stats["1"]["failures"] == 0
        metrics = (await client.get("/metrics")).text
        assert 'kindler_version_requests_total{model="net",outcome="answered",version="2"}' in metrics

    with_app(om, work)


def test_a_canary_that_cannot_be_loaded_answers_nobody(om: Store) -> None:
    om.models.split("net@prod", canary={2: 1.0})
    om.models.drop("net@2")

    async def work(client: httpx.AsyncClient) -> None:
        for _ in range(5):
            reply = await client.post("/v1/models/net@prod:predict", json=BODY)
            assert reply.headers["x-model-version"] == "1"

    with_app(om, work)


def test_a_shadow_is_called_and_compared_and_changes_no_answer(om: Store) -> None:
    om.models.put(constant(1.0), "net")
    om.models.split("net@prod", shadow={2: 1.0, 4: 1.0})

    async def work(client: httpx.AsyncClient) -> None:
        for _ in range(10):
            reply = await client.post("/v1/models/net@prod:predict", json=BODY)
            assert reply.json() == {"predictions": [1.0]}
        counted: dict[str, Any] = {}
        while sum(sum(one["shadow"].values()) for one in counted.values()) < 20:
            await asyncio.sleep(0.01)
            counted = (await client.get("/api/v1/stats")).json()["models"]["net"]["versions"]
        assert counted["2"]["shadow"] == {"different": 10}
        assert counted["4"]["shadow"] == {"same": 10}
        assert counted["2"]["requests"] == 0

    with_app(om, work)


def test_shadows_that_fail_in_any_way_leave_their_place_to_others(om: Store) -> None:
    class Models:
        async def find(self, name: Any) -> Any:
            raise OSError("neither of Kindler's own errors")

    async def play() -> None:
        models: Any = Models()
        traffic = Traffic(Splits(om.store), models, Stats(), ThreadPoolExecutor(1), refresh_s=1000)
        split = Split("default", "net", "prod", shadow={2: 1.0})
        for _ in range(100):  # of which 32 run at a time
            assert traffic.shadow(split, {}, models.find) == [2]
            await asyncio.gather(*traffic._tasks)
        traffic.close()

    asyncio.run(play())
    om.close()


def test_counters_of_models_that_nobody_asks_for_any_more_are_forgotten() -> None:
    stats = Stats()
    for i in range(3000):
        stats.answered("v2", 200, 0.1, f"net{i // 2}", i)
    assert len(stats.versions) == 1000
    assert list(stats.models) == [f"net{i}" for i in range(1000, 1500)]
    assert b'model="net999"' not in stats.exposition()


def test_splits_are_set_over_http_and_by_command_and_checked(
    om: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        path = "/api/v1/model/net/tags/prod/split"
        reply = await client.put(path, json={"canary": {"2": 0.5}, "shadow": {"3": 1}})
        assert reply.json() == {"model": "net", "tag": "prod", "canary": {"2": 0.5}, "shadow": {"3": 1.0}}
        assert (await client.get(path)).json() == reply.json()
        assert (await client.put(path, json={"canary": {"2": 1.5}})).status_code == 400
        assert (await client.put(path, json={"canary": {"99": 0.5}})).status_code == 404
        assert (await client.put(path.replace("prod", "none"), json={})).status_code == 404

    with_app(om, work)
    assert main(["models", "split", "net@prod", "--store", om.store.url]) == 0
    assert capsys.readouterr().out == "net@prod canary 2=0.5 shadow 3=1\n"
    assert main(["models", "split", "net@prod", "--clear", "--store", om.store.url]) == 0
    assert capsys.readouterr().out == ""
    assert om.models.splits("net") == {}
    with pytest.raises(ConfigError, match="has no tag"):
        om.models.split("net@2", canary={1: 0.5})
    with pytest.raises(ConfigError, match="at most 1"):
        Split("default", "net", "prod", {1: 0.6, 2: 0.6})


def test_what_differs_is_told_from_what_is_only_rounded() -> None:
    one = {"y": np.array([1.0, np.nan])}
    assert same_outputs(one, {"y": np.array([1.0001, np.nan])})
    assert not same_outputs(one, {"y": np.array([1.1, np.nan])})
    assert not same_outputs(one, {"z": one["y"]})
    assert not same_outputs({"y": np.array(["a"], object)}, {"y": np.array(["b"], object)})


def test_pages_of_allowed_origins_may_ask_and_others_are_told_nothing(om: Store) -> None:
    shop, other = "https://shop.example", "https://other.example"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}

    async def work(client: httpx.AsyncClient) -> None:
        path = "/v1/models/net:predict"
        may = await client.options(path, headers={"origin": shop, **asks})
        assert may.status_code == 200
        assert "authorization" in may.headers["access-control-allow-headers"]
        reply = await client.post(path, json=BODY, headers={"origin": shop})
        assert reply.status_code == 200  # a server without keys answers no other site
        assert reply.headers["access-control-allow-origin"] == shop
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert (await client.options(path, headers={"origin": other, **asks})).status_code == 400
        refused = await client.post(path, json=BODY, headers={"origin": other})
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
        failed = await client.post("/v1/models/none:predict", json=BODY, headers={"origin": shop})
        assert failed.headers["access-control-allow-origin"] == shop  # so that the page sees the error

    with_app(om, work, cors_origins=(shop,))

    async def all_of_them(client: httpx.AsyncClient) -> None:
        # "*" is for servers with keys; without, any page could use the server of whoever opens it.
        assert (await client.get("/api/v1/models", headers={"origin": other})).status_code == 403
        assert (await client.get("/healthz", headers={"origin": other})).headers[
            "access-control-allow-origin"
        ] == "*"

    with_app(om, all_of_them, cors_origins=("*",))
    with pytest.raises(ConfigError, match="not an origin"):
        ServeSettings(cors_origins=("shop.example",))


def test_lists_come_in_pages(om: Store) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        first = (await client.get("/api/v1/models?limit=1")).json()
        assert [model["name"] for model in first["models"]] == ["net"]
        assert first["models"][0]["tags"] == {"prod": 1}
        second = (await client.get("/api/v1/models", params={"limit": 1, "after": first["next"]})).json()
        assert [model["name"] for model in second["models"]] == ["team/net"]
        assert second["next"] is None
        assert (await client.get("/api/v1/datasets?limit=1&pattern=team/*")).json()["next"] is None
        assert (await client.get("/api/v1/models?limit=0")).status_code == 422

    with_app(om, work)


def test_append_false_replaces_and_code_of_the_store_says_the_status(om: Store) -> None:
    def gone(data):  # type: ignore[no-untyped-def]
        raise LookupError("not here", 404)

    om.scripts.put(gone, "gone")

    async def work(client: httpx.AsyncClient) -> None:
        put = {"data": {"x": [1]}, "append": False}
        for _ in range(2):
            assert (await client.put("/api/v1/dataset/twice", json=put)).status_code == 200
        rows = await client.get("/api/v1/dataset/twice?orient=list")
        assert rows.json()["data"] == {"x": [1]}
        assert (await client.put("/api/v1/dataset/twice?append=true", json=put)).status_code == 200
        assert (await client.get("/api/v1/dataset/twice?orient=list")).json()["data"] == {"x": [1, 1]}
        assert (await client.put("/api/v1/dataset/twice", json={"data": {"x": [1]}})).status_code == 409
        reply = await client.post("/api/v1/script/gone/run", json=1)
        assert (reply.status_code, "not here" in reply.json()["message"]) == (404, True)
        begun = await client.put("/api/v1/model/net/score?datax=nothing&async=1")
        while (await client.get(f"/api/v1/task/{begun.json()['task_id']}/status")).json()["status"] in (
            "PENDING",
            "STARTED",
        ):
            await asyncio.sleep(0.05)
        failed = await client.get(f"/api/v1/task/{begun.json()['task_id']}/result")
        assert (failed.status_code, "nothing" in failed.json()["message"]) == (404, True)

    with_app(om, work, trusted=True)
    om.close()


def _certificate(folder: Path) -> tuple[str, str]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address, x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(cert), str(secret)


def test_tls_encrypts_http_and_grpc_and_demands_client_certificates(
    om: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tritonclient.grpc as triton

    cert, key = _certificate(tmp_path)
    own = ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", cert, "--grpc-port", "0"]
    with serving(om.store.url, *own) as served:
        assert served.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.TransportError, match=r"(?i)certificate|disconnected|reset|eof|closed"):
            httpx.get(f"{served.url}/healthz", verify=context)
        context.load_cert_chain(cert, key)
        assert httpx.get(f"{served.url}/healthz", verify=context).json() == {"status": "alive"}
        with triton.InferenceServerClient(
            served.grpc, ssl=True, root_certificates=cert, private_key=key, certificate_chain=cert
        ) as client:
            assert client.is_server_live()
    for wrong in (["--tls-cert", cert], ["--tls-cert", key, "--tls-key", key]):
        assert main(["serve", "--store", om.store.url, "--port", "0", *wrong]) == 1
        assert "cert" in capsys.readouterr().err
