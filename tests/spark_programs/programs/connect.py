"""Fit and predict through Spark Connect; prints what was seen as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

import kindler
from kindler import Estimator, RunSettings

ROWS = 10_000


def fitted(frame: Any, **options: Any) -> list[float]:
    """The weights after two epochs of the whole frame as one batch: the order of rows plays no part."""
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    est = Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=2, **options)
    est.fit(frame, epochs=2, batch_size=ROWS, verbose=0)
    return [p.item() for p in est.get_model().weight[0]]


def error_of(frame: Any, **options: Any) -> list[Any]:
    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("no such thing")

    model = Bad(3, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    est = Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=2, **options)
    try:
        est.fit(frame, verbose=0)
    except KeyError as exc:
        return [str(exc).splitlines()[0], exc.rank in (0, 1)]  # type: ignore[attr-defined]
    return []


def main(folder: str) -> None:
    spark = kindler.init(cores=2, conf={"spark.api.mode": "connect"})
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3)).astype(np.float32)
    table = pa.table({"id": np.arange(ROWS), "features": list(x), "label": x.sum(1)})
    frame = spark.createDataFrame(table).repartitionByRange(7, "id")
    scored = Estimator.from_torch(model=nn.Identity()).predict(frame, feature_cols="features").collect()
    broken = frame.selectExpr("id", "if(id % 100 = 7, null, features) AS features")
    failed = Estimator.from_torch(model=nn.Identity()).predict(
        broken, feature_cols="features", on_error="column"
    )
    frame.write.parquet(os.path.join(folder, "frame"))
    scan = spark.read.parquet(os.path.join(folder, "frame")).select("features", "label")
    seen = {
        "rows": len(scored),
        "same": all(row.prediction == row.features for row in scored),
        "in_order": [row.id for row in scored] == [row.id for row in frame.select("id").collect()],
        "failed": sorted(
            {(row.id % 100, row.prediction is None, row.prediction_error) for row in failed.collect()}
            - {(i, False, None) for i in range(100)}
        ),
        "at_driver": fitted(frame, settings=RunSettings(rendezvous="driver")),
        "among_workers": fitted(frame, settings=RunSettings(rendezvous="workers")),
        "from_files": fitted(scan),
        "error_at_driver": error_of(frame),
        "error_among_workers": error_of(frame, settings=RunSettings(rendezvous="workers")),
    }
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
