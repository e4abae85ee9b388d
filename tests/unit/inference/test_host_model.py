"""A model that the tasks of a host share: loaded once, right for each task, and gone when they are.

The framework is the toy of `tests/plugin`; its CPU stands in for a GPU.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler.data.columns import Column, ColumnPlan
from kindler.engine.fork_server import socket_folder
from kindler.engine.placement import TaskPlace
from kindler.engine.wire import connect
from kindler.errors import ConfigError
from kindler.frame import ChannelClosed
from kindler.frameworks.contract import Scored
from kindler.frameworks.pickling import pickle_for_workers
from kindler.inference import host_model, predictor
from kindler.inference.host_model import HostModel, Sharing, gpu_of, sharing
from kindler.inference.predictor import Predictor, Recipe

PLUGIN = Path(__file__).parents[2] / "plugin"
WAIT_S = 60


class Noting:
    """Notes the process that it is loaded in; refuses rows that begin with 13."""

    def __init__(self, folder: Path, factor: float) -> None:
        self.folder, self.factor = str(folder), factor
        self.weights, self.bias = np.zeros((1, 1)), np.zeros(1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with open(os.path.join(self.folder, "loads"), "a") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, x: Any) -> Any:
        if x[0, 0] == 13:
            raise LookupError("no row may begin with 13")
        if x[0, 0] == 14:
            raise SystemExit("this model ends whatever it can")
        x *= self.factor  # its input is its own
        return x


def recipe(folder: Path, factor: float = 2.0) -> Recipe:
    spec = pickle_for_workers({"model": Noting(folder, factor), "lr": 0.1, "momentum": 0.0})
    return Recipe(framework="toy", spec=spec, state=b"", feature_names=("x",), device="cpu", seed=0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sharing, subprocess.Popen[bytes]]]:
    """How tasks share, and the process that they come from."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    daemon = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(os, "getppid", lambda: daemon.pid)
    yield Sharing(os.urandom(32), "always", idle_s=WAIT_S), daemon
    daemon.kill()
    daemon.communicate()


def loads(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "loads").read_text().splitlines() if int(line) != os.getpid()]


def batches(first: float, count: int, rows: int = 3) -> list[tuple[Any]]:
    return [(np.full((rows, 1), first + number),) for number in range(count)]


def outputs(scored: Sequence[Scored]) -> list[float]:
    return [float(one.outputs[0][0, 0]) for one in scored]


def has_ended(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], WAIT_S)[0])
    finally:
        os.close(handle)


def test_tasks_at_once_have_one_model_and_each_gets_its_own_rows_in_their_order(
    tmp_path: Path, shared: tuple[Sharing, Any]
) -> None:
    found: dict[int, list[float]] = {}

    def task(number: int) -> None:
        model = HostModel.reached(recipe(tmp_path), shared[0], "")
        found[number] = outputs(list(model.predict_all(batches(1000.0 * (number + 1), 30))))
        model.close()

    threads = [threading.Thread(target=task, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert found == {
        number: [2 * (1000.0 * (number + 1) + place) for place in range(30)] for number in range(4)
    }
    assert len(loads(tmp_path)) == 1


def test_a_row_that_fails_fails_its_own_task_with_its_own_error_and_no_other(
    tmp_path: Path, shared: tuple[Sharing, Any]
) -> None:
    good, bad, worse = (HostModel.reached(recipe(tmp_path), shared[0], "") for _ in range(3))
    fine = good.predict_all(batches(100.0, 20))
    scored = [next(fine)]

    with pytest.raises(LookupError, match="no row may begin with 13") as raised:
        list(bad.predict_all(batches(10.0, 20)))
    with pytest.raises(SystemExit, match="ends whatever it can"):
        list(worse.predict_all(batches(14.0, 1)))

    assert "in __call__" in str(raised.value.__cause__)  # where it was raised
    assert outputs([*scored, *fine]) == [2 * (100.0 + place) for place in range(20)]
    for model in (good, bad, worse):
        model.close()
    assert len(loads(tmp_path)) == 1


def test_the_process_ends_when_those_that_tasks_came_from_have_ended(
    tmp_path: Path, shared: tuple[Sharing, subprocess.Popen[bytes]]
) -> None:
    settings, daemon = shared
    model = HostModel.reached(recipe(tmp_path), settings, "")
    model.close()
    [pid] = loads(tmp_path)
    sockets = {path.name for path in socket_folder("models").glob("*.sock")}

    daemon.kill()
    daemon.wait()

    assert has_ended(pid)
    assert {path.name for path in socket_folder("models").glob("*.sock")} < sockets


def test_it_ends_after_a_while_without_tasks_and_the_next_task_starts_another(
    tmp_path: Path, shared: tuple[Sharing, Any]
) -> None:
    settings = Sharing(shared[0].secret, "always", idle_s=0.01)
    HostModel.reached(recipe(tmp_path), settings, "").close()
    [first] = loads(tmp_path)
    assert has_ended(first)

    model = HostModel.reached(recipe(tmp_path), settings, "")
    assert outputs(list(model.predict_all(batches(1.0, 2)))) == [2.0, 4.0]
    model.close()
    assert len(set(loads(tmp_path))) == 2


def test_who_does_not_know_the_secret_is_not_let_in(tmp_path: Path, shared: tuple[Sharing, Any]) -> None:
    before = set(socket_folder("models").glob("*.sock"))
    model = HostModel.reached(recipe(tmp_path), shared[0], "")
    [path] = set(socket_folder("models").glob("*.sock")) - before

    with pytest.raises(ChannelClosed, match="greeting"):
        connect((str(path), 0), b"a guess", timeout_s=WAIT_S)
    assert path.parent.stat().st_mode & 0o077 == 0
    assert outputs(list(model.predict_all(batches(1.0, 1)))) == [2.0]
    model.close()


def test_several_models_are_kept_and_one_that_cannot_be_loaded_says_why(
    tmp_path: Path, shared: tuple[Sharing, Any]
) -> None:
    settings = shared[0]
    models = [HostModel.reached(recipe(tmp_path, factor), settings, "") for factor in range(6)]
    assert [outputs(list(model.predict_all(batches(1.0, 1)))) for model in models] == [
        [float(factor)] for factor in range(6)
    ]
    broken = Recipe(framework="toy", spec=b"no pickle", state=b"", feature_names=(), device="cpu", seed=0)
    with pytest.raises(Exception, match="pickle|load key"):
        HostModel.reached(broken, settings, "")
    for model in models:
        model.close()
    assert len(set(loads(tmp_path))) == 1


@pytest.mark.parametrize(
    ("device", "place", "mode", "expected"),
    [
        ("auto", TaskPlace(0), "auto", "6"),
        ("auto", TaskPlace(3), "auto", "7"),
        ("auto", TaskPlace(3, ("GPU-a",)), "auto", "GPU-a"),
        ("cuda", TaskPlace(1), "auto", "7"),
        ("cuda:1", TaskPlace(0), "auto", "7"),
        ("cuda:5", TaskPlace(0), "auto", None),  # the task says what is wrong
        ("cpu", TaskPlace(0), "auto", None),
        ("cpu", TaskPlace(0), "always", ""),
        ("mps", TaskPlace(0), "always", None),
    ],
)
def test_which_gpus_process_a_task_uses(
    device: str, place: TaskPlace, mode: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_model, "_machine_gpus", lambda: ["6", "7"])
    assert gpu_of(device, place, mode) == expected
    monkeypatch.setattr(host_model, "_machine_gpus", list)
    if not place.gpus:
        shares = mode == "always" and device in ("auto", "cpu")
        assert gpu_of(device, place, mode) == ("" if shares else None)


def test_the_variable_of_the_program_says_whether_models_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host_model.VARIABLE, raising=False)
    one, two = sharing(), sharing()
    assert one is not None
    assert two is not None
    assert (one.mode, one.secret) == ("auto", two.secret)
    assert one.secret.hex() not in repr(one)
    monkeypatch.setenv(host_model.VARIABLE, "never")
    assert sharing() is None
    monkeypatch.setenv(host_model.VARIABLE, "sometimes")
    with pytest.raises(ConfigError, match="KINDLER_HOST_MODEL must be one of auto, always, never"):
        sharing()


def test_a_gpu_that_the_framework_cannot_use_is_tried_once_and_tasks_compute_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(host_model, "_machine_gpus", lambda: ["0"])
    monkeypatch.setattr(predictor, "_useless", set())
    tried: list[str] = []

    class OnTheCpu:
        on_gpu = False

        def close(self) -> None:
            tried.append("closed")

    def reached(recipe: Recipe, settings: Sharing, gpu: str) -> Any:
        tried.append(gpu)
        return OnTheCpu()

    monkeypatch.setattr(HostModel, "reached", reached)
    monkeypatch.setattr(predictor, "FRAMEWORKS", _WithGpus())
    columns = ColumnPlan(features=(Column(name="x", role="feature"),), labels=())
    model = Predictor(
        recipe=Recipe(**{**vars(recipe(tmp_path)), "device": "auto"}),
        columns=columns,
        batch_size=3,
        sharing=Sharing(b"s"),
    )

    for _ in range(2):
        scored = list(model.score(batches(1.0, 2), TaskPlace(0)))
        assert [float(part[0][0, 0]) for part in scored] == [2.0, 4.0]
    assert tried == ["0", "closed"]


class _WithGpus:
    """The registry, where the toy says that it can use GPUs."""

    def spec(self, name: str) -> Any:
        return type("Row", (), {"gpus": True})

    def load(self, name: str) -> Any:
        from kindler.frameworks.registry import FRAMEWORKS

        return FRAMEWORKS.load(name)
