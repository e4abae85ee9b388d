"""Predictions and judgements of a layer for arrays, lists and RDDs of `Sample`s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from kindler.compat.bigdl.nn.conversion import to_arrays, to_tensors
from kindler.compat.bigdl.util.arrays import Sample
from kindler.compat.bigdl.util.common import EvaluatedResult
from kindler.errors import ConfigError

_BATCH = 256

Array = np.ndarray[Any, Any]


def predicted(model: nn.Module, x: Any, batch_size: int = -1) -> Any:
    """The outputs: of arrays as an array, of a list of samples as a list, of an RDD as an RDD."""
    scorer = _Scorer(model, batch_size)
    if hasattr(x, "mapPartitions"):
        from kindler.spark.tasks import sent_task

        return x.mapPartitions(sent_task(_Outputs(scorer.packed())))
    if isinstance(x, list | tuple) and x and isinstance(x[0], Sample):
        return [output for output, _ in scorer.pairs(x)]
    return scorer.arrays(x)


def predicted_classes(model: nn.Module, x: Any, batch_size: int = -1) -> Any:
    """The number of the largest output of each row, counted from 1, in the form of `predicted`."""
    scores = predicted(model, x, batch_size)
    if hasattr(scores, "map"):
        return scores.map(lambda output: int(np.argmax(output)) + 1)
    if isinstance(scores, list):
        return [int(np.argmax(output)) + 1 for output in scores]
    return scores.reshape(len(scores), -1).argmax(1) + 1


def evaluated(model: nn.Module, data: Any, batch_size: int, methods: Any) -> list[EvaluatedResult]:
    """What validation methods say about an RDD or a list of samples, whose labels are counted from 1."""
    from kindler.compat.bigdl.optim.validation import named_all

    scorer = _Scorer(model, batch_size)
    if hasattr(data, "mapPartitions"):
        from kindler.spark.tasks import sent_task

        pairs = data.mapPartitions(sent_task(_Pairs(scorer.packed()))).collect()
    else:
        pairs = list(scorer.pairs(data))
    if not pairs:
        raise ConfigError("evaluate: there are no samples.")
    outputs = np.stack([output for output, _ in pairs])
    labels = np.stack([label for _, label in pairs])
    results = []
    for method in named_all(methods):
        found = method.score(outputs, labels - 1 if method.by_class else labels)
        results.append(EvaluatedResult(found, len(pairs), method.tag))
    return results


class _Scorer:
    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self._model = model
        self._rows = batch_size if batch_size and batch_size > 0 else _BATCH

    def packed(self) -> bytes:
        packed: bytes = cloudpickle.dumps((self._model, self._rows))
        return packed

    def arrays(self, x: Any) -> Any:
        several = [np.asarray(part) for part in (x if isinstance(x, list | tuple) else [x])]
        count = len(several[0])
        if not count:
            raise ConfigError("predict: there are no rows.")
        parts = [
            self.scores([part[start : start + self._rows] for part in several])
            for start in range(0, count, self._rows)
        ]
        if isinstance(parts[0], list):
            return [np.concatenate(column) for column in zip(*parts, strict=True)]
        return np.concatenate(parts)

    def pairs(self, samples: Iterable[Sample]) -> Iterator[tuple[Array, Array]]:
        source = iter(samples)
        while batch := list(islice(source, self._rows)):
            columns = [
                np.stack([sample.features[place].to_ndarray() for sample in batch])
                for place in range(len(batch[0].features))
            ]
            for output, sample in zip(self.scores(columns), batch, strict=True):
                yield output, sample.labels[0].to_ndarray() if sample.labels else np.zeros(1, np.float32)

    def scores(self, columns: Sequence[Array]) -> Any:
        mode = self._model.training
        try:
            self._model.eval()
            with torch.inference_mode():
                return to_arrays(self._model(*to_tensors(list(columns))))
        finally:
            self._model.train(mode)


class _Outputs:
    """Scores a partition on an executor."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def pairs(self, samples: Iterable[Sample]) -> Iterator[tuple[Array, Array]]:
        return _Scorer(*cloudpickle.loads(self.packed)).pairs(samples)

    def __call__(self, samples: Iterable[Sample]) -> Iterator[Any]:
        return (output for output, _ in self.pairs(samples))


class _Pairs(_Outputs):
    def __call__(self, samples: Iterable[Sample]) -> Iterator[Any]:
        return self.pairs(samples)
