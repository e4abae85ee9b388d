"""The OpenAPI document is true: what it allows never breaks the server."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from tests.serve.served import Served
from tests.whole import WHOLE, whole_only

schemathesis = pytest.importorskip("schemathesis")

WAIT_S = 120  # on a busy machine; schemathesis has 10 seconds otherwise
EXAMPLES = 10 if WHOLE else 5  # for each operation
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.mark.parametrize("kind", ["positive", pytest.param("negative", marks=whole_only)])
def test_no_request_that_the_document_allows_or_forbids_is_a_server_error(server: Served, kind: str) -> None:
    described = httpx.get(f"{server.url}/openapi.json", timeout=WAIT_S).json()
    document = schemathesis.openapi.from_dict(described)
    asked: list[int] = []

    def ask(case: Any) -> None:
        reply = case.call(base_url=server.url, timeout=WAIT_S)
        asked.append(reply.status_code)
        assert reply.status_code < 500, f"{case.method} {case.path}: {reply.text}"

    for found in document.get_all_operations():
        operation = found.ok()
        try:
            cases = operation.as_strategy(schemathesis.GenerationMode(kind))
            BOUNDED(given(case=cases)(ask))()
        except Unsatisfiable:
            assert kind == "negative"  # it takes nothing that could be wrong
    assert len(asked) > 30 * EXAMPLES
    assert ({200, 400, 404} if kind == "positive" else {400, 404}) <= set(asked)


def test_every_way_to_predict_is_in_the_document(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path in (
        "/v2/models/{name}/versions/{version}/infer",
        "/v1/models/{name}/labels/{version}:predict",
        "/invocations",
        "/api/v1/model/{name}/predict",
        "/api/v1/model/{name}/tags/{tag}",
    ):
        assert path in document["paths"]
    infer = document["paths"]["/v2/models/{name}/infer"]["post"]
    asked = infer["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert document["components"]["schemas"][asked.rpartition("/")[2]]["required"] == ["inputs"]
    assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= infer["responses"].keys()
    assert infer["security"] == [{"bearer": []}]
    assert {(one["name"], one["in"]) for one in infer["parameters"]} == {
        ("name", "path"),
        ("bucket", "query"),
    }
    versioned = document["paths"]["/v2/models/{name}/versions/{version}/infer"]["post"]["parameters"]
    assert {one["name"] for one in versioned if one["in"] == "path"} == {"name", "version"}
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        assert re.fullmatch(r"[A-Z].+\.", operation["description"]), operation  # one line, and a sentence
