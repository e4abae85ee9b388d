"""Score a stream: each file that arrives in a folder is scored once, and none is lost.

    python examples/howto/streaming.py

Spark's checkpoint records which files it has read. Here the query runs twice until it has caught up; with
`trigger(processingTime="10 seconds")`, it runs until it is stopped.
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from pyspark.sql import functions as F
from sklearn.datasets import load_wine
from torch import nn

import kindler


def trained():
    """A classifier of wines: 13 measurements, three growers."""
    x, y = load_wine(return_X_y=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        workers=1,
        engine="local",
    )
    estimator.fit({"features": x.astype("float32"), "label": y}, epochs=15, batch_size=32, verbose=0)
    return estimator


def arrive(folder, part):
    """Simulates another system: writes a file under a hidden name, and renames it when it is complete."""
    x, y = load_wine(return_X_y=True)
    rows = slice(part, None, 2)
    table = pd.DataFrame({"features": list(x[rows].astype("float32")), "grower": y[rows]})
    folder.mkdir(exist_ok=True)
    table.to_parquet(folder / f".part-{part}.parquet")
    (folder / f".part-{part}.parquet").rename(folder / f"part-{part}.parquet")


def score_new_files(spark, estimator, folder):
    incoming = spark.readStream.schema("features array<float>, grower long").parquet(f"{folder}/incoming")
    scored = estimator.predict(incoming, output_cols="scores")  # the same call as for a table
    likely = F.expr("array_position(scores, array_max(scores)) - 1")
    query = (
        scored.select("grower", likely.alias("predicted"))
        .writeStream.format("parquet")
        .option("path", f"{folder}/scored")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def main(folder):
    spark = kindler.init(cores=2)
    estimator = trained()
    for part in (0, 1):
        arrive(folder / "incoming", part)
        print(f"new rows: {score_new_files(spark, estimator, folder)}")
    print(f"no new file: {score_new_files(spark, estimator, folder)}")

    scored = spark.read.parquet(f"{folder}/scored").toPandas()
    print(f"scored: {len(scored)}, right: {np.mean(scored['grower'] == scored['predicted']):.3f}")
    kindler.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
