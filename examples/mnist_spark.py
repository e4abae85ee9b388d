"""MNIST from its own files, through a Spark DataFrame, to a classifier with at least 97.5% accuracy.

    python examples/mnist_spark.py --data folder/with/idx/files

The folder contains the four files of the dataset, gzipped or not: train-images-idx3-ubyte and so on. In
Spark, images remain bytes: a binary column. `dtypes` defines how to read it.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import nn

import kindler


def read_idx(folder, name):
    """An idx file as an array of bytes: its header names the size of each dimension."""
    plain, packed = Path(folder) / name, Path(folder) / f"{name}.gz"
    data = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    sizes = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def mnist_frame(spark, folder, part, rows=None):
    images = read_idx(folder, f"{part}-images-idx3-ubyte")[:rows]
    labels = read_idx(folder, f"{part}-labels-idx1-ubyte")[:rows]
    table = pa.table(
        {
            "image": pa.array([image.tobytes() for image in images], pa.binary()),
            "label": pa.array(labels, pa.int32()),
        }
    )
    return spark.createDataFrame(table)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, image):
        return self.layers(image.float() / 255)  # bytes arrive as uint8


def main(data, epochs=5, rows=None, master=None):
    """Train on `rows` images (None: all 60,000); returns the accuracy on as many test images."""
    spark = kindler.init(master, cores=None if master else 2)
    train, test = mnist_frame(spark, data, "train", rows), mnist_frame(spark, data, "t10k", rows)
    model = Mlp()
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        workers=2,
    )
    columns = {
        "feature_cols": "image",
        "label_cols": "label",
        "columns": kindler.Columns(dtypes={"image": "uint8"}),
    }
    estimator.fit(train, epochs=epochs, batch_size=256, **columns)
    accuracy = estimator.evaluate(test, **columns)["accuracy"]
    print(f"test accuracy: {accuracy:.4f}")
    kindler.stop()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="the folder with the four idx files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, help="use only the first rows of each part")
    parser.add_argument("--master", help="a Spark master; default: two cores of this machine")
    options = parser.parse_args()
    main(options.data, options.epochs, options.rows, options.master)
