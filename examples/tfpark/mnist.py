"""Code shared by the programs of this folder: MNIST, and their arguments."""

import argparse
import gzip
import os
import struct
import sys

import numpy as np
import pyspark.cloudpickle

pyspark.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors need not find this file

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True, help="the folder of train-images-idx3-ubyte.gz and the others")
parser.add_argument("--rows", type=int, default=60_000, help="rows to train on")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=10_000, help="steps of TFEstimator")
parser.add_argument("--folder", default="/tmp/tfpark", help="where models are saved")
arguments = parser.parse_args()

BATCH_SIZE = 64
max_epoch = arguments.epochs
folder = arguments.folder
os.makedirs(folder, exist_ok=True)

_FILES = {"train": "train", "validation": "t10k", "test": "t10k"}
_opened: dict = {}


def file_list(split, rows=None):
    """The images of a split, as (folder, split, number)."""
    rows = rows or (arguments.rows if split == "train" else min(10_000, arguments.rows))
    return [(arguments.data, split, number) for number in range(rows)]


def read_image_and_label(file):
    data, split, number = file
    if split not in _opened:
        with gzip.open(f"{data}/{_FILES[split]}-images-idx3-ubyte.gz") as images:
            count, height, width = struct.unpack(">4xIII", images.read(16))
            pixels = np.frombuffer(images.read(), np.uint8).reshape(count, height, width, 1)
        with gzip.open(f"{data}/{_FILES[split]}-labels-idx1-ubyte.gz") as labels:
            _opened[split] = pixels, np.frombuffer(labels.read()[8:], np.uint8)
    images, labels = _opened[split]
    return images[number], labels[number]


def decode_to_ndarrays(image_label):
    image, label = image_label
    return [image.astype(np.float32) / 255, np.array(label, np.int32)]


def get_data_rdd(split, sc):
    rdd = sc.parallelize(file_list(split), 4)
    rdd = rdd.map(lambda x: decode_to_ndarrays(read_image_and_label(x)))
    return rdd.map(lambda image_label: image_label[0]) if split == "test" else rdd


def test_arrays():
    """The rows of the test split, in this process."""
    rows = [decode_to_ndarrays(read_image_and_label(x)) for x in file_list("test")]
    return np.stack([image for image, _ in rows]), np.stack([label for _, label in rows])
