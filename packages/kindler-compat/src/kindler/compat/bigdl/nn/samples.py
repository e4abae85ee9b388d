"""Predictions and judgements of a layer for arrays, lists and RDDs of `Sample`s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from kindler.compat.bigdl.nn.conversion import to_arrays, to_tensors
from kindler.compat.bigdl.util.arrays import Sample
from kindler.errors import ConfigError

_BATCH = 256

Array = np.ndarray[Any, Any]


def predicted(model: nn.Module, x: Any, batch_size: int = -1) -> Any:
    """The outputs: of arrays as an array, of a list of samples as a list, of an RDD as an RDD."""
    if hasattr(x, "mapPartitions"):
        return _pairs_of_rdd(model, x, batch_size).map(lambda pair: pair[0])
    if isinstance(x, list | tuple) and x and isinstance(x[0], Sample):
        return [output for output, _ in _pairs(model, batch_size, x)]
    columns = [np.asarray(part) for part in (x if isinstance(x, list | tuple) else [x])]
    if not len(columns[0]):
        raise ConfigError("predict: there are no rows.")
    rows = batch_size if batch_size and batch_size > 0 else _BATCH
    starts = range(0, len(columns[0]), rows)
    parts = [_scores(model, [column[start : start + rows] for column in columns]) for start in starts]
    if isinstance(parts[0], list):
        return [np.concatenate(column) for column in zip(*parts, strict=True)]
    return np.concatenate(parts)


def predicted_classes(model: nn.Module, x: Any, batch_size: int = -1) -> Any:
    """The number of the largest output of each row, counted from 1, in the form of `predicted`."""
    scores = predicted(model, x, batch_size)
    if hasattr(scores, "map"):
        return scores.map(lambda output: int(np.argmax(output)) + 1)
    if isinstance(scores, list):
        return [int(np.argmax(output)) + 1 for output in scores]
    return scores.reshape(len(scores), -1).argmax(1) + 1


def evaluated(model: nn.Module, data: Any, batch_size: int, methods: Any) -> list[Any]:
    """What validation methods say about an RDD or a list of samples, whose labels are counted from 1."""
    from kindler.compat.bigdl.optim.validation import named_all
    from kindler.compat.bigdl.util.common import EvaluatedResult

    on_rdd = hasattr(data, "mapPartitions")
    pairs = (
        _pairs_of_rdd(model, data, batch_size).collect() if on_rdd else list(_pairs(model, batch_size, data))
    )
    if not pairs:
        raise ConfigError("evaluate: there are no samples.")
    outputs, labels = (np.stack(column) for column in zip(*pairs, strict=True))
    return [
        EvaluatedResult(m.score(outputs, labels - 1 if m.by_class else labels), len(pairs), m.tag)
        for m in named_all(methods)
    ]


def _pairs_of_rdd(model: nn.Module, rdd: Any, batch_size: int) -> Any:
    from kindler.spark.tasks import sent_task

    packed = cloudpickle.dumps(model)  # as it is now, not when Spark comes to the rows
    return rdd.mapPartitions(sent_task(partial(_pairs_of_partition, packed, batch_size)))


def _pairs_of_partition(packed: bytes, batch_size: int, samples: Iterable[Sample]) -> Iterator[Any]:
    return _pairs(cloudpickle.loads(packed), batch_size, samples)


def _pairs(model: nn.Module, batch_size: int, samples: Iterable[Sample]) -> Iterator[tuple[Array, Array]]:
    """Outputs with labels."""
    source = iter(samples)
    while batch := list(islice(source, batch_size if batch_size and batch_size > 0 else _BATCH)):
        rows = [[feature.to_ndarray() for feature in sample.features] for sample in batch]
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        for output, sample in zip(_scores(model, columns), batch, strict=True):
            yield output, sample.labels[0].to_ndarray() if sample.labels else np.zeros(1, np.float32)


def _scores(model: nn.Module, columns: Sequence[Array]) -> Any:
    mode = model.training
    try:
        model.eval()
        with torch.inference_mode():
            return to_arrays(model(*to_tensors(list(columns))))
    finally:
        model.train(mode)
