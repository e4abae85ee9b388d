"""A run of a Keras model is logged to MLflow, and the model is one of MLflow's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS, one_is_enough

from kindler import Estimator
from kindler.callbacks import MLflowLogger

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before mlflow is imported
mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.keras, one_is_enough, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(0).normal(size=(48, 4, 4, 1)).astype("float32")
Y = X.sum(axis=(1, 2))


def test_a_keras_run_has_its_params_metrics_and_a_model_that_predicts_alike(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path / 'runs'}"
    model = KERAS.Sequential([KERAS.Input((4, 4, 1)), KERAS.layers.Flatten(), KERAS.layers.Dense(1)])
    model.compile("sgd", "mse")
    est = Estimator.from_keras(model, workers=2)
    logger = MLflowLogger(uri, "keras")
    callbacks = [logger, KERAS.callbacks.TerminateOnNaN()]

    history = est.fit((X, Y), epochs=2, batch_size=16, callbacks=callbacks, validation_data=(X, Y), verbose=0)

    client = mlflow.MlflowClient(uri)
    run = client.get_run(logger.run_id)
    told = {name: run.data.params[name] for name in ("optimizer", "loss", "workers", "framework")}
    assert told == {"optimizer": "SGD", "loss": "mse", "workers": "2", "framework": "keras"}
    assert (run.info.status, run.data.params["backend"]) == ("FINISHED", FLAVOUR)
    for name in ("loss", "val_loss"):
        points = client.get_metric_history(logger.run_id, name)
        assert sorted((point.step, point.value) for point in points) == list(
            enumerate(history[name], start=1)
        )
    (logged,) = client.search_logged_models([run.info.experiment_id])
    loaded = mlflow.pyfunc.load_model(logged.artifact_location)
    np.testing.assert_allclose(loaded.predict(X), est.get_model().predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    assert loaded.metadata.signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 4, 4, 1)
    assert loaded.metadata.signature.outputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 1)
