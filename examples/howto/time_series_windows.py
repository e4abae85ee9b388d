"""Forecast many time series from windows that Spark creates: the next hour from the last two days.

    python examples/howto/time_series_windows.py

The series are synthetic: twelve hourly sensors with daily and weekly patterns, different levels, and noise.
"""

import numpy as np
import pandas as pd
import torch
from pyspark.sql import Window
from pyspark.sql import functions as F
from torch import nn

import kindler

HISTORY = 48  # hours that the model sees
SPLIT = 24 * 28  # training ends here; later hours are for testing


def readings(sensors=12, hours=24 * 35):
    draw = np.random.default_rng(0)
    hour = np.arange(hours)
    parts = []
    for sensor in range(sensors):
        daily = draw.uniform(2, 4) * np.sin(2 * np.pi * (hour + draw.integers(24)) / 24)
        weekly = draw.uniform(0.5, 1.5) * np.sin(2 * np.pi * hour / 168)
        drift = np.cumsum(draw.normal(0, 0.15, hours))
        value = draw.uniform(5, 50) + daily + weekly + drift + draw.normal(0, 0.2, hours)
        parts.append(pd.DataFrame({"sensor": sensor, "hour": hour, "value": value}))
    return pd.concat(parts)


def windows(frame):
    """A row for each hour of each sensor: `history`, the preceding hours, and `next`, the next value."""
    by_sensor = Window.partitionBy("sensor").orderBy("hour")
    before = by_sensor.rowsBetween(-HISTORY, -1)
    cut = frame.select(
        "sensor", "hour", F.collect_list("value").over(before).alias("history"), F.col("value").alias("next")
    )
    return cut.where(F.size("history") == HISTORY)  # the first hours have no complete window


class Forecaster(nn.Module):
    """Looks at a window relative to its last value, so that every sensor has the same scale."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(HISTORY, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, history):
        last = history[:, -1:]
        return (last + self.layers(history - last))[:, 0]


def main():
    spark = kindler.init(cores=2)
    cut = windows(spark.createDataFrame(readings()).repartition(4, "sensor")).cache()
    train, test = cut.where(F.col("hour") < SPLIT), cut.where(F.col("hour") >= SPLIT)

    torch.manual_seed(0)
    model = Forecaster()
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=nn.L1Loss(),
        metrics=["mae"],
        workers=2,
    )
    history = estimator.fit(
        train,
        epochs=8,
        batch_size=128,
        feature_cols="history",
        label_cols="next",
        validation_data=test,
        verbose=0,
    )
    print(f"windows: {history[-1]['num_samples']} to train, {history[-1]['val_num_samples']} to test")

    errors = estimator.predict(test, output_cols="forecast").select(
        F.avg(F.abs(F.col("forecast") - F.col("next"))).alias("model"),
        F.avg(F.abs(F.col("history")[HISTORY - 1] - F.col("next"))).alias("last"),
        F.avg(F.abs(F.col("history")[HISTORY - 24] - F.col("next"))).alias("yesterday"),
    )
    row = errors.first()
    print(f"mean absolute error of the model: {row['model']:.3f}")
    print(f"as in the last hour: {row['last']:.3f}, as yesterday: {row['yesterday']:.3f}")
    kindler.stop()


if __name__ == "__main__":
    main()
