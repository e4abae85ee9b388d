"""MNIST on Spark: `python mnist.py MASTER MNIST_FOLDER WORK_FOLDER small|whole` prints the accuracy.

Small is a fifth of the rows, in two epochs.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import kindler
from kindler import Columns
from tests.spark_programs.cluster import ONE_GPU_A_TASK


def read(folder: Path, part: str, share: int) -> pa.Table:
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)[::share]
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[::share]
    scaled = (images.astype(np.float32) / 255 - 0.1307) / 0.3081  # the mean and deviation of MNIST's pixels
    pixels = pa.array(scaled.astype(np.float32).reshape(-1))
    lists = pa.FixedSizeListArray.from_arrays(pixels, 784).cast(pa.list_(pa.float32()))
    return pa.table({"image": lists, "label": labels.astype(np.int64)})


def main(master: str, mnist: str, work: str, size: str) -> None:
    share, epochs = (1, 5) if size == "whole" else (5, 2)
    for part in ("train", "t10k"):
        pq.write_table(read(Path(mnist), part, share), Path(work) / f"{part}.parquet", row_group_size=6000)
    spark = kindler.init(master, conf=ONE_GPU_A_TASK if master.startswith("spark://") else None)
    train, test = (spark.read.parquet(f"{work}/{part}.parquet") for part in ("train", "t10k"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    est = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        workers=2,
    )
    columns = {"feature_cols": ["image"], "label_cols": ["label"]}
    # Through Spark on one machine, from the files on the cluster: both ways in are taken.
    ingest = "inline" if master.startswith("local") else "direct"
    history = est.fit(
        train, epochs=epochs, batch_size=256, verbose=0, columns=Columns(ingest=ingest), **columns
    )
    assert history["num_samples"] == [60_000 // share] * epochs, history
    figures = est.evaluate(test, verbose=0, **columns)
    assert figures["num_samples"] == 10_000 // share, figures
    print(figures["accuracy"])  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
