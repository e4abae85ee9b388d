"""Searches over stages of Spark ML, scored by an evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from torch import nn

from kindler import Estimator
from kindler.errors import ConfigError
from kindler.tune import choice, search

pytestmark = pytest.mark.spark


def test_a_pipeline_is_searched_side_by_side_and_its_best_model_is_read_again(
    spark: Any, tmp_path: Path
) -> None:
    rows = [(float(i % 3), float(i % 5), 2.0 * (i % 3) - (i % 5) + 1.0) for i in range(60)]
    frame = spark.createDataFrame(rows, ["a", "b", "label"]).cache()
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    est = Estimator.from_torch(model=model, optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1)
    stage = est.as_stage(inputCol="v", epochs=3, batchSize=20, shapes={"label": (1,)})
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="v"), stage])
    evaluator = RegressionEvaluator()
    options: dict[str, Any] = {
        "evaluator": evaluator,
        "sampler": "grid",
        "slots": 2,
        "folder": tmp_path / "study",
        "verbose": 0,
    }

    study = search(pipeline, {stage.learningRate: choice([1e-6, 0.05])}, frame, frame, **options)
    again = search(pipeline, {stage.learningRate: choice([1e-6, 0.05])}, frame, frame, **options)

    assert study.best_params == {"KindlerEstimator.learningRate": 0.05}
    assert isinstance(study.best_estimator, PipelineModel)
    assert len(again.trials) == 2
    best = again.best_estimator.transform(frame)
    assert evaluator.evaluate(best) == pytest.approx(study.best_value, rel=1e-6)
    with pytest.raises(ConfigError, match="scored by an evaluator"):
        search(pipeline, {stage.learningRate: choice([1.0])}, frame, frame)
    with pytest.raises(ConfigError, match="not a parameter of a stage"):
        search(pipeline, {"learningRate": choice([1.0])}, frame, frame, evaluator=evaluator)
