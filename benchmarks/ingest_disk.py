"""How much disk do rows take on their way from `spark.range` to the workers, compared with the data itself?

5 million rows of 20 numbers (doubles, then floats) are trained on by two workers for one epoch. Ten times a
second the files below Spark's local folder are added up: what Spark writes, and what Kindler does. Afterwards
it counts what is left there of either. The data is those numbers as the frame has them: 8 bytes, or 4.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from _bench import Report, arguments, workplace

from kindler import Columns

COLUMNS = 20
BYTES = {"double": 8, "float": 4}


class Watch(threading.Thread):
    """The most bytes that the files below a folder had."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.most = folder, 0
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.most = max(self.most, size_of(self.folder))


def size_of(folder: Path) -> int:
    """The bytes that files take on the disk."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(place, file)).st_blocks * 512
            except FileNotFoundError:
                pass  # gone since it was listed
    return total


def main() -> None:
    given = arguments(__doc__, repeats=1)
    rows = 200_000 if given.quick else 5_000_000
    report = Report("ingest_disk", f"disk for {rows:,} rows of {COLUMNS} numbers", quick=given.quick)
    with workplace() as folder:
        spark_folder = folder / "spark"
        spark_folder.mkdir()
        os.environ["SPARK_LOCAL_DIRS"] = str(spark_folder)
        for kind, width in BYTES.items():
            most, left, shuffle = _measured(rows, kind, spark_folder)
            data = rows * COLUMNS * width
            name = f"{kind}s: most on disk / data"
            report.limit(name, [most / data], "x", at_most=1.5)
            report.figure(f"{kind}s: files of Kindler's left", [float(left)], "files")
            report.figure(f"{kind}s: bytes of shuffle files left", [float(shuffle)], "bytes")
    report.finish(rows=rows, columns=COLUMNS)


def _measured(rows: int, kind: str, folder: Path) -> tuple[int, int, int]:
    from pyspark.sql import functions as F
    from torch import nn, optim

    import kindler

    spark = kindler.init(cores=2)
    names = [f"x{i}" for i in range(COLUMNS)]
    numbers = [F.rand(i).cast(kind).alias(name) for i, name in enumerate(names)]
    frame = spark.range(0, rows, 1, 8).select(*numbers, (F.col("id") % 2).cast("float").alias("y"))
    est: Any = kindler.Estimator.from_torch(
        model=lambda: nn.Linear(COLUMNS, 1),
        optimizer=lambda model: optim.SGD(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        workers=2,
    )
    with Watch(folder) as watch:
        est.fit(
            frame,
            batch_size=8192,
            feature_cols=names,
            label_cols="y",
            columns=Columns(stack_features=True, shapes={"y": (1,)}),
        )
    left = [path for found in folder.rglob("kindler-*") for path in (found, *found.rglob("*"))]
    shuffle = sum(path.stat().st_size for path in folder.rglob("shuffle_*"))
    kindler.stop()
    return watch.most, len(left), shuffle


if __name__ == "__main__":
    main()
