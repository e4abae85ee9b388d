"""TFRecord files as an RDD of their records."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from typing import Any

from kindler.data.tfrecord.framing import blocks
from kindler.errors import ConfigError


def record_rdd(sc: Any, path: str) -> Any:
    """The records of all files, as bytes."""
    files = _files(path)
    if not hasattr(sc, "parallelize"):
        raise ConfigError(
            f"from_tfrecord_file takes a SparkContext first; received {type(sc).__qualname__}.\n"
            "Hint: with Spark Connect, kindler.read_tfrecord reads such files as XShards."
        )
    return sc.parallelize(files, len(files)).flatMap(records)


def records(path: str) -> Iterator[bytes]:
    """The records of a file."""
    with open(path, "rb") as file:
        for block in blocks(file, path):
            for start, length in zip(block.starts.tolist(), block.sizes.tolist(), strict=True):
                yield bytes(block.data[start : start + length])


def _files(path: str) -> list[str]:
    name = os.fspath(path).removeprefix("file://")
    if os.path.isdir(name):
        found = [os.path.join(name, one) for one in os.listdir(name) if not one.startswith((".", "_"))]
    else:
        found = glob.glob(name)
    if not found:
        raise ConfigError(f"from_tfrecord_file: there are no files at {path}.")
    return sorted(os.path.abspath(one) for one in found)
