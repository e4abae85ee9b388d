"""Reads the stage that `main.py` wrote: `python read.py WORK_FOLDER` prints its predictions."""

from __future__ import annotations

import json
import sys

from main import TENS, X, numbers

import kindler
from kindler.ml import KindlerModel, trusting


def main(work: str) -> None:
    spark = kindler.init("local[2]")
    frame = spark.createDataFrame([(X[i].tolist(), TENS[i]) for i in range(8)], "x array<float>, y float")
    with trusting():
        stage = KindlerModel.load(f"{work}/stage")
    print(json.dumps(numbers(stage.transform(frame))))  # noqa: T201
    kindler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
