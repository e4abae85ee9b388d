"""The facts of shards on the local engine, and what is its own: files, processes, no Spark."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kindler import SharedValue, XShards
from kindler.engine import fork_server
from kindler.errors import ConfigError, WorkerLostError
from kindler.testing.shards import Put, ShardBackendContract
from kindler.xshards.local import LocalShards
from tests.shards_facts import ShardFacts
from tests.unit.shards.flat_columns import assert_arrays_are_flat_columns

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def _no_processes_left() -> Iterator[None]:
    yield
    fork_server.retire()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that temporary files are made in, and nothing else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folders(where: Path) -> list[str]:
    return [path.name for path in where.glob("kindler-shards-*")]


class TestLocalBackend(ShardBackendContract):
    @pytest.fixture
    def put(self) -> Put:
        return LocalShards.of


class TestLocalShards(ShardFacts):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> str:
        return "local"


def test_files_go_away_with_the_collection(temporary: Path) -> None:
    shards = XShards.partition(np.arange(6), 3, engine="local")
    doubled = shards.transform_shard(lambda shard: shard * 2)
    assert len(folders(temporary)) == 2

    del shards, doubled
    gc.collect()
    assert folders(temporary) == []


def test_files_go_away_when_a_function_fails(temporary: Path) -> None:
    shards = XShards.partition(np.arange(6), 3, engine="local")

    with pytest.raises(ZeroDivisionError, match="division by zero"):
        shards.transform_shard(lambda shard: 1 / 0)
    assert len(folders(temporary)) == 1


def test_a_shared_value_leaves_nothing(temporary: Path) -> None:
    value = SharedValue(3)
    shards = XShards.partition(np.arange(2), 2, engine="local")
    assert shards.transform_shard(lambda s, n: n, value).collect() == [3, 3]
    assert len(folders(temporary)) == 2

    value.unpersist()
    assert len(folders(temporary)) == 1


def test_uncache_frees_the_files_and_a_later_use_says_so(temporary: Path) -> None:
    shards = XShards.partition(np.arange(6), 3, engine="local")
    shards.uncache()

    assert (folders(temporary), shards.is_cached()) == ([], False)
    with pytest.raises(ConfigError, match="freed by uncache"):
        shards.collect()


def test_arrays_are_views_of_the_files() -> None:
    shards = XShards.partition({"x": np.arange(1000.0)}, 1, engine="local")
    (shard,) = shards.collect()

    assert not shard["x"].flags.owndata


def test_functions_run_in_other_processes() -> None:
    shards = XShards.partition(np.arange(4), 2, engine="local")
    assert os.getpid() not in shards.transform_shard(lambda shard: os.getpid()).collect()


def test_a_function_that_kills_its_process_is_a_lost_worker() -> None:
    shards = XShards.partition(np.arange(4), 1, engine="local")
    with pytest.raises(WorkerLostError, match="lost worker 0"):
        shards.transform_shard(lambda shard: os.kill(os.getpid(), signal.SIGKILL))


PROGRAM = """
import signal, sys, time, numpy as np, tempfile
tempfile.tempdir = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
from kindler import XShards
shards = XShards.partition(np.arange(4), 2)
assert shards.engine == "local"
shards.transform_shard(lambda shard: shard)
assert "pyspark" not in sys.modules
def wait(shard):
    open(sys_argv + "/started", "w").close()
    time.sleep(600)
sys_argv = sys.argv[1]
if sys.argv[2] == "wait":
    shards.transform_shard(wait)
"""


def left_in(folder: Path) -> list[str]:
    """The files below a folder, but for the lock of the one that all programs of a user share."""
    return [path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_program_needs_no_spark_and_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "end"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=True,
        timeout=120,
    )
    assert left_in(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "wait"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert b"KeyboardInterrupt" in said
    assert left_in(tmp_path) == ["started"]


def nests(rows: int) -> st.SearchStrategy[Any]:
    dtypes = st.sampled_from(["<i8", "<f4", "|b1", "|u1", "<M8[ns]"])
    arrays = st.builds(
        lambda dtype, width: (
            np.arange(rows * max(width, 1)).astype(dtype).reshape(rows, *([width] if width else []))
        ),
        dtypes,
        st.integers(0, 3),
    )
    return st.recursive(
        arrays,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
        ),
        max_leaves=4,
    )


def flat(thing: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(thing, dict):
        return [leaf for key in sorted(thing) for leaf in flat(thing[key])]
    return [leaf for part in thing for leaf in flat(part)] if isinstance(thing, list | tuple) else [thing]


def joined(shards: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [np.concatenate(parts) for parts in zip(*map(flat, shards), strict=True)]


quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(data=st.data(), rows=st.integers(1, 30))
def test_partition_and_repartition_lose_and_reorder_nothing(data: st.DataObject, rows: int) -> None:
    thing = data.draw(nests(rows))
    shards = XShards.partition(thing, data.draw(st.integers(1, rows)), engine="local")
    again = shards.repartition(data.draw(st.integers(1, 8)))

    for found in (shards.collect(), again.collect()):
        for leaf, wanted in zip(joined(found), flat(thing), strict=True):
            np.testing.assert_array_equal(leaf, wanted)
            assert leaf.dtype == wanted.dtype
    assert len(shards) == len(again) == rows


@quick
@given(arrays=st.lists(hnp.arrays(st.sampled_from(["i4", "f8", "U3"]), 12), min_size=1, max_size=4))
def test_split_then_zip_gives_the_same_arrays(arrays: list[Any]) -> None:
    parts = XShards.partition(tuple(arrays), 3, engine="local").split()
    assert len(parts) == len(arrays)
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(np.concatenate(part.collect()), array)


def test_arrays_are_flat_columns_for_whoever_feeds_a_model() -> None:
    assert_arrays_are_flat_columns("local")
