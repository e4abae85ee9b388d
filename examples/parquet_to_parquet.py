"""Train on Parquet files and score them into Parquet files, without Spark.

The workers read a path themselves, each its own range of rows. `predict` with an `output_path` writes a
dataset with all columns and the row order of the input, and adds the prediction.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn, optim

import kindler
from kindler import Columns


def write_houses(path, rows, seed):
    """Synthetic houses: a price computed from size, rooms and age."""
    draw = np.random.default_rng(seed)
    size, rooms, age = draw.uniform(0.3, 2.5, rows), draw.integers(1, 8, rows), draw.uniform(0, 1, rows)
    price = 3 * size + 0.4 * rooms - 1.5 * age + draw.normal(0, 0.05, rows)
    pq.write_table(
        pa.table({"id": range(rows), "size": size, "rooms": rooms, "age": age, "price": price}), path
    )


def main(folder, rows=4000, epochs=20):
    folder = Path(folder)
    write_houses(folder / "houses.parquet", rows, seed=1)
    write_houses(folder / "new.parquet", rows // 4, seed=2)

    # --8<-- [start:paths]
    estimator = kindler.Estimator.from_torch(
        model=lambda: nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)),
        optimizer=lambda model: optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.MSELoss(),
        metrics=["mae"],
        workers=2,
    )
    # Three columns, combined into one matrix for the model's single input.
    estimator.fit(
        folder / "houses.parquet",
        epochs=epochs,
        batch_size=128,
        feature_cols=["size", "rooms", "age"],
        label_cols="price",
        columns=Columns(stack_features=True),
    )
    written = estimator.predict(folder / "new.parquet", output_cols="estimate", output_path=folder / "scored")
    # --8<-- [end:paths]

    table = pq.read_table(written)
    print(table.slice(0, 3).to_pandas())
    error = np.abs(table["estimate"].to_numpy() - table["price"].to_numpy()).mean()
    print(f"mean absolute error on new houses: {error:.3f}")
    return error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch, epochs=options.epochs)
