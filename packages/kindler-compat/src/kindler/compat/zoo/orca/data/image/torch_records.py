"""Records as a dataset of torch; apart, so that torch is imported where it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class TorchRecords(IterableDataset[Any]):
    """Records, of which each worker of a DataLoader reads every n-th."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return iter(self.records)
        return islice(iter(self.records), worker.id, None, worker.num_workers)
