"""A feed as an iterable dataset of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from kindler.cluster.feed import DataFeed


class _Batches(torch.utils.data.IterableDataset[Any]):
    def __init__(self, feed: DataFeed, batch_size: int, drop_last: bool) -> None:
        super().__init__()
        self._feed, self._batch_size, self._drop_last = feed, batch_size, drop_last

    def __iter__(self) -> Iterator[Any]:
        batches = (
            self._feed.full_batches(self._batch_size)
            if self._drop_last
            else self._feed.remaining(self._batch_size)
        )
        for batch in batches:
            yield {name: _tensor(array) for name, array in batch.items()} if self._feed.has_mapping else batch


def iterable_of(feed: DataFeed, batch_size: int, *, drop_last: bool) -> torch.utils.data.IterableDataset[Any]:
    """The rest of the feed as batches: dicts of tensors with an input mapping, else lists of rows."""
    return _Batches(feed, batch_size, drop_last)


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == object:
        return array.tolist()
    return torch.from_numpy(array if array.flags.writeable else array.copy())
