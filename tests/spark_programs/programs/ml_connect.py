"""Stages of Spark ML through Spark Connect; prints what was seen as one line of JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from torch import nn

import kindler
from kindler import Estimator
from kindler.ml import KindlerModel


def main(folder: str) -> None:
    spark = kindler.init(cores=2, conf={"spark.api.mode": "connect"})
    rows = [(i, float(i % 3), float(i % 5), 2.0 * (i % 3) - (i % 5) + 1.0) for i in range(60)]
    frame = spark.createDataFrame(rows, "id long, a double, b double, label double")
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    est = Estimator.from_torch(model=model, optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1)
    stage = est.as_stage(
        inputCol="features", epochs=3, batchSize=20, learningRate=0.05, shapes={"label": (1,)}
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    path = os.path.join(folder, "pipeline")

    piped = Pipeline(stages=[assembler, stage]).fit(frame)
    piped.write().overwrite().save(path)
    piped.write().overwrite().save(path)
    again = PipelineModel.load(path)
    alone = os.path.join(folder, "alone")
    piped.stages[-1].write().save(alone)
    piped.stages[-1].write().overwrite().save(alone)
    expected = [row.prediction for row in piped.transform(frame).orderBy("id").collect()]

    grid = ParamGridBuilder().addGrid(stage.learningRate, [1e-6, 0.05]).build()
    validator = CrossValidator(
        estimator=stage, estimatorParamMaps=grid, evaluator=RegressionEvaluator(), numFolds=2, seed=1
    )
    metrics = validator.fit(assembler.transform(frame)).avgMetrics
    seen = {
        "remote": type(spark).__module__.startswith("pyspark.sql.connect"),
        "same": [row.prediction for row in again.transform(frame).orderBy("id").collect()] == expected,
        "alone": KindlerModel.load(alone).getPredictionCol(),
        "learned": len({round(value, 6) for value in expected}) > 1,
        "metrics": metrics,
    }
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
