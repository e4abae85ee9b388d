"""A small fit and predict on whatever pyspark is first on the path; prints what was seen as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow as pa
import pyspark
import torch
from torch import nn

import kindler
from kindler import Estimator


def main(folder: str) -> None:
    spark = kindler.init(cores=2)
    x = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    table = pa.table({"id": np.arange(500), "features": list(x), "label": x.sum(1), "word": ["w"] * 500})
    frame = spark.createDataFrame(table)
    frame.write.parquet(f"{folder}/frame")
    model = nn.Linear(3, 1)
    est = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=nn.MSELoss(), workers=2
    )
    inline = est.fit(frame, epochs=5, batch_size=50, verbose=0)
    direct = est.fit(
        spark.read.parquet(f"{folder}/frame"), epochs=5, batch_size=50, ingest="direct", verbose=0
    )
    scored = est.predict(frame).collect()
    expected = est.predict(x)[:, 0]
    seen = {
        "version": pyspark.__version__,
        "rows": [*inline["num_samples"], *direct["num_samples"]],
        "loss": direct["loss"][-1],
        "in_order": [row.id for row in scored] == list(range(500)),
        "words": {row.word for row in scored} == {"w"},
        "off_by": float(np.abs(np.array([row.prediction[0] for row in scored]) - expected).max()),
    }
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
