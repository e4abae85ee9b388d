"""A nightly job: score one day's customers with the production model. It can be rerun at any time.

    python examples/howto/nightly.py

This program first creates the model and two days of data, and then runs the job for both days. On your
cluster, the job is `score_day` with the scheduler's date.
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from pyspark.sql import functions as F
from torch import nn

import kindler
from kindler import Columns

COLUMNS = ["orders", "days_since", "complaints"]


def score_day(spark, store, folder, day):
    """Write or replace `scores/day=DAY`, and return the number of its customers."""
    version = store.models.metadata("churn@prod")
    estimator = store.models.get(version.name, version=version.number)  # this version, even if the tag moves
    customers = spark.read.parquet(f"{folder}/customers/day={day}")

    scored = estimator.predict(customers, output_cols="risk", batch_size=4096)
    result = scored.select("customer", "risk", F.lit(str(version)).alias("model"))
    result.write.mode("overwrite").parquet(f"{folder}/scores/day={day}")

    written = spark.read.parquet(f"{folder}/scores/day={day}")
    rows, usable = written.select(F.count("*"), F.count(F.when(F.col("risk").between(0, 1), 1))).first()
    if rows != customers.count() or usable != rows:
        raise RuntimeError(f"{day}: {customers.count()} customers, {rows} scores, {usable} usable")
    return rows


def make_customers(rows, seed):
    draw = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "customer": np.arange(rows) + 1000 * seed,
            "orders": draw.poisson(4, rows).astype("float32"),
            "days_since": draw.exponential(30, rows).astype("float32"),
            "complaints": draw.poisson(0.4, rows).astype("float32"),
        }
    )
    score = table["days_since"] / 20 + 1.5 * table["complaints"] - table["orders"] / 2
    table["left"] = (draw.logistic(size=rows) < score).astype("float32")
    return table


def train(store):
    """The weekly job: train, and tag the version for production."""
    torch.manual_seed(0)
    layers = (nn.BatchNorm1d(3), nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid(), nn.Flatten(0))
    estimator = kindler.Estimator.from_torch(
        model=nn.Sequential(*layers),
        optimizer=torch.optim.Adam,
        loss=nn.BCELoss(),
        metrics=["auc"],
        workers=1,
        engine="local",
    )
    history = estimator.fit(
        make_customers(4000, seed=1),
        epochs=10,
        batch_size=64,
        feature_cols=COLUMNS,
        label_cols="left",
        columns=Columns(stack_features=True),
        verbose=0,
    )
    auc = round(history[-1]["auc"], 3)
    print("stored:", store.models.put(estimator, "churn", tag="prod", attributes={"auc": auc}), "AUC", auc)


def main(folder):
    spark = kindler.init(cores=2)
    store = kindler.Store(folder / "store")  # or postgresql://... for several machines
    train(store)
    for seed, day in ((2, "2026-11-16"), (3, "2026-11-17")):
        frame = spark.createDataFrame(make_customers(900, seed).drop(columns="left"))
        frame.write.mode("overwrite").parquet(f"{folder}/customers/day={day}")
        print(f"{day}: {score_day(spark, store, folder, day)} customers scored")
    print(f"2026-11-17 again: {score_day(spark, store, folder, '2026-11-17')} customers scored")
    spark.read.parquet(f"{folder}/scores").groupBy("day", "model").agg(
        F.count("*").alias("customers"), F.round(F.avg("risk"), 3).alias("mean_risk")
    ).orderBy("day").show()
    store.close()
    kindler.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
