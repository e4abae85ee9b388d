"""Programs of BigDL and Orca on Spark, with nothing but their import lines changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orca_program as program
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from torch import nn

from kindler.compat.bigdl.nn.criterion import *
from kindler.compat.bigdl.nn.layer import *
from kindler.compat.bigdl.optim.optimizer import *
from kindler.compat.bigdl.util.common import Sample, to_sample_rdd
from kindler.compat.zoo.feature.common import SeqToTensor
from kindler.compat.zoo.orca import OrcaContext
from kindler.compat.zoo.orca.data import XShards
from kindler.compat.zoo.orca.learn import pytorch
from kindler.compat.zoo.orca.learn.bigdl import Estimator
from kindler.compat.zoo.orca.learn.metrics import Accuracy
from kindler.compat.zoo.pipeline.nnframes import NNClassifier, NNClassifierModel, NNEstimator, NNModel
from kindler.errors import ConfigError

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def spark(sc: Any) -> Any:
    session = OrcaContext.get_spark_session()
    assert OrcaContext.get_spark_context() is sc
    return session


def test_the_program_of_the_page_trains_and_scores_a_parquet_file(spark: Any, tmp_path: Path) -> None:
    pairs = [([2.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [2.0, 1.0])] * 5
    path = str(tmp_path / "data.parquet")
    spark.createDataFrame(pairs, "features array<double>, label array<double>").write.parquet(path)

    linear_model = Sequential().add(Linear(2, 2))
    mse_criterion = MSECriterion()
    est = Estimator.from_bigdl(model=linear_model, loss=mse_criterion, optimizer=Adam())

    # read spark Dataframe
    df = spark.read.parquet(path)

    # distributed model training
    before = linear_model.get_weights()[0]
    est.fit(df, 1, batch_size=4)

    # distributed model inference
    result_df = est.predict(df)

    rows = result_df.collect()
    assert result_df.columns == ["features", "label", "prediction"]
    w, b = est.get_model().get_weights()
    assert not np.array_equal(w, before)
    features = np.array([row["features"] for row in rows])
    np.testing.assert_allclose([row["prediction"] for row in rows], features @ w.T + b, rtol=1e-4)
    assert sorted(map(tuple, features)) == sorted(tuple(x) for x, _ in pairs)


def test_classes_of_a_frame_are_counted_from_1_and_columns_become_one_vector(
    spark: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    values = [(*map(float, row), float(row[0] > row[1]) + 1.0) for row in rng.normal(size=(32, 2))]
    df = spark.createDataFrame(values, "a double, b double, label double").repartition(3)
    est = Estimator.from_bigdl(
        model=Sequential().add(Linear(2, 2)).add(LogSoftMax()),
        loss=ClassNLLCriterion(),
        optimizer=Adam(0.1),
        feature_preprocessing=SeqToTensor([2]),
        label_preprocessing=SeqToTensor([1]),
        metrics=Accuracy(),
    )
    est.set_tensorboard(str(tmp_path), "app")

    est.fit(data=df, epochs=6, batch_size=8, feature_cols=["a", "b"], validation_data=df)
    result = est.evaluate(df, batch_size=8, feature_cols=["a", "b"])

    scored = est.predict(df, feature_cols=["a", "b"]).collect()
    right = [np.argmax(row["prediction"]) + 1 == row["label"] for row in scored]
    assert result["Top1Accuracy"] == pytest.approx(np.mean(right))
    assert np.mean(right) > 0.8
    assert len(est.get_validation_summary("Top1Accuracy")) == 6
    est.fit(data=df, epochs=1, batch_size=8, feature_cols=["a", "b"])  # of a DataFrame: one epoch more
    assert est.optimizer.state["epoch"] == 8


def test_models_score_and_judge_rdds_of_samples(spark: Any) -> None:
    x, y = np.arange(8.0).reshape(4, 2), np.array([1.0, 2.0, 1.0, 2.0])
    model = Sequential().add(Linear(2, 2)).add(LogSoftMax())
    rdd = to_sample_rdd(x, y, 2)

    outputs = np.stack(model.predict(rdd).collect())
    (result,) = model.evaluate(rdd, 3, [Top1Accuracy()])

    np.testing.assert_allclose(outputs, model.predict(x), rtol=1e-5)
    assert (result.result, result.total_num) == (np.mean(outputs.argmax(1) + 1 == y), 4)
    assert model.predict_class(rdd).collect() == list(outputs.argmax(1) + 1)
    assert isinstance(rdd.first(), Sample)


def test_torch_programs_train_and_score_frames_and_shards(spark: Any) -> None:
    rows = [(x.tolist(), float(y[0])) for x, y in zip(program.X, program.Y, strict=True)]
    df = spark.createDataFrame(rows, "image array<float>, label float")
    est = pytorch.Estimator.from_torch(
        model=program.model_creator,
        optimizer=program.optimizer_creator,
        loss=nn.MSELoss(),
        config={"lr": 0.1},
        backend="torch_distributed",
        workers_per_node=2,
    )
    stats = est.fit(data=df, epochs=2, batch_size=8, feature_cols=["image"], label_cols=["label"])
    assert [row["num_samples"] for row in stats] == [23, 23]

    predictions = est.predict(data=df, feature_cols=["image"])
    assert predictions.schema["prediction"].dataType.simpleString() == "float"
    rows = predictions.collect()
    w, b = (part.detach().numpy() for part in est.get_model().parameters())
    expected = np.array([row["image"] for row in rows]) @ w[0] + b
    np.testing.assert_allclose([row["prediction"] for row in rows], expected, rtol=1e-4, atol=1e-5)
    shards = est.predict(XShards.partition({"x": program.X}))
    assert sum(len(shard["prediction"]) for shard in shards.collect()) == 23


def test_an_rdd_of_samples_is_trained_on_and_judged(spark: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, second = rng.uniform(size=(2, 40, 2))
    rdd = spark.sparkContext.parallelize(list(zip(first, second, strict=True)), 3).map(
        lambda pair: Sample.from_ndarray(list(pair), np.array(2 * (pair[0] + pair[1]).sum() + 0.4))
    )
    branches = ParallelTable().add(Linear(2, 1)).add(Linear(2, 1))
    model = Sequential().add(branches).add(CAddTable())
    method = SGD(learningrate=0.2, leaningrate_schedule=Poly(0.5, 400))
    method.save(str(tmp_path / "method"))
    optimizer = Optimizer(
        model=model, training_rdd=rdd, criterion=MSECriterion(), end_trigger=MaxEpoch(8), batch_size=8,
        optim_method=OptimMethod.load(str(tmp_path / "method")),
    )  # fmt: skip
    summary = ValidationSummary(str(tmp_path), "run")
    optimizer.set_validation(batch_size=8, val_rdd=rdd, trigger=EveryEpoch(), val_method=[MAE()])
    optimizer.set_val_summary(summary)

    assert optimizer.optimize() is model

    errors = np.stack(model.predict(rdd).collect())[:, 0] - (2 * (first + second).sum(1) + 0.4)
    assert summary.read_scalar("MAE")[-1, 1] == pytest.approx(np.abs(errors).mean(), rel=1e-3)
    assert np.abs(errors).mean() < 0.5
    with pytest.raises(ValueError, match="the RDD must hold Samples"):
        Optimizer.create(model, spark.sparkContext.parallelize([1, 2]), MSECriterion()).optimize()


def test_samples_with_several_labels_are_a_table_for_the_criterion(spark: Any) -> None:
    x = np.random.default_rng(0).uniform(size=(20, 3))
    rdd = spark.sparkContext.parallelize(list(x), 2).map(
        lambda row: Sample.from_ndarray([row, row], [np.array(1.0), np.array(1.0)])
    )
    model = Sequential().add(ParallelTable().add(Linear(3, 1)).add(Linear(3, 1)))
    before = [part.copy() for part in model.get_weights()]
    Optimizer.create(model, rdd, MarginRankingCriterion(), MaxEpoch(1), 20, SGD(0.1)).optimize()
    outputs = [x @ before[0].T + before[1], x @ before[2].T + before[3]]
    active = outputs[0] - outputs[1] < 1
    np.testing.assert_allclose(
        model.get_weights()[0], before[0] + 0.1 * (active * x).mean(0), rtol=1e-4, atol=1e-6
    )


def test_columns_of_labels_become_one_vector(spark: Any) -> None:
    rows = [
        (*map(float, row), [1.0, float(row[1])], 2.0) for row in np.random.default_rng(0).normal(size=(12, 2))
    ]
    df = spark.createDataFrame(rows, "a double, b double, `two labels` array<float>, one float")
    model = Sequential().add(Linear(2, 3))
    est = Estimator.from_bigdl(model=model, loss=MSECriterion(), optimizer=Adam(0.05), metrics=[MAE()])
    columns = {"feature_cols": ["a", "b"], "label_cols": ["two labels", "one"]}
    est.fit(df, 1, batch_size=6, validation_data=df, **columns)
    labels = np.array([[*row[2], row[3]] for row in rows])
    errors = model.predict(np.array([row[:2] for row in rows])) - labels
    assert est.evaluate(df, **columns)["MAE"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)


def test_a_stage_of_nnframes_trains_its_model_scores_and_is_saved(spark: Any, tmp_path: Path) -> None:
    rows = [([float(i % 3), float(i % 5)], 2.0 * (i % 3) - (i % 5) + 1.0) for i in range(15)]
    frame = spark.createDataFrame(rows, "x array<double>, y double")
    first = [np.zeros((1, 2), "float32"), np.zeros(1, "float32")]
    linear = Linear(2, 1, init_weight=first[0], init_bias=first[1])
    stage = NNEstimator(linear, MSECriterion(), [2], [1]).setOptimMethod(SGD(0.5)).setLearningRate(0.05)
    stage = stage.setFeaturesCol("x").setLabelCol("y").setPredictionCol("z").setBatchSize(15).setMaxEpoch(3)

    other = stage.copy({stage.maxEpoch: 1})
    other.fit(frame)
    np.testing.assert_array_equal(linear.get_weights()[0], first[0])
    model = stage.fit(frame)

    x, y = np.array([[*row[0], 1.0] for row in rows]), np.array([row[1] for row in rows])
    w = np.zeros(3)
    for _ in range(3):
        w -= 0.05 * 2 * x.T @ (x @ w - y) / len(x)
    np.testing.assert_allclose(np.concatenate([part.ravel() for part in linear.get_weights()]), w, rtol=1e-4)
    model.write().overwrite().save(str(tmp_path / "nn"))
    for scoring in (model, NNModel.load(str(tmp_path / "nn"))):
        scored = scoring.transform(frame).collect()
        np.testing.assert_allclose([row.z[0] for row in scored], x @ w, rtol=1e-4)
        assert [row.y for row in scored] == y.tolist()
    with pytest.raises(ConfigError, match=r"setEndWhen takes MaxEpoch\(n\)"):
        stage.setEndWhen(MaxIteration(3))


def test_a_classifier_of_nnframes_counts_labels_from_1_within_a_pipeline(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame(
        [(float(i % 2), float(i % 3), 1.0 + i % 2) for i in range(12)], "a double, b double, label double"
    )
    network = Sequential().add(Linear(2, 2)).add(LogSoftMax())
    stage = (
        NNClassifier(network, ClassNLLCriterion()).setOptimMethod(Adam(0.3)).setBatchSize(12).setMaxEpoch(30)
    )
    model = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), stage]).fit(frame)
    model.write().overwrite().save(str(tmp_path / "pipeline"))

    for scoring in (model, PipelineModel.load(str(tmp_path / "pipeline"))):
        scored = scoring.transform(frame)
        assert scored.schema["prediction"].dataType.simpleString() == "double"
        assert [row.prediction for row in scored.collect()] == [row.label for row in frame.collect()]

    one = Sequential().add(Linear(2, 1, init_weight=np.ones((1, 2)), init_bias=np.zeros(1)))
    assembled = model.stages[0].transform(frame)
    labels = [row.prediction for row in NNClassifierModel(one).setBatchSize(4).transform(assembled).collect()]
    assert labels == [float(row.a + row.b > 0.5) for row in frame.collect()]
