"""A feed as a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from kindler.errors import ConfigError

if TYPE_CHECKING:
    from kindler.cluster.feed import DataFeed


def dataset_of(feed: DataFeed, batch_size: int, *, drop_last: bool) -> tf.data.Dataset:
    """The rest of the feed as batches: dicts of tensors.

    The first batch is read here, because a dataset must know shapes and dtypes.
    """
    if not feed.has_mapping:
        raise ConfigError(
            "as_tf_dataset needs to know which columns become tensors.\n"
            'Hint: ctx.data_feed(input_mapping={"pixels": "x", "digit": "y"}).'
        )
    batches = feed.full_batches(batch_size) if drop_last else feed.remaining(batch_size)
    first = next(batches, None)
    if first is None:
        return tf.data.Dataset.from_tensors({"": np.empty(0)}).take(0)
    rows = batch_size if drop_last else None
    signature = {
        name: tf.TensorSpec((rows, *array.shape[1:]), tf.string if array.dtype == object else array.dtype)
        for name, array in first.items()
    }
    left = [chain([first], batches)]

    def generate() -> Iterator[Any]:
        # An iteration that is begun anew goes on where the last one was: rows come once.
        yield from left[0]

    return tf.data.Dataset.from_generator(generate, output_signature=signature).prefetch(2)
