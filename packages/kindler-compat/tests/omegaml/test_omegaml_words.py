"""omega|ml's words that its own programs use: names with columns, rows and arguments, revisions, promote."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pytest
from sklearn.linear_model import LinearRegression

import kindler.compat.omegaml as omegaml
from kindler.compat.omegaml import Omega, virtualobj
from kindler.errors import ConfigError, NotFoundError, TaskCancelledError, UntrustedError
from kindler.runtime.engine import Listener, Load
from kindler.runtime.messages import Report, Task
from kindler.runtime.runtime import Runtime
from kindler.shelves.expressions import parse_expression

FRAME = pd.DataFrame({"a": range(10), "b": [float(i) for i in range(10)], "c": list("abcdefghij")})


@pytest.fixture(scope="module")
def om(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omega]:
    made = Omega(tmp_path_factory.mktemp("words") / "store")
    made.datasets.put(FRAME, "df", append=False)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("df[a]", ["a"]),
        ("df[c, a]", ["c", "a"]),
        ("df[a:b]", ["a", "b"]),
        ("df[b:]", ["b", "c"]),
        ("df[:b]", ["a", "b"]),
        ("df[:]", ["a", "b", "c"]),
        ("df[^b]", ["a", "c"]),
        ("df[^a,c]", ["b"]),
        ("df@1[a]", ["a"]),
        ("df[a]@1", ["a"]),
    ],
)
def test_columns_are_chosen_by_name(om: Omega, name: str, columns: list[str]) -> None:
    pd.testing.assert_frame_equal(om.datasets.get(name), FRAME[columns])


def test_rows_and_pieces_are_parts_of_the_table(om: Omega) -> None:
    pd.testing.assert_frame_equal(om.datasets.get("df#rows:start=2,end=4"), FRAME.iloc[2:4])
    pd.testing.assert_frame_equal(om.datasets.get("df[a]#rows:end=3"), FRAME[["a"]].iloc[:3])
    pieces = list(om.datasets.get("df[a,b]#iterchunks:chunksize=4"))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    assert np.array_equal(np.concatenate([piece.to_numpy() for piece in pieces]), FRAME[["a", "b"]])
    assert [len(piece) for piece in om.datasets.get("df#")] == [10]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("df[x]", "available: a, b, c"),
        ("df[]", "available"),
        ("df[c:a]", "comes before"),
        ("df[a:x]", "selects the columns"),
        ("df#rows:start=x", "whole number"),
        ("df#head", "unknown operation"),
        ("df{x=1}", "only a stored function"),
        ("df[a", "is not the name of a dataset"),
        ("df@1[a]@2", "is not the name of a dataset"),
        ("df{x}", "pairs such as k=v"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_the_reason(om: Omega, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        om.datasets.get(name)


def test_what_is_left_out_of_a_name_is_nothing() -> None:
    assert parse_expression("a/b").chosen(["x"]) is None
    assert parse_expression("a^^").name == "a^^"


def test_revisions_change_rows_by_index_and_each_can_be_read_again(om: Omega) -> None:
    first = pd.DataFrame({"x": [1, 2, 3]}, index=[10, 20, 30])
    om.datasets.put(first, "rev", revisions=True, revision_dt="2024-01-01")
    om.datasets.put(pd.DataFrame({"x": [9, 4]}, index=[20, 40]), "rev", revision_dt="2024-02-01", tag="feb")
    om.datasets.put(pd.DataFrame({"x": [0]}, index=[10]), "rev", delete=True, revision_dt="2024-03-01")

    def now(name: str, **options: Any) -> dict[int, int]:
        return om.datasets.get(name, **options)["x"].to_dict()

    second = {10: 1, 20: 9, 30: 3, 40: 4}
    third = {20: 9, 30: 3, 40: 4}
    assert now("rev") == third
    assert om.datasets.revisions("rev") == ["rev@0", "rev@1", "rev@2"]
    assert [now(name) for name in om.datasets.revisions("rev")] == [{10: 1, 20: 2, 30: 3}, second, third]
    assert now("rev@-2") == now("rev@feb") == now("rev", revision=1) == second
    assert now("rev@2024-02-15") == second  # as it was then
    assert now("rev", revision="2024-01-01T12:00") == {10: 1, 20: 2, 30: 3}
    assert now("rev[x]@0#rows:start=1,end=2") == {20: 2}
    for missing in ("rev@3", "rev@2023-12-31"):
        with pytest.raises(NotFoundError, match="revision"):
            om.datasets.get(missing)
    with pytest.raises(ConfigError, match="without revisions"):
        om.datasets.put(FRAME, "df", revisions=True)
    with pytest.raises(ConfigError, match="has no revisions"):
        om.datasets.put(FRAME, "df", delete=True)
    changes = pd.DataFrame({"x": [7, 8], "_delete_": [True, False]}, index=[20, 30])
    om.datasets.put(changes, "rev")
    assert now("rev") == {30: 8, 40: 4}


def test_writers_of_revisions_at_the_same_time_lose_no_rows(om: Omega) -> None:
    writers, rounds = 4, 5
    go = threading.Barrier(writers)

    def write(writer: int) -> None:
        go.wait()
        for i in range(rounds):
            frame = pd.DataFrame({"x": [writer]}, index=[f"{writer}-{i}"])
            om.datasets.put(frame, "shared", revisions=True)

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    rows = om.datasets.get("shared")["x"].to_dict()
    assert rows == {f"{writer}-{i}": writer for writer in range(writers) for i in range(rounds)}
    assert len(om.datasets.revisions("shared")) == writers * rounds


def test_changes_may_have_new_columns_and_keep_the_types_of_others(om: Omega) -> None:
    first = pd.DataFrame({"x": [1, 2, 3]})
    second = pd.DataFrame({"x": [4, 5, 6], "y": [7, 8, 9]})
    om.datasets.put(first, "wider", revisions=True, tag="a")
    om.datasets.put(second, "wider", tag="b")
    om.datasets.put(pd.DataFrame({"y": [0]}, index=[1]), "wider")
    pd.testing.assert_frame_equal(om.datasets.get("wider@a"), first)
    pd.testing.assert_frame_equal(om.datasets.get("wider@b"), second)
    pd.testing.assert_frame_equal(om.datasets.get("wider"), second.assign(y=[7, 0, 9]))
    for changes, told in ((pd.DataFrame({"x": [1, 2]}, index=[5, 5]), "5 twice"), ([1], "received a list")):
        with pytest.raises(ConfigError, match=told):
            om.datasets.put(changes, "wider")


def test_a_date_is_the_last_version_that_was_made_until_then(om: Omega) -> None:
    for month in (1, 2):
        frame = pd.DataFrame({"x": [month]}, index=["a"])
        om.datasets.put(frame, "dated", revisions=True, revision_dt=datetime(2024, month, 1))
    for when in (
        datetime(2024, 1, 15),
        date(2024, 1, 15),
        pd.Timestamp("2024-01-15"),
        np.datetime64("2024-01-15"),
    ):
        for options in ({"version": when}, {"revision": when}):
            assert om.datasets.get("dated", **options)["x"].tolist() == [1]
    for shelf, name in ((om.datasets, "df"), (om.models, "model at a time")):
        if name not in shelf.list():
            shelf.put(LinearRegression(), name)
        assert shelf.get(name, version=datetime.now()) is not None
        with pytest.raises(NotFoundError, match="2001"):
            shelf.get(name, version=datetime(2001, 1, 1))
    with pytest.raises(ConfigError, match=r"is a float; a version is a number or a tag"):
        om.datasets.get("df", version=1.5)


def test_a_condition_that_the_column_cannot_have_is_said_to_be_that(om: Omega) -> None:
    for condition, told in (
        ({"a": {"$gt": 3}}, "the column 'a' is int64, which does not support this comparison"),
        ({"a__gt": "x"}, "the column 'a' is int64, which does not support this comparison"),
        ({"a__in": 3}, "does not support this comparison"),
        ({"a__in": "12"}, "in needs a list"),
        ({"a__between": 3}, "between needs two values"),
        ({"a": 1 << 70}, "does not support this comparison"),
        ({"c__startswith": 3}, "does not support this comparison"),
    ):
        with pytest.raises(ConfigError, match=told):
            om.datasets.get("df", filter=condition)
        with pytest.raises(ConfigError, match=told):
            om.datasets.get("df", **condition)
    with pytest.raises(ConfigError, match="does not support this comparison"):
        om.datasets.get("df", filter=pc.field("a") == "x")
    holes = pd.DataFrame({"x": [1.0, None], "c": [None, "b"]})
    om.datasets.put(holes, "holes", append=False)
    assert om.datasets.get("holes", filter={"x": None})["c"].tolist() == ["b"]
    assert om.datasets.get("holes", c__ne=None)["c"].tolist() == ["b"]


def test_promote_takes_a_version_to_another_bucket_or_store(om: Omega, tmp_path: Path) -> None:
    om.models.put(LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0]), "line", tag="best")
    promoted = om.models.promote("line", om["prod"].models)
    assert (promoted.bucket, str(promoted)) == ("prod", "line@1")
    other = Omega(tmp_path / "other")
    assert str(om.models.promote("line@best", other.models, asname="copy")) == "copy@1"
    assert other.models.get("copy").predict([[2.0]]).tolist() == pytest.approx([4.0])
    with pytest.raises(ConfigError, match="names are the same"):
        om.models.promote("line", om.models)
    assert str(om.models.promote("line", om.models, asname="again")) == "again@1"
    with pytest.raises(ConfigError, match="one of the models"):
        om.models.promote("line", om.datasets)
    assert om.models.promote("line", bucket="third").bucket == "third"
    assert om.models.revisions("line") == ["line@latest", "line@best", "line@1"]
    assert [version.number for version in om.models.revisions("line", raw=True)] == [1, 1, 1]
    assert om.models.get("line@latest").coef_.tolist() == pytest.approx([2.0])
    other.close()


def test_a_decorated_function_is_stored_by_its_source_and_called_as_omegaml_does(om: Omega) -> None:
    @virtualobj
    def rows(data=None, method=None, meta=None, n="2", **kwargs):  # type: ignore[no-untyped-def]
        return [method, data, str(meta), n, sorted(kwargs)]

    version = om.datasets.put(rows, "rows")
    assert version.meta["form"] == "source"
    with pytest.raises(UntrustedError):
        om.datasets.get("rows{n=3}")
    assert om.datasets.get("rows{n=3}", trusted=True) == ["get", None, "rows@1", "3", ["store"]]
    assert om.datasets.get("rows", trusted=True, n=5) == ["get", None, "rows@1", 5, ["store"]]


def test_what_is_put_onto_a_virtual_dataset_is_handed_to_its_function(tmp_path: Path) -> None:
    @virtualobj
    def box(data=None, method=None, meta=None, store=None, prefix="", **kwargs):  # type: ignore[no-untyped-def]
        name = f"{prefix}{meta.name}-data"
        if method == "put":
            return store.put(data, name)
        if method == "drop":
            store.drop(name, force=True)
            return not prefix
        return store.get(name) if store.exists(name) else "nothing yet"

    om = Omega(tmp_path / "store", trusted=True)
    stored = om.datasets.put(box, "box")
    assert om.datasets.get("box") == "nothing yet"
    assert om.datasets.put(["foo"], "box").name == "box-data"
    assert om.datasets.put(FRAME, "box{prefix=other-}").name == "other-box-data"
    assert om.datasets.get("box") == ["foo"]
    assert om.datasets.get("box", prefix="other-").equals(FRAME)
    assert om.datasets.metadata("box") == stored  # it is what it was

    suspicious = Omega(tmp_path / "store")
    with pytest.raises(UntrustedError):
        suspicious.datasets.put(["foo"], "box")
    assert om.datasets.put(box, "box").number == 2  # a function is a new version of it
    om.datasets.drop("box")
    assert om.datasets.list() == ["other-box-data"]

    om.datasets.put(box, "box")
    assert om.datasets.put([1], "box", replace=True).kind == "json"
    om.datasets.put(lambda: 1, "plain", trusted=True)
    with pytest.raises(ConfigError, match="is a function, which does not store data"):
        om.datasets.put([1], "plain")
    om.close()
    suspicious.close()


def test_the_module_itself_has_the_shelves_and_the_runtime(tmp_path: Path) -> None:
    omegaml.setup(str(tmp_path / "store"))
    omegaml.datasets.put(FRAME, "df")
    assert omegaml.datasets.list() == ["df"]
    assert omegaml.runtime.require("gpu").model("x")._settings.label == "gpu"  # no module of that name
    omegaml.setup()


def test_append_false_replaces_and_versions_count_back(om: Omega) -> None:
    for value in (1, 2):
        om.datasets.put(pd.DataFrame({"x": [value]}), "twice", append=False)
    assert om.datasets.get("twice")["x"].tolist() == [2]
    assert om.datasets.get("twice", version=-2)["x"].tolist() == [1]


class Submitted:
    """An engine that runs nothing: its tasks end as a test says."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Task, Listener]] = []

    def submit(self, task: Task, listen: Listener) -> None:
        self.tasks.append((task, listen))

    def cancel(self, task_id: str) -> None: ...

    def load(self) -> Load:
        return Load(engine="none", workers=0, busy=0, waiting=0)

    def close(self) -> None: ...


def test_a_part_of_a_mapreduce_that_fails_cancels_the_last_call(tmp_path: Path) -> None:
    om, engine = Omega(tmp_path / "store"), Submitted()

    def part(data, method=None, **options):  # type: ignore[no-untyped-def]
        return data

    for name in ("part", "joined"):
        om.models.put(part, name)
    runtime = Runtime(om.store, "default", lambda: engine)
    with runtime.mapreduce() as group:
        for i in range(2):
            group.model("part").predict([i])
        last = group.model("joined").reduce()
    group.run()
    assert [task.verb for task, _ in engine.tasks] == ["predict", "predict"]
    error = {"types": [], "message": "no", "traceback": "", "host": ""}
    for (_, listen), state in zip(engine.tasks, ("failed", "cancelled"), strict=True):
        listen(Report(state, error=error))
    with pytest.raises(TaskCancelledError, match=r"not started, because predict\(\) of 'part'"):
        last.get(10)
    assert len(engine.tasks) == 2
    with pytest.raises(ConfigError, match="a last one"):
        runtime.mapreduce().run()
    om.close()


def test_labels_mapreduce_and_arguments_on_real_workers(tmp_path: Path) -> None:
    om = Omega(tmp_path / "store", broker="local://?workers=1", trusted=True)

    @virtualobj
    def made(n="1", **options):  # type: ignore[no-untyped-def]
        return [int(n) * 10]

    def twice(data, method=None, **options):  # type: ignore[no-untyped-def]
        if method == "reduce":
            return {"sum": sum(float(part[0]) for part in data), "parts": len(data)}
        return [float(data[0]) * 2]

    om.models.put(twice, "twice")
    om.datasets.put(made, "made")
    with om.runtime.mapreduce() as group:
        for data in (np.array([1.0]), np.array([2.0]), "made{n=3}"):
            group.model("twice").predict(data)
        group.model("twice").reduce()
    assert group.run().get(120) == {"sum": 66.0, "parts": 3}

    assert om.runtime.model("twice")._settings.label == "default"
    om.runtime.model("twice").require("gpu", always=True)
    assert om.runtime.model("twice")._settings.label == "gpu"
    assert om.runtime.require("other").model("twice")._settings.label == "other"  # what is said wins
    om.runtime.model("twice").require(always=True)
    assert om.runtime.model("twice")._settings.label == "default"
    om.runtime.require("big", always=True)
    assert om.runtime.settings.label == "big"
    om.runtime.require(always=True)
    assert om.runtime.settings.label == "default"
    om.close()


class Anything:
    """An object that can only be pickled."""


def test_trust_that_was_said_once_reaches_put_and_get(tmp_path: Path) -> None:
    trusting = Omega(tmp_path / "store", trusted=True)
    trusting.models.put(Anything(), "x", kind="pickle")
    trusting.datasets.put(Anything(), "x", kind="pickle")
    assert isinstance(trusting.models.get("x"), Anything)
    trusting.close()
    careful = Omega(tmp_path / "store")
    with pytest.raises(UntrustedError):
        careful.models.put(Anything(), "x", kind="pickle")
    careful.close()
