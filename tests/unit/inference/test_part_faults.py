"""Parts of scored files with faults at every system call that touches the folder.

After each, a reader sees whole parts only, and the same call again completes them, once each.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler.data import parquet
from kindler.data.columns import Column, ColumnPlan
from kindler.inference import files
from kindler.inference.row_errors import Failures
from tests.faults import kernel
from tests.faults.kernel import FILES, Fault, Watched, watched
from tests.faults.points import faults, told

pytestmark = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())

ROWS, SIZE = 50, 8
KINDS = {"kill": 20, "error": 20, "full": 6, "torn": 8, "short": 3}
DEADLINE_S = 60.0


class Doubles:
    """As much of a `Predictor` as a worker needs."""

    columns = ColumnPlan(features=(Column(name="x", role="feature"),), labels=())
    lenient = False
    failures = Failures()

    def with_threads(self, threads: int | None) -> Doubles:
        return self

    def score(self, chunks: Iterable[Any], place: Any) -> Iterator[list[Any]]:
        for (x,) in chunks:
            yield [x * 2]

    def names(self, outputs: int) -> tuple[str, ...]:
        return ("y",)

    added_types = None


def score(source: Path, out: Path, *, overwrite: bool = False, mark: int = 0) -> None:
    found = parquet.inspect(source)
    parts = files.Parts(rows=found.rows, size=SIZE)
    folder = files.OutputFolder(out, parts)
    missing = folder.begin({"input": files.input_record(found), "mark": mark}, overwrite=overwrite)
    task = files.FileTask(
        predictor=Doubles(),  # type: ignore[arg-type]
        files=found,
        parts=parts,
        missing=missing,
        folder=folder.path,
    )
    worker: Any = SimpleNamespace(size=1, rank=0, threads=1, report=lambda *_, **__: None)
    files.run(worker, cloudpickle.dumps(task))
    folder.finish()


def work(source: Path, out: Path, talk: Connection, **options: Any) -> None:
    with suppress(OSError):
        score(source, out, **options)
    talk.send("end")


def assert_whole_parts(out: Path) -> None:
    for path in out.glob("part-*"):
        start = int(path.name[5:10]) * SIZE
        assert pq.read_table(path)["x"].to_pylist() == list(range(start, min(start + SIZE, ROWS)))


def assert_complete(out: Path) -> None:
    table = pq.read_table(out)
    assert table["x"].to_pylist() == list(range(ROWS))
    assert table["y"].to_pylist() == list(range(0, 2 * ROWS, 2))
    assert {path.name for path in out.iterdir()} == {
        "_SUCCESS",
        "_manifest.json",
        *(f"part-{i:05d}.parquet" for i in range(7)),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": np.arange(ROWS)}), tmp_path / "in.parquet", row_group_size=20)
    return tmp_path / "in.parquet"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", ["new", "overwrite"])
def test_a_part_is_whole_or_absent_and_the_next_run_completes_it(
    scenario: str, kind: str, source: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", {}
    if scenario == "overwrite":
        options = {"overwrite": True, "mark": 1}

    def run(fault: Fault | None) -> Watched:
        shutil.rmtree(out, ignore_errors=True)
        if scenario == "overwrite":
            score(source, out)
        with watched(
            lambda talk: work(source, out, talk, **options),
            lambda point: point.path.startswith(str(out)),
            calls=FILES,
            fault=fault,
        ) as program:
            with suppress(EOFError, ConnectionError):  # killed
                assert program.hear(DEADLINE_S) == "end"
            assert program.ended(DEADLINE_S), program.left()
        assert_whole_parts(out)
        if (out / "_SUCCESS").exists():
            assert len(list(out.glob("part-*"))) == 7
        score(source, out, **options)
        assert_complete(out)
        return program

    points = run(None).points
    failures: list[str] = []
    for name, fault in faults(f"parts-{scenario}", kind, points, sample=KINDS[kind]):
        with told(name, points[fault.k], failures):
            run(fault)
    assert not failures, "\n".join(failures)
