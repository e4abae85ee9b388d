"""A run of `fit` is a run of MLflow, on a real tracking server."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import kindler
from kindler import Checkpoints, Estimator, RunSettings
from kindler.callbacks import Callback, DriverCallback, MLflowLogger
from kindler.errors import TrackingError

mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def estimator(**options: Any) -> Estimator:
    torch.manual_seed(0)
    return Estimator.from_torch(
        model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), config["lr"]),
        loss=nn.MSELoss(),
        config={"lr": 0.1},
        **{"workers": 1, "seed": 7, **options},
    )


def fit(est: Estimator, *callbacks: Any, **options: Any) -> kindler.History:
    return est.fit((X, Y), batch_size=16, callbacks=list(callbacks), **{"epochs": 3, "verbose": 0, **options})


def metric(uri: str, run_id: str | None, name: str) -> list[tuple[int, float]]:
    found = mlflow.MlflowClient(uri).get_metric_history(run_id, name)
    return sorted((point.step, point.value) for point in found)


def status(uri: str, run_id: str | None) -> str:
    return str(mlflow.MlflowClient(uri).get_run(run_id).info.status)


def test_a_torch_run_has_its_params_metrics_history_and_a_model_that_predicts_alike(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    est = estimator(workers=2)
    logger = MLflowLogger(uri, "torch", "first", tags={"team": "a"}, registered_model="small")

    history = fit(est, logger, validation_data=(X, Y))

    run = mlflow.MlflowClient(uri).get_run(logger.run_id)
    assert (run.info.status, run.info.run_name, run.data.tags["team"]) == ("FINISHED", "first", "a")
    told = {name: run.data.params[name] for name in ("batch_size", "epochs", "workers", "engine", "seed")}
    assert told == {"batch_size": "16", "epochs": "3", "workers": "2", "engine": "local", "seed": "7"}
    assert (run.data.params["model"], run.data.params["config.lr"]) == ("Sequential", "0.1")
    for name in ("loss", "val_loss"):
        assert metric(uri, logger.run_id, name) == list(enumerate(history[name], start=1))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    told_history = mlflow.artifacts.load_dict(f"runs:/{logger.run_id}/history.json")
    assert [row["loss"] for row in told_history["epochs"]] == history["loss"]
    assert metric(uri, logger.run_id, "goodput/share") == [(3, history.goodput.share)]
    assert metric(uri, logger.run_id, "goodput/steps") == [(3, history.goodput.seconds["steps"])]
    expected = est.get_model()(torch.from_numpy(X)).detach().numpy()
    for name in (logger.model_uri, f"runs:/{logger.run_id}/model", "models:/small/1"):
        model = mlflow.pyfunc.load_model(name)
        np.testing.assert_array_equal(model.predict(X), expected)
    assert model.metadata.signature.inputs.to_dict()[0]["tensor-spec"] == {
        "dtype": "float32",
        "shape": (-1, 3),
    }


def test_a_run_has_its_data_as_inputs_and_what_made_the_model(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": list(X), "y": list(Y)}), rows)
    est, logger = estimator(), MLflowLogger(uri, "lineage", log_model=False)

    est.fit(str(rows), batch_size=16, callbacks=[logger], validation_split=0.25, verbose=0)

    run = mlflow.MlflowClient(uri).get_run(logger.run_id)
    training, validation = run.inputs.dataset_inputs
    assert [tag.value for one in (training, validation) for tag in one.tags] == ["training", "validation"]
    (fit,) = est.lineage
    assert (training.dataset.name, training.dataset.digest) == ("rows.parquet", fit["fingerprint"])
    assert mlflow.data.get_source(training).uri == str(rows)
    assert json.loads(training.dataset.profile) == {"num_rows": 36, "files": 1}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    logged = mlflow.artifacts.load_dict(f"runs:/{logger.run_id}/lineage.json")
    assert logged["fits"] == est.lineage


class Falls(Callback):
    """Ends its process in the second epoch, the first time."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def on_epoch_end(self, run: kindler.train.callbacks.Run, logs: dict[str, Any]) -> None:
        if run.epoch == 3 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_loses_a_worker_goes_on_as_the_same_run_and_logs_each_epoch_once(
    uri: str, tmp_path: Path
) -> None:
    est = estimator(settings=RunSettings(retry_backoff_s=0.01))
    logger = MLflowLogger(uri, "falls", log_model=False)

    # Without a checkpoint of an epoch: the first two are trained twice.
    history = fit(
        est, logger, Falls(tmp_path / "fell"), checkpoint=Checkpoints(tmp_path / "run", every=1000), epochs=4
    )

    assert (tmp_path / "fell").exists()
    assert metric(uri, logger.run_id, "loss") == list(enumerate(history["loss"], start=1))
    run = mlflow.MlflowClient(uri).get_run(logger.run_id)
    assert (run.info.status, run.data.tags["kindler.restarts"]) == ("FINISHED", "1")


def test_a_run_that_is_open_already_is_used_and_left_open(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    logger = MLflowLogger(log_model=False)

    with mlflow.start_run() as mine:
        fit(estimator(), logger, epochs=1)
        assert logger.run_id == mine.info.run_id
        assert status(uri, mine.info.run_id) == "RUNNING"

    assert status(uri, mine.info.run_id) == "FINISHED"


def test_a_run_that_is_resumed_goes_on_with_the_epochs_that_it_lacks(uri: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = MLflowLogger(uri, "resumed", log_model=False)
    fit(estimator(), first, epochs=2, checkpoint=folder)

    again = MLflowLogger(uri, run_id=first.run_id, log_model=False)
    est = estimator().load_checkpoint(str(Estimator.latest_checkpoint(folder)))
    fit(est, again, epochs=2, checkpoint=folder)

    assert [epoch for epoch, _ in metric(uri, first.run_id, "loss")] == [1, 2, 3, 4]


def test_a_server_that_is_down_is_an_error_before_any_worker_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        uri = f"http://user:secret@127.0.0.1:{nobody.getsockname()[1]}"
    made = tmp_path / "made"

    def creator(config: Any) -> nn.Module:
        made.touch()
        return nn.Linear(3, 1)

    est = Estimator.from_torch(model=creator, optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1)
    with pytest.raises(
        TrackingError, match=r"(?s)MLflow at http://127.0.0.1:\d+ cannot be used.*Hint: "
    ) as caught:
        fit(est, MLflowLogger(uri))

    assert "secret" not in str(caught.value)
    assert not made.exists()


class Deletes(DriverCallback):
    def __init__(self, uri: str, logger: MLflowLogger) -> None:
        self._uri, self._logger = uri, logger

    def on_run_begin(self, params: Any) -> None:
        mlflow.MlflowClient(self._uri).delete_run(self._logger.run_id)


def test_a_server_that_refuses_what_is_logged_does_not_stop_the_training(uri: str) -> None:
    logger = MLflowLogger(uri, "refused")

    with pytest.warns(UserWarning, match="rejected some entries of run .*must be in the 'active' state"):
        history = fit(estimator(), logger, Deletes(uri, logger))

    assert len(history) == 3


class Local(nn.Linear):
    """A class that others could import only with its arguments."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)


def test_a_model_that_cannot_be_stored_is_warned_of_and_the_run_has_finished(uri: str) -> None:
    model = Local(3)
    est = Estimator.from_torch(model=model, optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1)
    logger = MLflowLogger(uri, "local")

    with pytest.warns(UserWarning, match=r"is incomplete: .*Local with init={} cannot be built"):
        fit(est, logger, epochs=1)

    assert (status(uri, logger.run_id), logger.model_uri) == ("FINISHED", None)


class Relay:
    """A way to a server that can be cut."""

    def __init__(self, uri: str) -> None:
        there = urlsplit(uri)
        self._there = (str(there.hostname), int(there.port or 0))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._there)
                self._open += [here, there]
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


class Cuts(DriverCallback):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def on_run_begin(self, params: Any) -> None:
        self._relay.cut()


def test_a_server_that_is_lost_in_the_middle_does_not_stop_the_training(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    relay = Relay(uri)
    logger = MLflowLogger(relay.uri, "lost")

    with caplog.at_level(logging.WARNING), pytest.warns(UserWarning, match="could not be reached"):
        history = fit(estimator(), logger, Cuts(relay))

    assert len(history) == 3
    assert "training continues" in caplog.text
    assert status(uri, logger.run_id) == "RUNNING"


class Fails(Callback):
    def on_epoch_end(self, run: kindler.train.callbacks.Run, logs: dict[str, Any]) -> None:
        raise ZeroDivisionError("the loss is nothing")


class Interrupts(DriverCallback):
    """Ctrl-C after the first epoch."""

    def on_epoch_end(self, logs: Any) -> None:
        if logs["epoch"] == 1:  # a second interrupt would keep nothing
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_fails_is_failed_with_its_error_and_an_interrupted_one_is_killed(uri: str) -> None:
    failing, interrupted = MLflowLogger(uri, "ends"), MLflowLogger(uri, "ends")

    with pytest.raises(ZeroDivisionError):
        fit(estimator(), failing, Fails())
    kept = estimator()
    with pytest.raises(KeyboardInterrupt):
        fit(kept, interrupted, Interrupts())

    run = mlflow.MlflowClient(uri).get_run(failing.run_id)
    assert run.info.status == "FAILED"
    assert "the loss is nothing" in run.data.tags["kindler.error"]
    assert status(uri, interrupted.run_id) == "KILLED"
    logged = [epoch for epoch, _ in metric(uri, interrupted.run_id, "loss")]
    assert logged[:1] == [1]
    assert logged == [row["epoch"] for row in kept.history]
