"""How long does a whole fit of two epochs take, with Spark up, against TorchDistributor?

The same network, the same Parquet file of 60,000 rows of MNIST's shape, two workers on local[2], batch 256.
Each side runs in a Python process of its own with a new Spark session, first fit and second; the clock
runs from the call to the result, Spark and torch being loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _bench import ROWS, WIDTH, Report, arguments, mlp, seconds, spark_session, workplace, write_rows

BATCH = 256
EPOCHS = 2
FITS = ("first fit", "second fit")
AT_MOST = (0.6, 0.3)


def main() -> None:
    given = arguments(__doc__, repeats=3)
    count = 4_096 if given.quick else ROWS
    question = f"seconds of a fit of {EPOCHS} epochs with Spark up, {count:,} rows, 2 workers"
    report = Report("start", question, quick=given.quick)
    sides: dict[str, list[list[float]]] = {"kindler": [], "TorchDistributor": []}
    with workplace() as folder:
        path = write_rows(folder / "rows.parquet", count)
        for _ in range(given.repeats):
            for side, found in sides.items():
                found.append(_in_a_new_session(side, path))
    for side, found in sides.items():
        for i, name in enumerate(FITS):
            report.figure(f"{side}, {name}", [fits[i] for fits in found], "s")
    for i, name in enumerate(FITS):
        ours, theirs = ([fits[i] for fits in found] for found in sides.values())
        report.ratio(f"{name} / TorchDistributor's", ours, theirs, at_most=AT_MOST[i])
    report.finish(rows=count, epochs=EPOCHS, batch_size=BATCH)


def _in_a_new_session(side: str, path: Path) -> list[float]:
    done = subprocess.run(
        [sys.executable, __file__, "--side", side, str(path)], stdout=subprocess.PIPE, text=True, check=True
    )
    fits: list[float] = json.loads(done.stdout.splitlines()[-1])
    return fits


def measure(side: str, path: str) -> None:
    """One side, in this process: print the seconds of two fits."""
    import torch  # noqa: F401 (a program that has a model has loaded it)

    spark = spark_session(2)
    spark.read.parquet(path).count()
    fit = {"kindler": _kindler, "TorchDistributor": _torch_distributor}[side]
    print(json.dumps([seconds(lambda: fit(spark, path)) for _ in FITS]))


def _kindler(spark: Any, path: str) -> None:
    import torch

    from kindler import Estimator

    model = mlp()
    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=torch.nn.CrossEntropyLoss(),
        workers=2,
    )
    frame = spark.read.parquet(path)
    history = estimator.fit(
        frame, epochs=EPOCHS, batch_size=BATCH, feature_cols="features", label_cols="label", verbose=0
    )
    if len(history) != EPOCHS:
        raise RuntimeError(f"{len(history)} epochs came back.")


def _torch_distributor(spark: Any, path: str) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    loss = distributor.run(_train, path, BATCH, EPOCHS, WIDTH)
    if loss is None:
        raise RuntimeError("no loss came back.")


def _train(path: str, batch_size: int, epochs: int, width: int) -> float:
    """What a user of TorchDistributor writes: its share of the file, DDP, a loop."""
    import os

    import numpy as np
    import pyarrow.parquet as pq
    import torch
    from _bench import mlp
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    table = pq.read_table(path, columns=["features", "label"]).combine_chunks()
    mine = slice(rank * len(table) // size, (rank + 1) * len(table) // size)
    pixels = table.column("features").chunk(0).flatten().to_numpy().reshape(-1, width)
    x = torch.from_numpy(np.array(pixels[mine]))
    y = torch.from_numpy(np.array(table.column("label").to_numpy()[mine]))
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    loss = torch.zeros(())
    for _ in range(epochs):
        order = torch.randperm(len(x))
        for start in range(0, len(x), batch_size // size):
            picked = order[start : start + batch_size // size]
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(x[picked]), y[picked])
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
    return float(loss.detach())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        measure(sys.argv[2], sys.argv[3])
    else:
        main()
