"""Score a Parquet file of which some rows are broken, stop at too many, and continue after a crash."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import kindler
from kindler.errors import RowErrorsWarning, RowsFailedError


class Sensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        off = (x == -999).any(dim=1)
        if off.any():
            error = ValueError("the sensor was off")
            error.positions = off.nonzero().flatten().tolist()  # optional: spares the search for these rows
            raise error
        return self.layer(x)[:, 0]


def write_broken(path: Path, rows: int = 20_000) -> None:
    values = np.random.default_rng(0).normal(size=(rows, 8)).tolist()
    for number, row in enumerate(range(50, rows - 250, 100)):
        values[row] = [None, [0.5], [-999.0] * 8][number % 3]
    pq.write_table(pa.table({"id": range(rows), "features": values}), path)


def main(folder: str) -> dict[str, object]:
    source, target = Path(folder, "readings.parquet"), Path(folder, "scored")
    write_broken(source)
    torch.manual_seed(0)
    estimator = kindler.Estimator.from_torch(model=Sensors(), workers=2)

    def score(max_errors: int) -> pa.Table:
        estimator.predict(
            source,
            feature_cols="features",
            output_cols="risk",
            output_path=target,
            on_error="column",
            max_errors=max_errors,
            verbose=0,
        )
        return pq.read_table(target)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RowErrorsWarning)
        scored = score(max_errors=500)
        print(f"{len(scored)} rows, {len(scored) - scored['risk'].null_count} scored")
        for text, times in Counter(scored["risk_error"].drop_null().to_pylist()).items():
            print(text, times)

        stopped = False
        try:
            score(max_errors=100)
        except RowsFailedError as error:
            stopped = True
            print("stopped:", str(error).splitlines()[0])

        (target / "part-00007.parquet").unlink()  # as if the machine had gone away before it was written
        again = score(max_errors=500)
    parts = len(list(target.glob("part-*.parquet")))
    print(f"after a crash: 1 of {parts} parts was computed again, equal: {again == scored}")
    return {"failed": scored["risk"].null_count, "stopped": stopped, "equal": again == scored}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
