"""A folder of checkpoints with faults at every system call that touches its files."""

from __future__ import annotations

import shutil
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kindler.errors import DiskFullError
from kindler.train.checkpoints import CheckpointFolder, Header, parse
from tests.faults import kernel
from tests.faults.kernel import FILES, Fault, Point, watched
from tests.faults.points import faults, told

pytestmark = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())

KINDS = {"kill": 60, "error": 60, "full": 20, "torn": 20, "short": 6}
SAVED = 5
DEADLINE_S = 60.0


def header(step: int) -> Header:
    return Header(framework="toy", epoch=step, step=step)


def state(step: int) -> bytes:
    return bytes([step]) * 3000


def save(folder: Path, talk: Connection) -> None:
    """Tell each step once it is safe: `wait` returned."""
    checkpoints = CheckpointFolder(folder, keep=2)
    for step in range(1, SAVED + 1):
        try:
            checkpoints.save(header(step), lambda step=step: [state(step)])  # type: ignore[misc]
            checkpoints.wait()
            talk.send(step)
        except OSError as exc:
            talk.send((type(exc), str(exc)))
            talk.recv()
    talk.send("end")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_can_be_read_and_nothing_else_is_left(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def run(fault: Fault | None) -> list[Point]:
        shutil.rmtree(folder, ignore_errors=True)
        saved, errors = 0, []
        counts = lambda point: point.path.startswith(str(folder))  # noqa: E731
        with watched(lambda talk: save(folder, talk), counts, calls=FILES, fault=fault) as program:
            with suppress(EOFError, ConnectionError):
                while (said := program.hear(DEADLINE_S)) != "end":
                    if isinstance(said, tuple):
                        errors.append(said)
                        program.disarm()
                        program.talk.send("go on")
                    else:
                        saved = said
            assert program.ended(DEADLINE_S), program.left()
        newest = CheckpointFolder(folder).newest()
        assert saved == 0 or newest is not None
        if newest is not None:
            step = newest.header.step
            assert step >= saved
            assert parse(newest.data).state == state(step)
        for cls, message in errors:
            assert cls is DiskFullError or "Input/output" in message, (cls, message)
            assert str(folder) in message
        if kind == "short" or fault is None:
            assert not errors
        later = CheckpointFolder(folder, keep=1)
        later.save(header(9), lambda: [state(9)])
        later.wait()
        assert [path.name.partition("-step-")[2] for path in folder.iterdir()] == ["000000009.kindler"]
        return program.points

    points = run(None)
    failures: list[str] = []
    for name, fault in faults("checkpoints", kind, points, sample=KINDS[kind]):
        with told(name, points[fault.k], failures):
            run(fault)
    assert not failures, "\n".join(failures)


def test_a_checkpoint_counts_as_written_once_its_name_and_that_of_its_folder_are_on_the_disk(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    counts = lambda point: point.path.startswith((str(tmp_path), "socket:"))  # noqa: E731
    with watched(lambda talk: save(folder, talk), counts, calls=FILES) as program:
        while program.hear(DEADLINE_S) != "end":
            pass
        assert program.ended(DEADLINE_S), program.left()

    acts = [(point.kind, Path(point.path).name) for point in program.points]
    told = [at for at, (kind, name) in enumerate(acts) if name.startswith("socket:")]
    assert acts[:2] == [("mkdir", "run"), ("sync", tmp_path.name)]
    for first, last in zip([0, *told], told[:SAVED], strict=False):
        kinds = [kind for kind, _ in acts[first:last]]
        renamed = kinds.index("rename")
        assert "sync" in kinds[kinds.index("write", 1) : renamed], "the bytes"
        assert acts[first + renamed + 1] == ("sync", "run"), "the name"
