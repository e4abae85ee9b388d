"""A fit with faults at every system call: of its checkpoints, of its rows on local disk, of its processes.

The driver, the fork server and two workers are one program here. After each fault the fit ends with its
result, bit for bit, or with one of Kindler's errors that says what to do; nothing that it has started is
left, no file either; and `fit(resume=True)` ends with the weights of a run without a fault.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import Checkpoints, Estimator, RunSettings
from kindler.errors import KindlerError
from tests.faults import kernel
from tests.faults.kernel import Fault, Point, Watched, watched
from tests.faults.points import grouped_faults, told

pytestmark = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())

PLUGIN = str(Path(__file__).parents[1] / "plugin")
DEADLINE_S = 120.0
SETTINGS = RunSettings(
    start_timeout_s=20,
    stop_timeout_s=2,
    sync_timeout_s=10,
    heartbeat_s=0.5,
    heartbeat_timeout_s=10,
    retry_backoff_s=0.01,
    max_failures=2,
)

# What a part touches, and how many points of each kind of fault are tried in the gate.
PARTS: dict[str, tuple[Callable[[Point, Path], bool], dict[str, int]]] = {
    "checkpoints": (
        lambda point, base: point.path.startswith(f"{base}/run"),
        {"kill": 6, "error": 6, "torn": 2, "full": 2},
    ),
    "rows": (
        lambda point, base: point.path.startswith(f"{base}/tmp"),
        {"kill": 8, "error": 8, "full": 4},
    ),
    "connections": (
        lambda point, base: point.kind in kernel.NETWORK,
        {"kill": 8, "error": 8, "torn": 3, "delay": 1},
    ),
    "replacement": (  # worker 1 dies in the fifth step, and another one takes its place
        lambda point, base: point.kind in kernel.NETWORK or point.path.startswith(str(base)),
        {"kill": 5, "error": 5, "torn": 3, "delay": 5},
    ),
}


def points_of_a_plane() -> dict[str, Any]:
    random = np.random.default_rng(3)
    x = random.normal(size=(24, 4)).astype(np.float32)
    return {"x": x, "y": (x @ random.normal(size=(4, 1))).astype(np.float32)}


def fit(folder: Path, *, resume: bool) -> list[bytes]:
    from toy_framework import Fragile

    plane = Fragile(4, str(folder.parent / "died"))
    est = Estimator.from_framework("toy", model=plane, lr=0.05, momentum=0.5, workers=2, settings=SETTINGS)
    checkpoint = Checkpoints(folder, every=2, keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        est.fit(points_of_a_plane(), epochs=2, batch_size=8, verbose=0, checkpoint=checkpoint, resume=resume)
    model = est.get_model()
    return [model.weights.tobytes(), model.bias.tobytes()]


def serve(base: Path, talk: Connection) -> None:
    """Fit as often as asked to, in a program of its own."""
    os.environ["TMPDIR"] = str(base / "tmp")
    tempfile.tempdir = str(base / "tmp")
    while (resume := talk.recv()) is not None:
        try:
            talk.send(fit(base / "run", resume=resume))
        except Exception as exc:
            talk.send((type(exc).__name__, str(exc), isinstance(exc, KindlerError)))


class Program:
    """A driver with its fork server, begun again once it was killed."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.resources = ExitStack()
        self.watched: Watched | None = None

    def fit(self, fault: Fault | None, counts: Callable[[Point], bool], *, resume: bool) -> Any:
        """The weights, an error, or None if the driver was killed."""
        if self.watched is None:
            work = partial(serve, self.base)
            self.watched = self.resources.enter_context(watched(work, counts))
        self.watched.arm(fault, counts)
        try:
            self.watched.talk.send(resume)
            result = self.watched.hear(DEADLINE_S)
        except (EOFError, ConnectionError):
            assert self.watched.ended(DEADLINE_S), self.watched.left()
            self.close()
            return None
        finally:
            if self.watched is not None:
                self.watched.disarm()
        assert eventually(lambda: not self.watched or not self.watched.left("grandchild")), (
            self.watched.left()
        )
        return result

    def close(self) -> None:
        self.resources.close()
        self.watched = None


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    base = Path(tempfile.mkdtemp(prefix="f-"))  # sockets have short paths
    (base / "tmp").mkdir()
    sys.path.append(PLUGIN)
    program = Program(base)
    yield program
    program.close()
    sys.path.remove(PLUGIN)
    shutil.rmtree(base)


def group(point: Point) -> str:
    """Points of a group come in the same order in each run."""
    return f"{point.kind}-{point.role}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_a_fit_ends_as_if_nothing_had_happened_or_with_an_error_and_goes_on(
    part: str, program: Program
) -> None:
    belongs, kinds = PARTS[part]
    base, dies = program.base, part == "replacement"
    everything = lambda point: belongs(point, base)  # noqa: E731

    def begin(fault: Fault | None, counts: Callable[[Point], bool], *, dies: bool) -> Any:
        shutil.rmtree(base / "run", ignore_errors=True)
        (base / "died").unlink(missing_ok=True) if dies else (base / "died").touch()
        return program.fit(fault, counts, resume=False)

    expected = begin(None, everything, dies=False)
    assert isinstance(expected, list), expected
    assert begin(None, everything, dies=dies) == expected
    assert (base / "died").exists()
    assert program.watched is not None
    points = program.watched.points
    failures: list[str] = []

    def attempt(fault: Fault, counts: Callable[[Point], bool]) -> None:
        result = begin(fault, counts, dies=dies)
        (base / "died").touch()
        if isinstance(result, tuple):
            name, message, is_documented = result
            assert is_documented or (name == "OSError" and "Input/output" in message and str(base) in message)
        else:
            assert result in (None, expected)
        if fault.kind == "delay":
            assert result == expected
        assert program.fit(None, everything, resume=True) == expected, f"after {result!r}"
        left = [path for path in (base / "run").iterdir() if not path.name.startswith("checkpoint-")]
        assert not left
        assert eventually(lambda: not remains(base / "tmp")), remains(base / "tmp")

    for kind, sample in kinds.items():
        for name, fault, like in grouped_faults(part, kind, points, group, sample=sample):
            with told(name, like, failures):
                try:
                    attempt(fault, lambda point, like=like: everything(point) and group(point) == group(like))
                except BaseException:
                    program.close()
                    shutil.rmtree(base / "tmp")
                    (base / "tmp").mkdir()
                    raise
    assert not failures, "\n".join(failures)


def remains(folder: Path) -> list[Path]:
    """What is left but for the fork server's folder and locks."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".lock", ".sock") and path.name != ".lock"
    ]
