"""From a folder of images to a server that answers with the class of a PNG.

    python examples/howto/image_folder.py

The folder has a subfolder for each class: `images/seven/0042.png`. This program first writes it,
from scikit-learn's digits.
"""

import base64
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import kindler
from kindler import Prepare
from kindler.data import images

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_folder(folder):
    """You already have images; this writes some for the example."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / NAMES[label] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).save(path)


def table_of(folder):
    """A row per file, in a random order: its bytes, undecoded, and the number of its class."""
    files = sorted(folder.glob("*/*.png"))
    classes = sorted({file.parent.name for file in files})
    order = np.random.default_rng(0).permutation(len(files))
    table = pa.table(
        {
            "image": pa.array([files[i].read_bytes() for i in order], pa.binary()),
            "label": [classes.index(files[i].parent.name) for i in order],
        }
    )
    return table, classes


def network(classes):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, classes),
    )


@contextmanager
def serving(store):
    """`kindler serve --store STORE --trusted`, on a free port; its URL."""
    command = [
        sys.executable,
        "-m",
        "kindler",
        "serve",
        "--store",
        str(store),
        "--port",
        "0",
        "--trusted",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait()


def main(folder):
    write_folder(folder / "images")
    table, classes = table_of(folder / "images")
    train, test = table.slice(0, 1400), table.slice(1400)

    torch.manual_seed(0)
    model = network(len(classes))
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        # Decoded in the workers during training: grey, 16 x 16, shifted by up to a pixel, scaled to -1 .. 1.
        prepare=Prepare(
            transform=images.from_bytes(
                "image", mode="L", size=16, crop=16, padding=1, mean=0.5, std=0.5, channels="first"
            )
        ),
        workers=2,
    )
    estimator.fit(train, epochs=6, batch_size=64, feature_cols="image", label_cols="label", verbose=0)
    print(f"test accuracy: {estimator.evaluate(test, verbose=0)['accuracy']:.3f}")

    store = kindler.Store(folder / "store")
    version = store.models.put(estimator, "digits", tag="prod", attributes={"classes": classes})
    store.close()
    print(f"stored: {version}")

    with serving(folder / "store") as url:  # trusted: the transform is code
        png = (folder / "images" / "seven" / "0007.png").read_bytes()
        body = {"instances": [{"image": {"b64": base64.b64encode(png).decode()}}]}
        reply = httpx.post(f"{url}/v1/models/digits/labels/prod:predict", json=body, timeout=120).json()
    print(f"the server says: {classes[int(np.argmax(reply['predictions'][0]))]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
