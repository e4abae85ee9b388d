"""`bigdl.dataset.mnist`, MNIST from its four files without a download, and `bigdl.dataset.transformer`."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np

from kindler.errors import ConfigError, DataError

__all__ = ["TEST_MEAN", "TEST_STD", "TRAIN_MEAN", "TRAIN_STD", "load_data", "normalizer", "read_data_sets"]

TRAIN_MEAN, TRAIN_STD = 0.13066047740239506 * 255, 0.3081078 * 255
TEST_MEAN, TEST_STD = 0.13251460696903547 * 255, 0.31048024 * 255

_PARTS = {"train": "train", "test": "t10k"}
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"

Array = np.ndarray[Any, np.dtype[np.uint8]]


def read_data_sets(train_dir: str, data_type: str = "train") -> tuple[Array, Array]:
    """Images of the shape (rows, 28, 28, 1) and labels from 0 to 9, as bytes.

    Args:
        train_dir: The folder with MNIST's files, packed (`.gz`) or not.
        data_type: "train" or "test".
    """
    if data_type not in _PARTS:
        raise ConfigError(f"data_type={data_type!r}: must be 'train' or 'test'.")
    part, folder = _PARTS[data_type], Path(train_dir)
    return _array(folder, f"{part}-{_IMAGES}")[..., None], _array(folder, f"{part}-{_LABELS}")


def load_data(location: str = "/tmp/.bigdl/dataset/mnist") -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Images and labels to train on, then those to test with."""
    return read_data_sets(location, "train"), read_data_sets(location, "test")


def normalizer(data: Any, mean: float, std: float) -> Any:
    """`data` less its mean, divided by its standard deviation."""
    return (data - mean) / std


def _array(folder: Path, name: str) -> Array:
    """What a file in the IDX format holds."""
    places = [folder / name, folder / f"{name}.gz"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ConfigError(
            f"there is neither {name} nor {name}.gz in {folder}, and nothing is downloaded.\n"
            "Hint: put the four files of MNIST there."
        )
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    axes = data[3] if data[:3] == b"\0\0\x08" else 0  # 8: unsigned bytes
    shape = [int.from_bytes(data[4 * axis + 4 : 4 * axis + 8], "big") for axis in range(axes)]
    if not axes or len(data) != 4 + 4 * axes + math.prod(shape):
        raise DataError(
            f"{path} is not one of MNIST's files: its header does not match its {len(data)} bytes."
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
