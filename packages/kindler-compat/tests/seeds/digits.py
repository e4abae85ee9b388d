"""Pictures of digits, 28 x 28: scikit-learn's, enlarged; with `KINDLER_TEST_WHOLE=1` those of MNIST."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import SHARED
from tests.whole import WHOLE

__all__ = ["TEST_ROWS", "TRAIN_ROWS", "digits"]

TRAIN_ROWS, TEST_ROWS = (60_000, 10_000) if WHOLE else (640, 200)


@cache
def digits(split: str = "train") -> tuple[Any, Any]:
    """Bytes of the shape (rows, 28, 28), and labels; "train" or "test"."""
    return _mnist(split) if WHOLE else _of_scikit_learn(split)


def _mnist(split: str) -> tuple[Any, Any]:
    part = {"train": "train", "test": "t10k"}[split]
    with gzip.open(SHARED / "mnist" / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(SHARED / "mnist" / f"{part}-labels-idx1-ubyte.gz") as file:
        return images, np.frombuffer(file.read(), np.uint8, offset=8)


def _of_scikit_learn(split: str) -> tuple[Any, Any]:
    # Every worker reads them: the file, since importing scikit-learn would take longer than training does.
    package = find_spec("sklearn")
    assert package is not None
    table = np.loadtxt(f"{Path(str(package.origin)).parent}/datasets/data/digits.csv.gz", delimiter=",")
    images, labels = table[:, :-1], table[:, -1]
    large = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3)))
    large = np.pad(large, ((0, 0), (2, 2), (2, 2))) * 255 / 16
    rows = slice(0, TRAIN_ROWS) if split == "train" else slice(TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS)
    return large[rows].astype(np.uint8), labels[rows].astype(np.uint8)
