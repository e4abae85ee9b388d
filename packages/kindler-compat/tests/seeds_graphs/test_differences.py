"""What differs on purpose from TFPark and is shown by no other suite."""

from __future__ import annotations

import numpy as np
import pytest

from kindler.compat import tensorflow as tf
from kindler.compat.bigdl.optim.optimizer import Adam
from kindler.compat.zoo.tfpark import TFDataset, TFOptimizer
from kindler.errors import ConfigError

X = np.arange(12.0, dtype="float32").reshape(6, 2)


def test_the_memory_type_of_a_dataset_is_accepted() -> None:
    for memory_type in ("DRAM", "PMEM", "DISK_AND_DRAM"):
        dataset = TFDataset.from_ndarrays((X, X[:, 0]), batch_size=2, memory_type=memory_type)
        assert [tensor.shape.rank for tensor in dataset.tensors] == [2, 1]


def test_a_dataset_of_python_functions_is_refused_since_it_cannot_travel() -> None:
    rows = tf.data.Dataset.from_generator(lambda: iter(X), output_types=tf.float32, output_shapes=[2])
    rows = rows.map(lambda row: (row, row[0]))
    dataset = TFDataset.from_tf_data_dataset(rows, batch_size=2)
    loss = tf.reduce_mean(dataset.tensors[0] * tf.get_variable("w", [2]))
    with pytest.raises(ConfigError, match="Python"):
        TFOptimizer.from_loss(loss, Adam()).optimize()
