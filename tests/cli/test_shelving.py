"""`kindler models` and `kindler datasets`: what they print, write and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.linear_model import LinearRegression

from kindler import Store, cli, tfrecord

Kindler = Callable[..., tuple[int, str, str]]

TABLE = pa.table({"a": [1.5, 2.5, 3.5], "b": [10, 20, 30]})


@pytest.fixture
def om(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store that commands use, in the folder where they run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINDLER_STORE", str(tmp_path / "store"))
    made = Store(tmp_path / "store")
    assert made.buckets == []  # opened, and so made
    return made


@pytest.fixture
def kindler(capsys: pytest.CaptureFixture[str]) -> Kindler:
    """Runs a command: its status, what it printed, and what it complained of."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(arguments)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def linear(slope: float = 1.0) -> LinearRegression:
    x = np.arange(6.0).reshape(3, 2)
    return LinearRegression().fit(x, x @ [slope, 2.0])


def test_ls_shows_the_newest_versions_aligned_or_as_json(om: Store, kindler: Kindler) -> None:
    om.models.put(linear(), "team/net", tag="old")
    om.models.put(linear(2), "team/net", tag=["prod", "best"])
    om.models.put(linear(), "other")

    status, out, _ = kindler("models", "ls", "team/*")
    lines = out.splitlines()
    assert (status, lines[0].split()) == (0, ["NAME", "VERSION", "KIND", "SIZE", "CREATED", "TAGS"])
    assert len(lines) == 2
    assert lines[1].startswith("team/net        2  sklearn  ")
    assert lines[1].endswith("best prod")
    told = json.loads(kindler("models", "ls", "--json", "--versions")[1])
    assert [(v["name"], v["version"], v["tags"]) for v in told] == [
        ("other", 1, []),
        ("team/net", 1, ["old"]),
        ("team/net", 2, ["best", "prod"]),
    ]


def test_buckets_are_apart(om: Store, kindler: Kindler) -> None:
    om["live"].models.put(linear(), "net")

    assert json.loads(kindler("models", "ls", "--json")[1]) == []
    assert [v["name"] for v in json.loads(kindler("models", "ls", "--json", "--bucket", "live")[1])] == [
        "net"
    ]


def test_rm_takes_names_versions_and_globs_and_a_missing_one_is_an_error(om: Store, kindler: Kindler) -> None:
    for name in ("a/1", "a/2", "b", "b"):
        om.models.put(linear(), name)

    assert kindler("models", "rm", "a/*") == (0, "a/1@1\na/2@1\n", "")
    assert kindler("models", "rm", "b@1") == (0, "b@1\n", "")
    assert om.models.list() == ["b"]
    for name in ("gone", "gone/*", "b@7"):
        status, out, error = kindler("models", "rm", name)
        assert (status, out) == (1, "")
        assert error.startswith("kindler: there is no ")
    assert kindler("models", "rm", "gone", "gone/*", "--force") == (0, "", "")


def test_tag_moves_shows_and_takes_away(om: Store, kindler: Kindler) -> None:
    om.models.put(linear(), "net")
    om.models.put(linear(), "net")

    assert kindler("models", "tag", "net^", "prod") == (0, "net@1 prod\n", "")
    assert kindler("models", "tag", "net@2", "prod") == (0, "net@2 prod\n", "")
    assert kindler("models", "tag", "net") == (0, "prod 2\n", "")
    assert kindler("models", "tag", "net", "prod", "--remove")[0] == 0
    assert om.models.tags("net") == {}
    assert kindler("models", "tag", "net", "prod", "--remove")[0] == 1


def test_a_model_goes_to_a_file_and_comes_back(om: Store, kindler: Kindler, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    graph = onnx.helper.make_graph([], "empty", [], [])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "net.onnx")

    put = kindler("models", "put", "net.onnx", "net", "--tag", "prod", "--attribute", "score=0.5")
    assert put == (0, "net@1\n", "")
    assert om.models.metadata("net@prod").attributes == {"score": 0.5}
    assert kindler("models", "get", "net", "again.onnx") == (0, "net@1 -> again.onnx\n", "")
    assert Path("again.onnx").read_bytes() == Path("net.onnx").read_bytes()
    status, _, error = kindler("models", "get", "net", "again.onnx")
    assert (status, "--force" in error) == (1, True)
    assert kindler("models", "get", "net", "again.onnx", "--force")[0] == 0

    assert kindler("models", "get", "net", "net.zip", "--format", "archive")[0] == 0
    assert kindler("models", "put", "net.zip", "copy") == (0, "copy@1\n", "")
    assert om.models.metadata("copy").digest == om.models.metadata("net").digest


def test_datasets_of_every_kind_of_file_come_back_equal(om: Store, kindler: Kindler) -> None:
    pa.csv.write_csv(TABLE, "t.csv")
    pq.write_table(TABLE, "t.parquet")
    Path("t.jsonl").write_text('{"a": 1.5, "b": 10}\n{"a": 2.5, "b": 20}\n{"a": 3.5, "b": 30}\n')
    np.save("t.npy", np.eye(2))
    np.savez("t.npz", x=np.eye(2), y=np.ones(2))
    Path("t.json").write_text('{"k": [1, null, "é"]}')
    tfrecord.write(TABLE, "t.tfrecord")
    for kind in ("csv", "parquet", "jsonl", "npy", "npz", "json", "tfrecord"):
        assert kindler("datasets", "put", f"t.{kind}", kind) == (0, f"{kind}@1\n", "")
        assert kindler("datasets", "get", kind, f"got.{kind}")[0] == 0

    for kind in ("csv", "parquet", "jsonl"):
        for target in ("csv", "parquet"):
            assert kindler("datasets", "get", kind, f"{kind}-as.{target}")[0] == 0
        assert pa.csv.read_csv(f"{kind}-as.csv") == pq.read_table(f"{kind}-as.parquet") == TABLE
    np.testing.assert_array_equal(np.load("got.npy"), np.eye(2))
    assert sorted(np.load("got.npz").files) == ["x", "y"]
    assert json.loads(Path("got.json").read_text()) == {"k": [1, None, "é"]}
    assert Path("got.tfrecord").read_bytes() == Path("t.tfrecord").read_bytes()


def test_datasets_are_replaced_and_appended_only_if_asked_and_printed_as_csv(
    om: Store, kindler: Kindler
) -> None:
    pa.csv.write_csv(TABLE, "t.csv")
    kindler("datasets", "put", "t.csv", "t")

    status, _, error = kindler("datasets", "put", "t.csv", "t")
    assert (status, error.startswith("kindler: the dataset 't' already exists.")) == (1, True)
    assert kindler("datasets", "put", "t.csv", "t", "--mode", "append") == (0, "t@2\n", "")
    assert kindler("datasets", "get", "t", "-", "--columns", "b")[1].splitlines() == [
        '"b"', "10", "20", "30", "10", "20", "30"
    ]  # fmt: skip
    status, _, error = kindler("datasets", "get", "t", "t.npy")
    assert (status, error) == (1, "kindler: a .npy file holds one array; received a table.\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["models", "put", "none.keras", "x"], "'none.keras' does not exist"),
        (["models", "get", "none", "x"], "there is no model"),
        (["datasets", "put", "none.csv", "x"], "'none.csv' does not exist"),
        (["datasets", "put", "bad.parquet", "x"], "bad.parquet"),
        (["datasets", "put", "bad.npy", "../x"], "'../x'"),
        (["models", "ls", "--store", "ftp://nowhere"], "ftp"),
        (["predict", "x", "--input", "none.csv"], "none.csv: No such file"),
    ],
)
def test_what_goes_wrong_is_said_without_a_traceback(
    om: Store, kindler: Kindler, arguments: list[str], complaint: str
) -> None:
    Path("bad.parquet").write_bytes(b"no")
    np.save("bad.npy", np.eye(2))

    status, out, error = kindler(*arguments)

    assert (status, out) == (1, "")
    assert error.startswith("kindler: ")
    assert complaint in error
    assert "Traceback" not in error


def test_a_reader_that_goes_away_is_no_error(om: Store) -> None:
    om.models.put(linear(), "net")
    read, write = os.pipe()
    os.close(read)

    done = subprocess.run(
        [sys.executable, "-m", "kindler", "models", "ls"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)

    assert done.stderr == ""


@pytest.mark.parametrize("verb", [["ls"], ["rm", "x"], ["get", "x", "y"], ["tag", "x"]])
def test_a_mistyped_store_is_not_made(tmp_path: Path, kindler: Kindler, verb: list[str]) -> None:
    place = tmp_path / "mistyped"
    status, _, said = kindler("models", *verb, "--store", str(place))
    assert status != 0
    assert "there is no store at" in said
    assert not place.exists()
