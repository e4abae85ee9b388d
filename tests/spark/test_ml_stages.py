"""Estimators as stages of Spark ML: pipelines, validators, files."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder, TrainValidationSplit
from torch import nn

from kindler import Estimator
from kindler.errors import ConfigError, NotFittedError, UntrustedError
from kindler.ml import KindlerEstimator, KindlerModel, trusting
from tests.whole import whole_only

pytestmark = pytest.mark.spark


class Sums(nn.Module):
    """A class of the user's own: two layers, the last of which doubles."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = self.inner(x) * 2
        return doubled


def linear(width: int = 2, outputs: int = 1) -> nn.Linear:
    model = nn.Linear(width, outputs)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def estimator(model: Any = None, **options: Any) -> Estimator:
    made = linear() if model is None else model
    options = {"loss": nn.MSELoss(), "workers": 1, **options}
    if "optimizer" not in options:
        options["optimizer"] = torch.optim.SGD
    return Estimator.from_torch(model=made, **options)


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """y = 2a - b + 1, of which a is a category and b a number."""
    rows = [(i, float(i % 3), float(i % 5), 2.0 * (i % 3) - (i % 5) + 1.0, f"c{i % 3}") for i in range(60)]
    return spark.createDataFrame(rows, "id long, a double, b double, label double, c string").repartition(2)


@pytest.fixture(scope="module")
def assembled(frame: Any) -> Any:
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame).cache()


@pytest.fixture(scope="module")
def fitted(assembled: Any) -> KindlerModel:
    stage = estimator().as_stage(
        inputCol="features", labelCol="label", predictionCol="p", epochs=8, batchSize=20, learningRate=0.05
    )
    stage.set(stage.shapes, {"label": [1]})
    model = stage.fit(assembled)
    assert isinstance(model, KindlerModel)
    return model


def test_a_fit_leaves_the_estimator_alone_and_learns_what_a_plain_loop_does(
    fitted: KindlerModel, assembled: Any
) -> None:
    rows = assembled.collect()
    x = torch.tensor(np.array([row.features.toArray() for row in rows]), dtype=torch.float32)
    y = torch.tensor([[row.label] for row in rows], dtype=torch.float32)
    whole = estimator(linear(), optimizer=torch.optim.SGD).as_stage(
        inputCol="features", epochs=3, batchSize=60, learningRate=0.05, shapes={"label": (1,)}
    )
    reference = linear()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        optimizer.step()

    trained = whole.fit(assembled)

    torch.testing.assert_close(trained.estimator.get_model().weight, reference.weight)
    assert whole.estimator.get_model().weight.abs().sum() == 0
    assert [row["epoch"] for row in fitted.history] == list(range(1, 9))
    assert len(whole.estimator.history) == 0


def test_transform_adds_a_double_and_keeps_columns_rows_and_order(
    fitted: KindlerModel, assembled: Any
) -> None:
    scored = fitted.transform(assembled)
    rows = scored.collect()
    model = fitted.estimator.get_model()
    x = torch.tensor(np.array([row.features.toArray() for row in rows]), dtype=torch.float32)

    assert scored.columns == [*assembled.columns, "p"]
    assert dict(scored.dtypes)["p"] == "double"
    assert [row.id for row in rows] == [row.id for row in assembled.collect()]
    np.testing.assert_allclose([row.p for row in rows], model(x).detach()[:, 0], rtol=1e-5, atol=1e-6)
    other = fitted.transform(assembled, {fitted.predictionCol: "q"})
    assert other.columns[-1] == "q"
    with pytest.raises(ConfigError, match="already has"):
        fitted.transform(scored)


def test_several_outputs_are_a_vector_and_a_label_is_the_largest(assembled: Any) -> None:
    model = linear(2, 3)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 2.0, 1.0]))
    stage = KindlerModel(estimator(model), inputCol="features", rawPredictionCol="raw")

    vector = stage.transform(assembled).first()
    labels = stage.copy({stage.predictionType: "label"}).transform(assembled)
    array = stage.copy({stage.predictionType: "array"}).transform(assembled).first()

    assert vector.prediction == vector.raw == DenseVector([0.0, 2.0, 1.0])
    assert {row.prediction for row in labels.select("prediction").collect()} == {1.0}
    assert array.prediction == [0.0, 2.0, 1.0]
    assert array.raw == DenseVector([0.0, 2.0, 1.0])


def test_sparse_vectors_and_a_threshold(spark: Any) -> None:
    rows = [(Vectors.sparse(2, {0: 1.0}),), (Vectors.dense([1.0, 1.0]),), (Vectors.sparse(2, {}),)]
    frame = spark.createDataFrame(rows, ["v"])
    model = linear()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    stage = KindlerModel(estimator(model), inputCol="v", predictionType="label", threshold=2.0)

    assert [row.prediction for row in stage.transform(frame).collect()] == [0.0, 1.0, 0.0]


def test_params_have_types_docs_and_copies_of_their_own() -> None:
    stage = estimator(lambda config: linear(), config={"lr": 0.1, "batchSize": 7, "not a name": 1}).as_stage(
        inputCol="x", epochs=2
    )

    assert "epochs: Number of epochs to train. (default: 1, current: 2)" in stage.explainParams()
    assert stage.hasParam("lr")
    assert stage.getOrDefault("batchSize") == 32
    changed = stage.copy({stage.epochs: 5, stage.lr: 0.5})
    assert (changed.getOrDefault("epochs"), changed.getOrDefault("lr")) == (5, 0.5)
    assert stage.getOrDefault("epochs") == 2
    assert not stage.isSet("lr")
    with pytest.raises(TypeError, match="at least 1"):
        stage.set(stage.epochs, 0)
    with pytest.raises(TypeError, match="predictionType"):
        stage.setParams(predictionType="probability")
    with pytest.raises(ConfigError, match="has no parameter inputcol"):
        stage.setParams(inputcol="x")
    with pytest.raises(NotFittedError, match="as_stage"):
        _ = KindlerEstimator().estimator


def test_a_pipeline_of_spark_stages_and_a_model_round_trips_in_a_fresh_process(
    frame: Any, tmp_path: Path
) -> None:
    stage = estimator(linear(4)).as_stage(
        inputCol="features",
        epochs=4,
        batchSize=30,
        learningRate=0.05,
        shapes={"label": (1,)},
    )
    stages = [
        StringIndexer(inputCol="c", outputCol="code"),
        OneHotEncoder(inputCol="code", outputCol="onehot", dropLast=False),
        VectorAssembler(inputCols=["onehot", "b"], outputCol="features"),
        stage,
    ]
    path = str(tmp_path / "pipeline")
    frame.write.parquet(str(tmp_path / "rows"))
    piped = Pipeline(stages=stages).fit(frame)
    piped.write().overwrite().save(path)
    piped.write().overwrite().save(path)
    expected = [row.prediction for row in piped.transform(frame).orderBy("id").collect()]

    again = [row.prediction for row in PipelineModel.load(path).transform(frame).orderBy("id").collect()]

    assert again == expected
    with pytest.raises(Exception, match="already exists|ALREADY_EXISTS"):
        piped.write().save(path)
    program = (
        "import json, sys, kindler\n"
        "from pyspark.ml import PipelineModel\n"
        "spark = kindler.init(cores=1)\n"
        "rows = PipelineModel.load(sys.argv[1]).transform(spark.read.parquet(sys.argv[2]))\n"
        "print(json.dumps([row.prediction for row in rows.orderBy('id').collect()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, path, str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_class_of_ones_own_is_read_only_where_it_is_trusted(
    spark: Any, assembled: Any, tmp_path: Path
) -> None:
    stage = estimator(Sums()).as_stage(
        inputCol="features", shapes={"label": (1,)}, storeOptions={"init": {"width": 2}}
    )
    model = stage.fit(assembled)
    path = str(tmp_path / "model")
    model.save(path)
    expected = [row.prediction for row in model.transform(assembled).collect()]

    with pytest.raises(UntrustedError, match="trusting"):
        KindlerModel.load(path)
    with trusting():
        again = KindlerModel.load(path)
    again.write().overwrite().save(path)

    assert [row.prediction for row in again.transform(assembled).collect()] == expected
    with pytest.raises(ConfigError, match="not a 'kindler.ml.KindlerEstimator'"):
        KindlerEstimator.load(path)


def squared(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()


def test_a_stage_that_was_not_fitted_is_fitted_after_loading(
    assembled: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saved(name: str, **options: Any) -> tuple[KindlerEstimator, str]:
        made = estimator(metrics=["mae"], seed=3, **options)
        stage = made.as_stage(inputCol="features", shapes={"label": (1,)}, epochs=2, batchSize=30)
        stage.save(str(tmp_path / name))
        return stage, str(tmp_path / name)

    def predicted(stage: KindlerEstimator) -> list[float]:
        return [row.prediction for row in stage.fit(assembled).transform(assembled).collect()]

    stage, path = saved("plain", optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    again = KindlerEstimator.load(path)
    assert predicted(again) == predicted(stage)
    assert again.fit(assembled).history.names == stage.fit(assembled).history.names

    stage, path = saved("code", optimizer=torch.optim.SGD, loss=squared)
    with pytest.raises(ConfigError, match=r"loss.*\n?.*trusting"):
        KindlerEstimator.load(path).fit(assembled)
    with trusting():
        again = KindlerEstimator.load(path)
    assert predicted(again) == predicted(stage)
    assert "cannot be fitted" not in caplog.text


def test_names_in_saved_files_cannot_leave_their_folder(
    spark: Any, fitted: KindlerModel, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    fitted.save(str(path))
    evil = [("../../evil", 0, bytearray(b"x"))]
    spark.createDataFrame(evil, "name string, begin long, bytes binary").write.mode("append").parquet(
        str(path / "data")
    )

    with pytest.raises(ConfigError, match="not a valid path"):
        KindlerModel.load(str(path))
    assert not (tmp_path.parent / "evil").exists()


def test_a_saved_model_is_little_larger_than_its_weights(tmp_path: Path, spark: Any) -> None:
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    KindlerModel(estimator(model)).save(str(tmp_path / "model"))

    size = sum(file.stat().st_size for file in (tmp_path / "model").rglob("*") if file.is_file())
    raw = sum(weight.numel() * 4 for weight in model.parameters())
    assert raw == 269_322 * 4
    assert size <= 1.2 * raw + 100_000


@whole_only
def test_validators_pick_the_better_rate_and_save_its_model(assembled: Any, tmp_path: Path) -> None:
    stage = estimator().as_stage(
        inputCol="features", labelCol="label", epochs=3, batchSize=20, shapes={"label": (1,)}, seed=1
    )
    grid = ParamGridBuilder().addGrid(stage.learningRate, [1e-6, 0.05]).build()
    evaluator = RegressionEvaluator(metricName="rmse")

    validator = CrossValidator(
        estimator=stage, estimatorParamMaps=grid, evaluator=evaluator, numFolds=3, seed=1
    )
    crossed = validator.fit(assembled)
    split = TrainValidationSplit(estimator=stage, estimatorParamMaps=grid, evaluator=evaluator, seed=1)
    crossed.save(str(tmp_path / "crossed"))
    again = CrossValidatorModel.load(str(tmp_path / "crossed"))

    assert crossed.avgMetrics[1] < crossed.avgMetrics[0]
    assert crossed.bestModel.estimator.get_model().weight.abs().sum() > 0.1
    assert evaluator.evaluate(again.transform(assembled)) == evaluator.evaluate(crossed.transform(assembled))
    metrics = split.fit(assembled).validationMetrics
    assert metrics[1] < metrics[0]


def test_config_entries_weights_and_marked_rows_reach_the_run(assembled: Any, spark: Any) -> None:
    def model(config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(linear(2, config["hidden"]), linear(config["hidden"], 1))

    marked = assembled.selectExpr("*", "id % 4 = 0 as held_out")
    stage = estimator(
        model,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 9.0),
        config={"hidden": 2},
    ).as_stage(
        inputCol="features",
        shapes={"label": (1,)},
        batchSize=45,
        validationIndicatorCol="held_out",
        learningRate=0.25,
    )
    trained = stage.fit(marked, {stage.hidden: 5})

    (row,) = trained.history
    assert row["num_samples"] == 45
    assert "val_loss" in row
    first, last = trained.estimator.get_model()
    mean = np.mean([row.label for row in marked.filter("not held_out").collect()])
    assert first.weight.shape == (5, 2)
    assert last.bias.item() == pytest.approx(0.25 * 2 * mean, rel=1e-5)  # one step from zeros, at that rate


def test_each_fit_writes_checkpoints_to_a_folder_of_its_own(assembled: Any, tmp_path: Path) -> None:
    stage = estimator().as_stage(
        inputCol="features",
        epochs=2,
        batchSize=30,
        learningRate=0.05,
        shapes={"label": (1,)},
        checkpointDir=str(tmp_path / "runs"),
    )

    longer, shorter = stage.fit(assembled), stage.fit(assembled, {stage.epochs: 1})

    folders = {len(list(folder.glob("*.kindler"))): folder for folder in (tmp_path / "runs").iterdir()}
    assert sorted(folders) == [1, 2], "a checkpoint after every epoch"
    assert all(folder.name.startswith(stage.uid) for folder in folders.values())
    for epochs, model in ((2, longer), (1, shorter)):
        kept = estimator(linear())
        kept.load_checkpoint(Estimator.latest_checkpoint(folders[epochs]))
        torch.testing.assert_close(kept.get_model().weight, model.estimator.get_model().weight)
    assert not torch.equal(longer.estimator.get_model().weight, shorter.estimator.get_model().weight)
    stage.clear(stage.checkpointDir)
    stage.fit(assembled)
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_binary_evaluator_reads_the_raw_column(assembled: Any) -> None:
    labelled = assembled.selectExpr("id", "features", "cast(label > 0 as double) as label")
    stage = estimator(loss=nn.BCEWithLogitsLoss()).as_stage(
        inputCol="features",
        shapes={"label": (1,)},
        epochs=20,
        batchSize=20,
        learningRate=0.5,
        predictionType="label",
        threshold=0.0,
        rawPredictionCol="raw",
    )
    scored = stage.fit(labelled).transform(labelled)
    assert BinaryClassificationEvaluator(rawPredictionCol="raw").evaluate(scored) > 0.95
