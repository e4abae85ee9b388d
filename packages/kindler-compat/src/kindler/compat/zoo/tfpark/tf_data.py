"""`tf.data` datasets of single rows, batched for a run, whether they were made eagerly or in a graph."""

from __future__ import annotations

from typing import Any

from kindler.errors import ConfigError

_BATCHING = ("BatchDataset", "PaddedBatchDataset", "ParallelBatchDataset", "MapAndBatchDataset")
_REPEATING = ("RepeatDataset", "ShuffleAndRepeatDataset")


def batched(dataset: Any, rows: int) -> Any:
    """The dataset in batches of so many rows; the last one may be shorter."""
    return dataset.batch(rows)


def refuse_batched(dataset: Any) -> None:
    """Complain about a dataset that has batches already, or no end."""
    for part in _chain(dataset):
        name = type(part).__name__.strip("_")
        if name in _BATCHING:
            raise ConfigError(
                "the tf.data.Dataset is batched; TFDataset makes the batches, from batch_size or"
                " batch_per_thread.\n"
                "Hint: leave out .batch(...), or put .unbatch() behind it."
            )
        if name in _REPEATING:
            raise ConfigError(
                "the tf.data.Dataset repeats; an epoch is one pass over it.\nHint: leave out .repeat()."
            )


def _chain(dataset: Any) -> list[Any]:
    found, waiting = [], [dataset]
    while waiting:
        part = waiting.pop()
        found.append(part)
        if type(part).__name__.strip("_") == "UnbatchDataset":
            continue
        if hasattr(part, "_dataset"):
            waiting.append(part._dataset)  # datasets of TensorFlow 1 wrap those of TensorFlow 2
        else:
            waiting += list(part._inputs())
    return found
