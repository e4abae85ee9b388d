"""The core facts on whatever pyspark is first on the path; prints what was seen as JSON.

`python versions.py FOLDER [ADDRESS]` runs on this machine, or through the Spark Connect server at ADDRESS;
"connect" there starts a server of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pandas as pd
import pyspark
import torch
from pyspark.sql import functions as F
from torch import nn

import kindler
from kindler import Columns, Estimator
from kindler.errors import ConfigError, DataError

ROWS = 500


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such thing")


class Picky(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x != x[0]).any()):  # which it is not asked on the driver
            raise KeyError("too many kinds of rows")
        return super().forward(x)


def linear(kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    model = kind(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def estimator(model: nn.Linear, workers: int = 2) -> Estimator:
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=workers)


def weights(model: nn.Linear) -> list[float]:
    found: list[float] = [*model.weight[0].tolist(), model.bias.item()]
    return found


def one_process(x: Any, y: Any, steps: int) -> list[float]:
    """The weights after steps on all rows, without Kindler."""
    model = linear()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        sgd.zero_grad()
        nn.functional.mse_loss(model(torch.tensor(x)), torch.tensor(y)[:, None]).backward()
        sgd.step()
    return weights(model)


def error_of(call: Any, *kinds: type[Exception]) -> str:
    try:
        call()
    except kinds as exc:
        return str(exc)
    return ""


def session(address: str | None) -> Any:
    if address == "connect":
        return kindler.init(cores=2, conf={"spark.api.mode": "connect"})
    return kindler.init(cores=2) if address is None else kindler.init(address)


def main(folder: str, address: str | None = None) -> None:
    no_server = pyspark.__version__ < "4"
    refused = error_of(lambda: session("connect"), ConfigError) if no_server else ""
    spark = session(address)
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    y = x.sum(1)
    rows = pd.DataFrame({"id": np.arange(ROWS), "features": list(x), "label": y, "word": ["w"] * ROWS})
    frame = spark.createDataFrame(rows).repartitionByRange(3, "id").sortWithinPartitions("id")
    frame.write.parquet(f"{folder}/frame")
    scan = spark.read.parquet(f"{folder}/frame")

    model = linear()
    est = estimator(model)
    inline = est.fit(frame, epochs=5, batch_size=ROWS, columns=Columns(shapes={"label": (1,)}), verbose=0)
    trained = weights(est.get_model())
    again = estimator(linear())
    direct = again.fit(
        scan, epochs=5, batch_size=ROWS, columns=Columns(shapes={"label": (1,)}, ingest="direct"), verbose=0
    )
    scored = est.predict(frame).collect()
    expected = est.get_model()(torch.tensor(x)).detach().numpy()[:, 0]
    holes = frame.withColumn("label", F.when(F.col("id") != 7, F.col("label")))
    seen = {
        "version": pyspark.__version__,
        "connect": type(spark).__module__.startswith("pyspark.sql.connect"),
        "refused": refused,
        "server": spark.version,
        "rows": [*inline["num_samples"], *direct["num_samples"]],
        "weights": trained,
        "from_files": weights(again.get_model()),
        "one_process": one_process(x, y, 5),
        "in_order": [row.id for row in scored] == list(range(ROWS)),
        "words": {row.word for row in scored} == {"w"},
        "off_by": float(np.abs(np.array([row.prediction[0] for row in scored]) - expected).max()),
        "failing": error_of(lambda: estimator(linear(Failing)).fit(frame, verbose=0), KeyError),
        "hole": error_of(lambda: estimator(linear()).fit(holes, verbose=0), DataError),
        "too many": error_of(lambda: estimator(linear(), 5).fit(frame, verbose=0), ConfigError),
        "direct": error_of(lambda: est.predict(scan, columns=Columns(ingest="direct")), ConfigError),
        "picky": error_of(lambda: estimator(linear(Picky)).predict(frame).collect(), Exception),
        "computed": error_of(
            lambda: est.fit(
                frame.withColumn("label", F.expr("assert_true(id < 9)").cast("float")), verbose=0
            ),
            DataError,
        ),
    }
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
