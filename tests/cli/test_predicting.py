"""`kindler predict`: with a model of the store, and by a server; both answer alike."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

from kindler import Store, cli
from tests.serve.served import Served, command, linear, serving
from tests.store.test_runtimes import EXPECTED, onnx_model, openvino_model
from tests.store.test_runtimes import X as ROWS

Kindler = Callable[..., tuple[int, str, str]]

X = np.random.default_rng(1).normal(size=(4, 3))
FRAME = pd.DataFrame(X, columns=["a", "b", "c"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predicting") / "store"
    om = Store(folder)
    om.models.put(LogisticRegression().fit(FRAME, [0, 1, 0, 1]), "team/frame", tag="prod")
    om["live"].models.put(linear(), "net")
    if find_spec("onnx") and find_spec("onnxruntime"):
        om.models.put(onnx_model(), "onnx")
    if find_spec("openvino"):
        om.models.put(openvino_model(), "openvino")
    om.close()
    return folder


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Served]:
    key = command("keys", "add", "--scope", "predict", "--store", str(store)).stdout.strip()
    with serving(store) as served:
        served.key = key  # type: ignore[attr-defined]
        yield served


@pytest.fixture
def kindler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path
) -> Kindler:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINDLER_STORE", str(store))
    FRAME.to_csv("rows.csv", index=False)

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        status = cli.main(["predict", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def stored(store: Path) -> LogisticRegression:
    model: LogisticRegression = Store(store).models.get("team/frame")
    return model


def test_rows_of_every_kind_of_file_give_the_models_answer(kindler: Kindler, store: Path) -> None:
    FRAME[["c", "b", "a"]].to_parquet("rows.parquet")
    FRAME.to_json("rows.jsonl", orient="records", lines=True, double_precision=15)
    FRAME.to_json("records.json", orient="records", double_precision=15)
    Path("columns.json").write_text(json.dumps(FRAME.to_dict("list")))
    Path("lists.json").write_text(json.dumps(X.tolist()))
    np.save("rows.npy", X)
    expected = {"predictions": stored(store).predict(FRAME).tolist()}

    for name in (
        "rows.csv",
        "rows.parquet",
        "rows.jsonl",
        "records.json",
        "columns.json",
        "lists.json",
        "rows.npy",
    ):
        status, out, error = kindler("team/frame@prod", "--input", name)
        assert (status, json.loads(out or "0"), error) == (0, expected, ""), name
    for content in (Path("rows.csv").read_bytes(), Path("lists.json").read_bytes()):
        assert json.loads(kindler("team/frame", "--input", "-", stdin=content)[1]) == expected


def test_outputs_are_files_with_the_columns_that_they_were_made_of(kindler: Kindler, store: Path) -> None:
    chances = stored(store).predict_proba(FRAME)
    for name in ("out.csv", "out.parquet", "out.npy"):
        told = kindler("team/frame", "--input", "rows.csv", "--output", name, "--method", "predict_proba")
        assert told == (0, "", "")

    table = pd.read_csv("out.csv", float_precision="round_trip")
    assert list(table.columns) == ["a", "b", "c", "prediction_0", "prediction_1"]
    np.testing.assert_array_equal(table[["prediction_0", "prediction_1"]].to_numpy(), chances)
    np.testing.assert_array_equal(np.stack(pd.read_parquet("out.parquet")["prediction"]), chances)
    np.testing.assert_array_equal(np.load("out.npy"), chances)


def test_nothing_of_the_server_is_needed(kindler: Kindler, server: Served) -> None:
    expected = kindler("team/frame", "--input", "rows.csv")[1]
    blocked = ("orjson", "fastapi", "starlette", "uvicorn", "prometheus_client", "kindler.serve")
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from kindler import cli"
    run = [sys.executable, "-c", f"{program}; sys.exit(cli.main(sys.argv[1:]))", "predict", "team/frame"]
    for more in ((), ("--url", server.url, "--key", server.key)):  # type: ignore[attr-defined]
        done = subprocess.run(
            [*run, "--input", "rows.csv", *more], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_server_answers_as_the_store_does(kindler: Kindler, server: Served) -> None:
    key = ("--key", server.key)  # type: ignore[attr-defined]
    here = kindler("team/frame@prod", "--input", "rows.csv", "--method", "predict_proba")
    there = kindler(
        "team/frame@prod", "--input", "rows.csv", "--method", "predict_proba", "--url", server.url, *key
    )
    assert here == there
    assert here[0] == 0

    np.save("rows.npy", X)
    here = kindler("net", "--bucket", "live", "--input", "rows.npy")
    assert here == kindler("net", "--bucket", "live", "--input", "rows.npy", "--url", server.url, *key)


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_models_of_other_runtimes_are_served(kindler: Kindler, server: Served, kind: str) -> None:
    pytest.importorskip("onnxruntime" if kind == "onnx" else kind)
    np.save("rows.npy", ROWS)

    key = ("--key", server.key)  # type: ignore[attr-defined]
    status, out, _ = kindler(kind, "--input", "rows.npy", "--url", server.url, *key)

    assert status == 0
    np.testing.assert_allclose(json.loads(out)["predictions"], EXPECTED, rtol=1e-6)


def test_what_a_server_refuses_is_said_in_its_own_words(kindler: Kindler, server: Served) -> None:
    key = ("--key", server.key)  # type: ignore[attr-defined]
    status, out, error = kindler("team/frame", "--input", "rows.csv", "--url", server.url)
    assert (status, out, "returned 401" in error) == (1, "", True)
    status, _, error = kindler("none", "--input", "rows.csv", "--url", server.url, *key)
    assert (status, "returned 404: there is no model" in error) == (1, True)
    status, _, error = kindler("team/frame", "--input", "rows.csv", "--url", "http://127.0.0.1:9", *key)
    assert (status, "cannot be reached" in error) == (1, True)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a,b\n1,2\n", "the columns c are missing"),
        (b"[[1, 2]]", "has the shape [1, 2]; the model takes [rows, 3]"),
        (b"[[1, 2], [3]]", "the input cannot be read as json: setting an array element"),
        (b"{", "the input cannot be read as json: Expecting property name"),
        (
            b'"text"',
            "it does not hold rows.\nHint: expected a list of rows, a list of objects, or an object of",
        ),
    ],
)
def test_rows_that_the_model_does_not_take_are_refused_in_a_sentence(
    kindler: Kindler, content: bytes, complaint: str
) -> None:
    kind = "csv" if content.startswith(b"a") else "json"
    status, out, error = kindler("team/frame", "--input", "-", "--format", kind, stdin=content)

    assert (status, out) == (1, "")
    assert complaint in error
