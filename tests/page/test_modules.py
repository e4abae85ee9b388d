"""The pure parts of the page's scripts, called in the browser that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.watched import Watched
from tests.serve.served import Served

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
IMAGE = {"name": "image", "dtype": "float32", "shape": [-1, 2, 2]}
WORD = {"name": "word", "dtype": "object", "shape": [-1]}
COUNT = {"name": "count", "dtype": "int64", "shape": [-1, 1]}


@pytest.fixture(scope="module")
def called(browser: Any, keyed: Served) -> Iterator[Any]:
    def call(module: str, function: str, *arguments: Any) -> Any:
        script = "async ([m, f, a]) => (await import(`/static/${m}`))[f](...a)"
        return page.page.evaluate(script, [module, function, list(arguments)])

    with Watched.opened(browser, keyed.url) as page:
        page.refusals = {401}
        page.go("/")
        yield call


def test_an_example_has_the_form_that_the_model_takes(called: Any) -> None:
    one = {"inputs": [IMAGE], "columns": None}
    assert called("tensors.js", "example", one, 1) == [[[0.1, 0.2], [0.3, 0.4]]]
    several = {"inputs": [WORD, COUNT], "columns": None}
    assert called("tensors.js", "example", several, 2, "zeros") == {
        "word": ["text", "text"],
        "count": [[0], [0]],
    }
    table = {"inputs": [{"name": "x", "dtype": None, "shape": [-1, 2]}], "columns": ["a", "b"]}
    assert called("tensors.js", "example", table, 1) == [{"a": 0.1, "b": 0.2}]
    huge = {"inputs": [{**IMAGE, "shape": [-1, 1000, 1000]}], "columns": None}
    assert called("tensors.js", "example", huge, 1) is None


def test_flat_values_can_be_given_the_shape_of_the_model(called: Any) -> None:
    one = {"inputs": [IMAGE], "columns": None}
    assert called("tensors.js", "checked", [[[1, 2], [3, 4]]], one) == {"ok": True, "text": "[1, 2, 2]"}
    found = called("tensors.js", "checked", [1, 2, 3, 4, 5, 6, 7, 8], one)
    assert found["reshaped"] == {"shape": [2, 2, 2], "data": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]}
    assert "has a different shape" in called("tensors.js", "checked", [[1, 2], [3]], one)["text"]
    several = {"inputs": [WORD, COUNT], "columns": None}
    assert "word, count" in called("tensors.js", "checked", [1], several)["text"]


def test_outputs_become_the_rows_of_a_table(called: Any) -> None:
    assert called("tensors.js", "outputTable", [[1, 2], [3, 4]]) == {
        "columns": ["result[0]", "result[1]"],
        "rows": [[1, 2], [3, 4]],
    }
    outputs = {"sum": [1, 2], "box": [[[0, 1]], [[2, 3]]]}
    assert called("tensors.js", "outputTable", outputs) == {
        "columns": ["sum", "box"],
        "rows": [[1, [[0, 1]]], [2, [[2, 3]]]],
    }


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.72, 0.98, 3, [0.7, 0.8, 0.9, 1]),
        (5, 5, 4, [4.5, 5, 5.5]),
        (-3, 3, 3, [-4, -2, 0, 2, 4]),
        (0, 0, 4, [0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_cover_the_values(
    called: Any, low: float, high: float, most: int, expected: list[float]
) -> None:
    assert called("chart.js", "ticks", low, high, most) == expected
