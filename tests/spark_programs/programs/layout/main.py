"""All that runs code of the user's elsewhere: `python main.py MASTER WORK_FOLDER [DOORS]` prints it.

The features of a row are (i, 1), for i from 0 to 7. A model adds them, after a transform has made each ten
times as large.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pandas as pd
import torch

import kindler
from kindler import Columns, Estimator, Prepare, Store, XShards

if __package__:
    from layout import helper
    from layout.parts import rows
else:
    import helper
    from parts import rows

X = np.stack([np.arange(8), np.ones(8)], axis=1).astype(np.float32)
TENS = (X.sum(1) * 10).tolist()


def estimator(**options: Any) -> Estimator:
    model = helper.Sum()
    parts = {"loss": helper.mean_error, "optimizer": torch.optim.SGD(model.parameters(), 0.0), "workers": 2}
    return Estimator.from_torch(model=model, **{**parts, **options})


def prepared(**options: Any) -> Estimator:
    return estimator(prepare=Prepare(transform=helper.ten_times, collate=rows.stacked), **options)


def numbers(frame: Any) -> list[float]:
    return sorted(float(np.ravel(row["prediction"])[0]) for row in frame.collect())


def scored_by_spark(spark: Any, frame: Any) -> dict[str, Any]:
    first = prepared().predict(frame, feature_cols="x")  # before any worker has imported anything
    seen: dict[str, Any] = {"predict": numbers(first)}
    try:
        estimator(prepare=Prepare(transform=helper.picky)).predict(frame, feature_cols="x").collect()
    except Exception as exc:
        seen["error"] = str(exc)
    plain = estimator()
    plain.register_udf(spark, "total", feature_cols="x", columns=Columns(shapes={"x": (2,)}))
    seen["udf"] = numbers(frame.selectExpr("total(x) AS prediction"))
    shards = XShards.partition({"x": X}, 2, engine="spark").transform_shard(helper.ten_times_in_shard)
    scored = plain.predict(shards, verbose=0).collect()
    seen["shards"] = [float(v) for shard in scored for v in shard["prediction"][:, 0]]
    return seen


def trained_by_spark(frame: Any, work: str) -> dict[str, Any]:
    est = prepared()
    columns = Columns(shapes={"y": (1,)})
    history = est.fit(frame, feature_cols="x", label_cols="y", columns=columns, verbose=0)
    seen: dict[str, Any] = {"fit": history["loss"]}
    seen["evaluate"] = est.evaluate(frame, verbose=0)["loss"]
    stage = prepared().as_stage(inputCol="x", labelCol="y", predictionType="array").fit(frame)
    seen["stage"] = numbers(stage.transform(frame))
    stage.write().overwrite().save(f"{work}/stage")
    return seen


def on_this_machine(work: str) -> dict[str, Any]:
    data = pd.DataFrame({"x": list(X), "y": TENS})
    est = prepared(engine="local")
    seen: dict[str, Any] = {
        "fit": est.fit(
            data, feature_cols="x", label_cols="y", columns=Columns(shapes={"y": (1,)}), verbose=0
        )["loss"],
        "evaluate": est.evaluate(data, verbose=0)["loss"],
        "predict": [float(v) for v in np.ravel(np.stack(est.predict(data, verbose=0)["prediction"]))],
    }
    data.to_parquet(f"{work}/rows.parquet")
    written = est.predict(f"{work}/rows.parquet", output_path=f"{work}/scored", verbose=0)
    seen["files"] = [float(np.ravel(v)[0]) for v in pd.read_parquet(written)["prediction"]]
    shards = XShards.partition({"x": X}, 2, engine="local").transform_shard(helper.ten_times_in_shard)
    seen["shards"] = [float(v) for shard in shards.collect() for v in shard["x"].sum(1)]
    store = Store(f"{work}/store")
    store.scripts.put(helper.total, "total")
    store.models.put(helper.Sum(), "sum", trusted=True)
    trusting = store.runtime.options(trusted=True)
    seen["script"] = trusting.script("total").run([1, 2]).get(120)
    seen["model"] = [float(v) for v in np.ravel(trusting.model("sum").predict(X * 10).get(120))]
    store.close()
    return seen


def main(master: str, work: str, doors: str = "all") -> None:
    spark = kindler.init(master, conf={"spark.cores.max": "2"})
    data = [(X[i].tolist(), TENS[i]) for i in range(len(X))]
    frame = spark.createDataFrame(data, "x array<float>, y float").repartition(2)
    seen = {"spark": scored_by_spark(spark, frame)}
    if doors == "all":
        seen["spark"] |= trained_by_spark(frame, work)
    if master.startswith("local"):
        seen["local"] = on_this_machine(work)
    print(json.dumps(seen))  # noqa: T201
    kindler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
