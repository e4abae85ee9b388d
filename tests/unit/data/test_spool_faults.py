"""Rows that are written to local disk, with faults at every system call that touches their files."""

from __future__ import annotations

import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kindler.data.columns import Column
from kindler.data.spool import Spool, SpoolWriter
from kindler.errors import DiskFullError
from tests.faults import kernel
from tests.faults.kernel import FILES, Fault, Point, watched
from tests.faults.points import faults, told

pytestmark = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())

VALUES = np.arange(100, dtype=np.float32)
LANES = VALUES.astype(np.int32) % 3


def spool(folder: Path, talk: Connection) -> None:
    """Rows that arrive in the opposite order, so that their order, numbers and lanes are written too."""
    try:
        with SpoolWriter(folder, [Column(name="x", role="feature", dtype="float32")]) as writer:
            writer.append_arrays({"x": VALUES})
            writer.append_order(np.arange(100)[::-1], LANES)
        talk.send(None)
    except OSError as exc:
        talk.send((type(exc), str(exc)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["error", "full", "short"])
def test_rows_are_all_there_or_the_error_names_the_folder(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "spool"

    def run(fault: Fault | None) -> list[Point]:
        shutil.rmtree(folder, ignore_errors=True)
        counts = lambda point: point.path.startswith(str(folder))  # noqa: E731
        with watched(lambda talk: spool(folder, talk), counts, calls=FILES, fault=fault) as program:
            error = program.hear(60)
        if error is None:
            read = Spool.open(folder)
            assert read.numbers is not None
            assert read.lanes is not None
            np.testing.assert_array_equal(read.arrays["x"][read.positions(np.arange(100))], VALUES[::-1])
            np.testing.assert_array_equal(read.lanes, LANES[::-1])
        else:
            assert fault is not None
            assert kind != "short"
            assert error[0] is DiskFullError or "Input/output" in error[1]
            assert str(folder) in error[1]
        return program.points

    points = run(None)
    failures: list[str] = []
    for name, fault in faults("spool", kind, points, sample=len(points)):
        with told(name, points[fault.k], failures):
            run(fault)
    assert not failures, "\n".join(failures)
