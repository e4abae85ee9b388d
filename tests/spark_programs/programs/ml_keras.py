"""Keras models as stages of Spark ML: `python ml_keras.py WORK_FOLDER` prints what was seen, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler

import kindler
from kindler import Estimator
from kindler.ml import KindlerModel, PretrainedModel, pretrained


def off(model: Any, frame: Any, expected: list[float]) -> float:
    predicted = [row.prediction for row in model.transform(frame).orderBy("id").collect()]
    return float(np.abs(np.subtract(predicted, expected)).max())


def main(work: str) -> None:
    spark = kindler.init("local[2]")
    rows = [(i, float(i % 3), float(i % 5), 2.0 * (i % 3) - (i % 5) + 1.0) for i in range(60)]
    frame = spark.createDataFrame(rows, ["id", "a", "b", "label"])
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(1e-6), loss="mse")
    stage = Estimator.from_keras(model=model, workers=1).as_stage(
        inputCol="features", epochs=3, batchSize=20, learningRate=0.05
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    path = str(Path(work, "pipeline"))

    unfitted = Pipeline(stages=[assembler, stage])
    unfitted.write().overwrite().save(path + "-unfitted")
    piped = unfitted.fit(frame)
    piped.write().overwrite().save(path)
    refitted = Pipeline.load(path + "-unfitted").fit(frame)
    expected = [row.prediction for row in piped.transform(frame).orderBy("id").collect()]

    trained = piped.stages[-1].estimator.get_model()
    trained.save(Path(work, "model.keras"))
    trained.export(Path(work, "saved_model"), verbose=False)
    ready = assembler.transform(frame)
    of_file = pretrained(Path(work, "model.keras"), inputCol="features")
    of_folder = pretrained(Path(work, "saved_model"), inputCol="features")
    of_folder.save(str(Path(work, "stage")))
    stages = [of_file, of_folder, PretrainedModel.load(str(Path(work, "stage")))]
    seen = {
        "untouched": float(np.abs(model.get_weights()[0]).sum()),
        "learned": float(np.std(expected)),
        "same": [row.prediction for row in PipelineModel.load(path).transform(frame).orderBy("id").collect()]
        == expected,
        "refitted": off(refitted, frame, expected),
        "kinds": [isinstance(of_file, KindlerModel), isinstance(of_folder, PretrainedModel)],
        "off": [off(one, ready, expected) for one in stages],
    }
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
