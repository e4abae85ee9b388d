"""CIFAR-10 as PNGs in a Spark DataFrame: decoded and augmented in the workers while they train.

    python examples/png_images.py --data folder/with/data_batch_1.bin

The folder contains the binary version of the dataset: data_batch_1.bin and so on, and test_batch.bin.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import nn

import kindler
from kindler import Prepare
from kindler.data import images

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def cifar_frame(spark, folder, part, rows=None):
    """A DataFrame of `png` (bytes) and `label`. A record is a label and 3,072 bytes, red values first."""
    files = sorted(Path(folder).glob(f"{part}*.bin"))
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])[:rows]
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    table = pa.table(
        {
            "png": pa.array([png(np.ascontiguousarray(image)) for image in pixels], pa.binary()),
            "label": pa.array(records[:, 0], pa.int32()),
        }
    )
    return spark.createDataFrame(table)


def network():
    def block(channels_in, channels_out):
        return nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)

    layers = [*block(3, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers)


def main(data, epochs=10, rows=None, master=None):
    """Train on `rows` images (None: all that are there); returns the accuracy on as many test images."""
    spark = kindler.init(master, cores=None if master else 2)
    train, test = cifar_frame(spark, data, "data_batch", rows), cifar_frame(spark, data, "test_batch", rows)
    torch.manual_seed(0)
    model = network()
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        workers=2,
        # Training images are randomly cropped and flipped; evaluation and prediction use them unchanged.
        prepare=Prepare(
            transform=images.from_bytes(
                "png", crop=32, padding=4, flip=True, mean=MEAN, std=STD, channels="first"
            )
        ),
    )
    estimator.fit(train, epochs=epochs, batch_size=64, feature_cols="png", label_cols="label")
    accuracy = estimator.evaluate(test)["accuracy"]
    print(f"test accuracy: {accuracy:.4f}")
    scored = estimator.predict(test.drop("label").limit(5))
    print(f"scored: {scored.columns}, {scored.count()} rows")
    kindler.stop()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="the folder with the .bin files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rows", type=int, help="use only the first rows of each part")
    parser.add_argument("--master", help="a Spark master; default: two cores of this machine")
    options = parser.parse_args()
    main(options.data, options.epochs, options.rows, options.master)
