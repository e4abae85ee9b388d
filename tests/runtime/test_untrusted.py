"""What a task may bring to a worker that trusts nobody."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from runtime_servers import X, Y
from sklearn.linear_model import LinearRegression
from sklearn.svm import SVC

from kindler import Store, sandbox
from kindler.engine.wire import Channel
from kindler.errors import ConfigError, UntrustedError, WorkerLostError
from kindler.frame import ChannelClosed, Frame, _frame
from kindler.runtime import value_codec
from kindler.runtime.broker import LargeMessages
from kindler.runtime.engine import open_engine, without_trust
from kindler.runtime.executor import Executor, _reported
from kindler.runtime.local import LocalEngine, Log
from kindler.runtime.messages import Task

DATA = [[0.1], [0.2]]


def task(verb: str = "fit", *args: Any, name: str = "net", trusted: bool = True, **options: Any) -> Task:
    buffers = value_codec.encode([list(args) or [DATA, [0, 1]], options])
    return Task(
        id="t", shelf="models", bucket="default", name=name, verb=verb, buffers=buffers, trusted=trusted
    )


@pytest.mark.parametrize(
    "options",
    [
        {
            "engine": "spark",
            "spark": {"conf": {"spark.driver.extraJavaOptions": "-XX:OnOutOfMemoryError=id"}},
        },
        {"spark": {}},
        {"engine": "os"},
        {"engine": ["spark"]},
        {"model_dir": "/tmp/x"},
        {"log_dir": "/tmp/x"},
        {"checkpoint": "/tmp/x"},
        {"checkpoint_trigger": 1},
        {"columns": {}},
        {"prepare": {}},
        {"optimization": {}},
        {"config": {"anything": 1}},
        {"settings": {}},
        {"callbacks": []},
        {"resume": True},
        {"ingest": "direct"},
        {"validation_data": "/etc/data.parquet"},
        {"validation_data": [["/etc/data.parquet"]]},
        {"output_path": "/tmp/x"},
        {"batch_size": "8"},
        {"optimizer": "/etc/passwd"},
        {"loss": {"a": "../net.py"}},
        {"metrics": [b"accuracy"]},
        {"what_a_later_version_knows": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("verb", ["fit", "partial_fit", "predict", "score"])
def test_an_option_that_is_not_known_to_be_harmless_is_refused(
    store: str, verb: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UntrustedError, match=rf"{next(reversed(options))}=.*kindler worker --trusted"):
        Executor(store, trusted=False).run(task(verb, **options))


@pytest.fixture
def om(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store")
    opened.models.put(LinearRegression().fit(X, Y), "net")
    yield opened
    opened.close()


def test_options_that_say_how_to_compute_pass(om: Store) -> None:
    executor = Executor(om.store.url, trusted=False)
    version = executor.run(task("fit", X.tolist(), Y.tolist(), sample_weight=np.ones(len(Y)).tolist()))
    assert str(version) == "net@2"


def test_they_need_the_trust_of_the_worker_and_of_the_task(store: str) -> None:
    with pytest.raises(TypeError, match="model_dir"):  # scikit-learn's own word on it
        Executor(store, trusted=True).run(task(model_dir="/tmp/x", trusted=True))
    for worker, asked in ((True, False), (False, True)):
        with pytest.raises(UntrustedError, match=r"model_dir=.*runtime.options\(trusted=True\)"):
            Executor(store, trusted=worker).run(task(model_dir="/tmp/x", trusted=asked))


def test_the_runtime_of_this_machine_takes_no_settings_of_spark_without_trust(om: Store) -> None:
    harmful = {"conf": {"spark.driver.extraJavaOptions": "-XX:OnOutOfMemoryError=id"}}
    with pytest.raises(UntrustedError, match="spark="):
        om.runtime.model("net").fit(X, Y, engine="spark", spark=harmful).get(120)


def test_text_in_a_dataset_is_not_taken_for_a_path(om: Store) -> None:
    om.datasets.put("/etc/data.parquet", "place")
    om.datasets.put(["/etc/data.parquet"], "places")
    executor = Executor(om.store.url, trusted=False)
    with pytest.raises(ConfigError, match="expected arrays or tables, received text"):
        executor.run(task("predict", "place"))
    with pytest.raises(ValueError, match="array"):  # an array of text, which no model takes
        executor.run(task("predict", "places"))


def test_code_that_calls_sys_exit_fails_its_task_and_not_the_worker(om: Store, tmp_path: Path) -> None:
    def leave() -> None:
        import sys

        sys.exit(3)

    om.scripts.put(leave, "leave")
    buffers = value_codec.encode([[], {}])
    asked = Task(
        id="t", shelf="scripts", bucket="default", name="leave", verb="run", buffers=buffers, trusted=True
    )
    report = _reported(Executor(om.store.url), asked, Log(tmp_path))
    assert report.error is not None
    assert "SystemExit" in str(report.error)


def _status(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/status").read_text()


@pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason="processes cannot be sandboxed here")
def test_models_of_a_worker_that_trusts_nobody_are_called_by_a_sandboxed_process(
    om: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD_OF_THE_WORKER", "hush")
    executor = Executor(om.store.url, trusted=False)
    report = _reported(executor, task("predict", X.tolist(), trusted=False), Log(tmp_path))
    assert report.error is None, report.error
    assert np.allclose(report.result(), LinearRegression().fit(X, Y).predict(X))

    (model,) = [p for p in psutil.Process().children(recursive=True) if "Seccomp:\t2\n" in _status(p)]
    fork_server = model.parent()
    assert "NoNewPrivs:\t1\n" in _status(model)
    assert b"hush" not in Path(f"/proc/{model.pid}/environ").read_bytes()
    assert executor.loads == 1

    with pytest.raises(ValueError, match="features"):  # what it raises is what it raised
        executor.run(task("predict", [[1.0] * 7]))
    assert "features" in str(_reported(executor, task("predict", [[1.0] * 7]), Log(tmp_path)).exception())
    model.kill()
    with pytest.raises(WorkerLostError, match="the sandboxed process of net@1 was ended by SIGKILL"):
        executor.run(task("predict", X.tolist()))
    report = _reported(executor, task("predict", X.tolist()), Log(tmp_path))  # by another one
    assert report.error is None
    assert executor.loads == 2
    assert fork_server is not None
    fork_server.kill()


@pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason="processes cannot be sandboxed here")
def test_a_model_that_lies_to_compiled_code_harms_its_own_process_alone(om: Store, tmp_path: Path) -> None:
    model = SVC().fit(X, np.median(Y) < Y)
    expected = model.predict(X)
    om.models.put(model, "net", attributes={"limits": {"memory_bytes": 2_000_000_000}})
    for trusted in (False, True):  # a worker that trusts some tasks, and this is none of them
        executor = Executor(om.store.url, trusted=trusted)
        report = _reported(executor, task("predict", X.tolist(), trusted=False), Log(tmp_path))
        assert report.error is None, report.error
        np.testing.assert_array_equal(report.result(), expected)
        (process,) = [p for p in psutil.Process().children(recursive=True) if "Seccomp:\t2\n" in _status(p)]
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(r"Max data size +2000000000 +2000000000 ", limits)
        process.parent().kill()
        psutil.wait_procs([process, process.parent()], timeout=20)

    model.support_vectors_ = model.support_vectors_[:1]
    model._n_support = np.array([1 << 20, 1 << 20], np.int32)
    om.models.put(model, "net")
    report = _reported(Executor(om.store.url, trusted=False), task("predict", X.tolist()), Log(tmp_path))
    assert report.error is not None
    for process in psutil.Process().children():
        process.kill()


def _until_it_is_gone(executor: Executor) -> None:
    while True:
        executor.run(task("predict", X.tolist()))


@pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason="processes cannot be sandboxed here")
def test_a_sandboxed_process_that_takes_too_much_is_ended(om: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_THREADS", 0)
    with pytest.raises(WorkerLostError, match="had more than 0 threads"):
        _until_it_is_gone(Executor(om.store.url, trusted=False))
    for process in psutil.Process().children():
        process.kill()


def test_a_locked_process_cannot_announce_more_than_is_wanted_of_it() -> None:
    mine, theirs = socket.socketpair()
    channel, other = Channel(mine), Channel(theirs)
    channel.limit(header_bytes=1000, message_bytes=1 << 20)
    other.send("fits", bytes(1 << 12), x=1)
    assert channel.receive().buffers == (bytes(1 << 12),)
    for pieces in (
        _frame("bulk", {"sizes": [1 << 50]}, (), "b"),
        _frame("bulk", {"sizes": [1 << 50, -(1 << 50)]}, (), "c"),
        _frame("x", {"x": "y" * 2000}, ()),
    ):
        theirs.sendall(b"".join(pieces))
        with pytest.raises(ChannelClosed, match="parts that do not fit|not a frame"):
            channel.receive()
    channel.close()
    other.close()


def test_the_server_trusts_its_own_workers_no_more_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINDLER_BROKER", raising=False)
    assert without_trust(None) == "local://?trusted=0"
    assert without_trust("local://?workers=2") == "local://?workers=2&trusted=0"
    assert without_trust("redis://host/0") == "redis://host/0"
    engine = open_engine("/nowhere", without_trust("local://?workers=2"))
    assert isinstance(engine, LocalEngine)
    assert (engine.workers, engine._order["trusted"]) == (2, False)
    with pytest.raises(ConfigError, match="invalid engine URL"):
        open_engine("/nowhere", "local://?trusted=yes")


def test_a_list_of_more_than_16_mib_arrives(om: Store) -> None:
    many = [[0.123456789012345 + i] for i in range(1_000_000)]
    runtime = Store(om.store.url, broker="local://?workers=1")
    assert len(runtime.runtime.model("net").predict(many).get(120)) == len(many)
    runtime.close()


def test_large_messages_that_were_read_leave_nothing_behind(om: Store) -> None:
    messages = LargeMessages(om.store.url)
    message = messages.pack(Frame("x", {}, (bytes(2 << 20),)), "p-1")
    assert messages.unpack(message).buffers == (bytes(2 << 20),)
    messages.drop(message)
    assert om.datasets.list(hidden=True) == []
    assert not [path for path in (Path(om.store.url) / "blobs").rglob("*") if path.stat().st_size > 1 << 20]
    with om.store.catalog.database.reading() as connection:
        found = connection.exec_driver_sql("SELECT name FROM kindler_objects").scalars().all()
    assert found == ["net"]
    messages.close()
