"""Orca's estimator for PyTorch, its context, and its two import prefixes."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orca_program as program
import pandas as pd
import pytest
import torch
from orca_program import X, Y
from torch import nn

from kindler.compat.bigdl.nn.layer import Linear, Sequential
from kindler.compat.bigdl.optim.optimizer import L2Regularizer
from kindler.compat.zoo.orca import OrcaContext, init_orca_context
from kindler.compat.zoo.orca.data import SparkXShards, XShards
from kindler.compat.zoo.orca.learn import metrics, optimizers
from kindler.compat.zoo.orca.learn.base import strategy_of
from kindler.compat.zoo.orca.learn.bigdl import Estimator as BigDLEstimator
from kindler.compat.zoo.orca.learn.optimizers.schedule import Step
from kindler.compat.zoo.orca.learn.pytorch import Estimator
from kindler.compat.zoo.orca.learn.pytorch.callbacks import (
    MaxstepsCallback,
    ModelCheckpoint,
    TensorBoardCallback,
)
from kindler.errors import ConfigError
from kindler.strategies import AllReduce, Zero1

DATA = XShards.partition({"x": X, "y": Y}, num_shards=2, engine="local")


def estimator(**options: Any) -> Any:
    given = {
        "model": program.model_creator,
        "optimizer": program.optimizer_creator,
        "loss": nn.MSELoss(),
        "config": {"lr": 0.1},
        "backend": "spark",
        "workers_per_node": 2,
    }
    return Estimator.from_torch(**{**given, **options})


def weights(est: Any) -> Any:
    return np.concatenate([part.detach().numpy().ravel() for part in est.get_model().parameters()])


def descended(steps: int, batch_size: int = 23, scale: float = 1.0) -> Any:
    """Weights after steps of gradient descent over all rows in one process."""
    model = program.model_creator({})
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * scale)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
    return np.concatenate([part.detach().numpy().ravel() for part in model.parameters()])


def test_shards_have_orcas_name_for_assembling_columns() -> None:
    shards = XShards.partition(
        pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "y": [0.0, 1.0]}), 1, engine="local"
    )
    (assembled,) = shards.assembleFeatureLabelCols(["a", "b"], ["y"]).collect()
    np.testing.assert_array_equal(assembled["x"], [[1, 3], [2, 4]])
    np.testing.assert_array_equal(assembled["y"], [[0], [1]])


def test_every_backend_makes_the_steps_of_one_process() -> None:
    """The programs of Orca's page: creators, a loader function, instances."""
    expected = descended(2)
    for backend in ("torch_distributed", "horovod", "spark", "ray"):
        est = estimator(backend=backend, sync_stats=True, log_level=logging.WARNING, use_tqdm=True)
        stats = est.fit(data=DATA, epochs=2, batch_size=23)
        np.testing.assert_allclose(weights(est), expected, rtol=1e-4, atol=1e-6)
        assert [sorted(row) for row in stats] == [
            ["batch_count", "epoch", "last_train_loss", "num_samples", "train_loss"]
        ] * 2
        assert [(row["epoch"], row["batch_count"], row["num_samples"]) for row in stats] == [
            (1, 1, 23),
            (2, 1, 23),
        ]
        assert stats[0]["last_train_loss"] == pytest.approx(stats[0]["train_loss"])
    by_rule = estimator(backend="bigdl", optimizer=optimizers.SGD(0.1))
    by_rule.fit(DATA, epochs=2, batch_size=23)
    np.testing.assert_allclose(weights(by_rule), expected, rtol=1e-4, atol=1e-6)
    by_loader = estimator(backend="horovod")
    by_loader.fit(program.train_loader, epochs=2, batch_size=23)
    np.testing.assert_allclose(weights(by_loader), expected, rtol=1e-4, atol=1e-6)

    model = program.model_creator({})
    adam = torch.optim.SGD(model.parameters(), 0.1)
    est = Estimator.from_torch(model=model, optimizer=adam, loss=nn.MSELoss(), workers_per_node=2)
    assert est.backend == "bigdl"
    assert est.fit(data=DATA, epochs=2, batch_size=23) is est
    np.testing.assert_allclose(weights(est), expected, rtol=1e-4, atol=1e-6)
    assert est.get_model() is model


def test_the_strategy_of_bigdl_divides_only_what_is_known_to_be_divisible() -> None:
    assert strategy_of("bigdl", divide="") == Zero1()
    assert strategy_of("bigdl", divide="elements") == Zero1(divide="elements")
    assert strategy_of("bigdl", divide=None) == strategy_of("horovod", divide="") == AllReduce()


def test_results_of_each_worker_add_up_to_those_of_all() -> None:
    est = estimator(metrics=[metrics.MAE()])
    apart = est.fit(DATA, epochs=2, batch_size=8, validation_data=DATA, reduce_results=False, profile=True)
    assert [len(epoch) for epoch in apart] == [2, 2]  # epochs, then workers
    assert [sum(own["num_samples"] for own in epoch) for epoch in apart] == [23, 23]
    assert [sum(own["val_num_samples"] for own in epoch) for epoch in apart] == [23, 23]
    assert apart[0][0]["train_loss"] != apart[0][1]["train_loss"]
    assert apart[1][0]["profile"]["epoch_s"] > 0
    assert {"last_train_loss", "val_loss", "val_mae"} <= set(apart[1][1])

    together, by_worker = (
        est.evaluate(DATA, batch_size=8),
        est.evaluate(DATA, batch_size=8, reduce_results=False),
    )
    assert sorted(together) == ["MAE", "num_samples", "val_loss"]
    assert [own["num_samples"] for own in by_worker] != [23, 23]
    for name in ("MAE", "val_loss"):  # rows count once, whoever has them
        mean = sum(own[name] * own["num_samples"] for own in by_worker) / 23
        assert together[name] == pytest.approx(mean)
        last = sum(
            own[f"val_{name.lower().removeprefix('val_')}"] * own["val_num_samples"] for own in apart[1]
        )
        assert together[name] == pytest.approx(last / 23, rel=1e-5)


def test_max_steps_end_training_in_mid_epoch_and_a_second_fit_trains_as_many() -> None:
    est = estimator(workers_per_node=1)
    first = est.fit(DATA, epochs=1, max_steps=5, batch_size=8)
    assert [row["batch_count"] for row in first] == [3, 2]
    second = est.fit(DATA, max_steps=2, batch_size=8)
    assert [(row["epoch"], row["batch_count"]) for row in second] == [(3, 2)]


def test_callbacks_see_each_batch_and_epoch_on_every_worker(tmp_path: Path) -> None:
    est = estimator(scheduler_creator=program.scheduler_creator)
    checkpoint = ModelCheckpoint(str(tmp_path / "ckpt" / "net-{epoch}"), save_weights_only=True)
    stats = est.fit(
        DATA,
        epochs=2,
        batch_size=12,
        validation_data=DATA,
        callbacks=[
            program.Diary(str(tmp_path)),
            checkpoint,
            TensorBoardCallback(str(tmp_path / "board"), "batch"),
        ],
    )

    step = ["before_train_iter", "after_train_iter"]
    judged = ["before_val_iter", "after_val_iter"]
    epoch = [
        "before_train_epoch",
        *step * 2,
        "before_val_epoch",
        *judged * 2,
        "after_val_epoch",
        "after_train_epoch",
    ]
    for rank in (0, 1):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts["hooks"] == ["before_run", *epoch * 2, "after_run"]
        assert facts["steps"] == 4
        assert facts["stats"]["val_loss"] == pytest.approx(stats[1]["val_loss"])
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [
        "last.ckpt",
        "net-epoch=1.ckpt",
        "net-epoch=2.ckpt",
    ]
    assert list((tmp_path / "board").rglob("events.out.tfevents.*"))
    last = Estimator.latest_checkpoint(str(tmp_path / "ckpt"))
    other = estimator()
    other.load(last)
    np.testing.assert_array_equal(weights(other), weights(est))


def test_a_main_callback_computes_batches_and_runner_stop_ends_the_run() -> None:
    est = estimator()
    stats = est.fit(DATA, epochs=4, batch_size=23, callbacks=[program.Halved(), program.StopEarly()])
    assert len(stats) == 1
    np.testing.assert_allclose(weights(est), descended(1, scale=0.5), rtol=1e-4, atol=1e-6)
    stopped = est.fit(DATA, epochs=4, batch_size=8, callbacks=[MaxstepsCallback(3)])
    assert [row["epoch"] for row in stopped] == [2]


def test_predictions_lose_axes_of_length_1_and_files_carry_the_model(tmp_path: Path) -> None:
    est = estimator(optimizer=optimizers.SGD(0.1, learningrate_schedule=Step(1, 0.5)), workers_per_node=1)
    est.fit(DATA, epochs=1, batch_size=23)
    predicted = np.concatenate([shard["prediction"] for shard in est.predict(DATA).collect()])
    assert predicted.shape == (23,)
    np.testing.assert_allclose(predicted, est.get_model()(torch.tensor(X)).detach().numpy()[:, 0], rtol=1e-5)
    np.testing.assert_allclose(weights(est), descended(1), rtol=1e-4, atol=1e-6)

    est.save(str(tmp_path / "weights.pt"))
    est.save(str(tmp_path / "whole.pt"), entire=True)
    est.save_checkpoint(str(tmp_path / "checkpoint"))
    assert isinstance(torch.load(tmp_path / "whole.pt", weights_only=False), nn.Linear)
    for name in ("weights.pt", "checkpoint"):
        other = estimator(workers_per_node=1, optimizer=optimizers.SGD(0.1))
        other.load(str(tmp_path / name))
        np.testing.assert_array_equal(weights(other), weights(est))
    other = estimator(workers_per_node=1)
    other.load_state_dict(est.get_state_dict())
    np.testing.assert_array_equal(weights(other), weights(est))
    assert est.get_state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: estimator(backend="mpi"), "backend are supported"),
        (lambda: estimator(config={"batch_size": 3}), "do not specify batch_size in config"),
        (lambda: estimator(model=None), "Must provide a function for model_creator"),
        (lambda: estimator(workers_per_node=0), "workers_per_node must be at least 1"),
        (lambda: estimator(training_operator_cls=object), "training_operator_cls"),
        (lambda: estimator(scheduler_step_freq="day"), "scheduler_step_freq"),
        (lambda: estimator().fit(DATA, callbacks=[object()]), "callbacks must be those of"),
        (lambda: estimator().fit(DATA, callbacks=[program.OwnBackward()]), "on_iter_backward cannot be"),
        (lambda: estimator().fit(DATA, callbacks=[program.Halved(), program.Halved()]), "one MainCallback"),
        (lambda: estimator().evaluate(DATA, callbacks=[program.Halved()]), "evaluate has no callbacks"),
        (lambda: estimator().predict(DATA, callbacks=[program.Halved()]), "predict has no callbacks"),
        (lambda: estimator().fit(DATA, epochs=0), "epochs"),
        (lambda: estimator().set_constant_gradient_clipping(-1, 2), "between -c and c"),
        (lambda: Estimator.latest_checkpoint("/nowhere"), "does not exist"),
        (lambda: init_orca_context("mesos"), "cluster_mode can only be one of"),
        (lambda: init_orca_context(runtime="dask"), "runtime should be spark or ray"),
        (lambda: init_orca_context("local", "ray"), "not supported for ray runtime"),
        (lambda: init_orca_context("standalone"), "needs the master"),
        (lambda: init_orca_context("yarn-client"), "spark-submit"),
        (lambda: setattr(OrcaContext, "pandas_read_backend", "dask"), "spark or pandas"),
        (lambda: setattr(OrcaContext, "train_data_store", "TAPE"), "DRAM or PMEM or DISK_n"),
        (lambda: setattr(OrcaContext, "_shard_size", 0), "positive integer"),
        (lambda: setattr(OrcaContext, "barrier_mode", 1), "True or False"),
        (OrcaContext.get_spark_context, "No active SparkContext"),
    ],
)
def test_what_cannot_work_is_a_runtime_error(call: Any, problem: str) -> None:
    with pytest.raises(RuntimeError, match=problem) as caught:
        call()
    assert isinstance(caught.value, ConfigError)


def test_settings_of_the_context_are_kept() -> None:
    before = OrcaContext.train_data_store
    OrcaContext.train_data_store = "disk_4"
    assert OrcaContext.train_data_store == "DISK_4"
    OrcaContext.train_data_store = before
    context = init_orca_context(runtime="ray", cores=3)
    assert (context.num_ray_nodes, context.ray_node_cpu_cores) == (1, 3)
    assert SparkXShards is XShards


@pytest.mark.parametrize(
    "name",
    [
        "common",
        "data",
        "data.pandas",
        "data.shard",
        "learn.bigdl",
        "learn.bigdl.estimator",
        "learn.metrics",
        "learn.mxnet",
        "learn.openvino",
        "learn.optimizers",
        "learn.optimizers.schedule",
        "learn.pytorch",
        "learn.pytorch.callbacks",
        "learn.pytorch.callbacks.model_checkpoint",
        "learn.tf2",
        "learn.trigger",
    ],
)
def test_both_prefixes_are_one_package(name: str) -> None:
    old = importlib.import_module(f"kindler.compat.zoo.orca.{name}")
    new = importlib.import_module(f"kindler.compat.bigdl.orca.{name}")
    assert new is old
    assert sys.modules[old.__spec__.name] is old  # a module with several paths keeps its own spec


@pytest.mark.parametrize("name", ["nn.layer", "nn.criterion", "nn.initialization_method", "optim.optimizer"])
def test_dllib_is_the_later_home_of_bigdl(name: str) -> None:
    new = importlib.import_module(f"kindler.compat.bigdl.dllib.{name}")
    assert new is importlib.import_module(f"kindler.compat.bigdl.{name}")
    common = importlib.import_module("kindler.compat.bigdl.dllib.utils.common")
    assert common is importlib.import_module("kindler.compat.bigdl.util.common")


def test_a_module_that_is_not_there_is_not_found_under_either_prefix() -> None:
    for prefix in ("zoo", "bigdl"):
        with pytest.raises(ModuleNotFoundError, match=r"orca\.learn\.caffe"):
            importlib.import_module(f"kindler.compat.{prefix}.orca.learn.caffe")


OUTPUT = np.random.default_rng(1).dirichlet(np.ones(3), size=8)
NUMBERS = OUTPUT.argmax(1)
NUMBERS[:3] = (NUMBERS[:3] + 1) % 3
ONE_HOT = np.eye(3)[NUMBERS]


@pytest.mark.parametrize(
    ("metric", "output", "label", "expected"),
    [
        (metrics.Accuracy(), OUTPUT, NUMBERS, 5 / 8),
        (metrics.Accuracy(), OUTPUT, ONE_HOT, 5 / 8),
        (metrics.Accuracy(), np.array([0.2, 0.6, 0.5]), np.array([0.0, 1.0, 0.0]), 2 / 3),
        (metrics.SparseCategoricalAccuracy(), OUTPUT, NUMBERS, 5 / 8),
        (metrics.CategoricalAccuracy(), OUTPUT, ONE_HOT, 5 / 8),
        (metrics.BinaryAccuracy(), np.array([[0.2], [0.6]]), np.array([0, 0]), 0.5),
        (metrics.Top5Accuracy(), OUTPUT, NUMBERS, 1.0),
        (metrics.MSE(), OUTPUT, ONE_HOT, np.square(OUTPUT - ONE_HOT).mean()),
        (metrics.BinaryCrossEntropy(), OUTPUT[:, 0], ONE_HOT[:, 0], None),
        (
            metrics.CategoricalCrossEntropy(),
            OUTPUT,
            ONE_HOT,
            -np.log(OUTPUT[np.arange(8), NUMBERS]).mean(),
        ),
        (
            metrics.SparseCategoricalCrossEntropy(),
            OUTPUT,
            NUMBERS,
            -np.log(OUTPUT[np.arange(8), NUMBERS]).mean(),
        ),
        (
            metrics.KLDivergence(),
            OUTPUT,
            OUTPUT[::-1],
            (OUTPUT[::-1] * np.log(OUTPUT[::-1] / OUTPUT)).sum(1).mean(),
        ),
        (metrics.Poisson(), OUTPUT, ONE_HOT, (OUTPUT - ONE_HOT * np.log(OUTPUT + 1e-7)).mean()),
    ],
)
def test_metrics_are_what_numpy_computes(
    metric: Any, output: Any, label: Any, expected: float | None
) -> None:
    if expected is None:
        expected = float(nn.functional.binary_cross_entropy(torch.tensor(output), torch.tensor(label)))
    before = output.copy()
    assert metric.score(output, label) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(output, before)


def test_judging_takes_the_steps_and_the_metrics_that_it_is_given() -> None:
    est = estimator(metrics=[metrics.MAE()])
    est.fit(DATA, epochs=1, batch_size=23)
    model = est.get_model()
    errors = np.abs(model(torch.tensor(X)).detach().numpy() - Y)
    assert est.evaluate(DATA, batch_size=4, num_steps=2)["MAE"] == pytest.approx(errors[:8].mean(), rel=1e-5)
    other = est.evaluate(DATA, batch_size=4, validation_metrics=[metrics.MSE()])
    assert other["MSE"] == pytest.approx((errors**2).mean(), rel=1e-5)
    assert "MAE" not in other
    few = est.evaluate(program.train_loader, batch_size=8, num_steps=1)
    assert few["num_samples"] == 8
    with pytest.raises(RuntimeError, match="num_steps needs a DataFrame, an XShards or a function"):
        est.evaluate(program.train_loader({}, 4), num_steps=1)


def test_regularizers_are_refused_where_an_optimizer_does_not_know_them() -> None:
    model = Sequential().add(Linear(3, 1, wRegularizer=L2Regularizer(0.1)))
    adam = torch.optim.Adam(torch.nn.Module.parameters(model), 0.1)
    with pytest.raises(RuntimeError, match="have regularizers, which torch's optimizers ignore"):
        Estimator.from_torch(model=model, optimizer=adam, loss=nn.MSELoss())
    with pytest.raises(RuntimeError, match="have regularizers, which torch's optimizers ignore"):
        BigDLEstimator.from_bigdl(model=model, optimizer=adam, loss=nn.MSELoss())
    assert Estimator.from_torch(model=model, optimizer=optimizers.SGD(0.1), loss=nn.MSELoss()) is not None
