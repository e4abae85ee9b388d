"""One spool of all rows on each host: its workers write it together, each a part, and all map the whole.

Which of the rows are a worker's own is decided by `dealing`; reading them is shared out evenly.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kindler.data.columns import Column
from kindler.data.parquet import share
from kindler.data.spool import Spool, SpoolWriter, agreed


class Member(Protocol):
    """What a source needs of the worker that opens it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def hosts(self) -> Sequence[str]:
        """The machine of every rank."""

    @property
    def scratch(self) -> Path: ...

    def all_gather(self, data: bytes) -> list[bytes]: ...


def fresh_folder(scratch: Path) -> Path:
    """A new folder for a spool."""
    scratch.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="spool-", dir=scratch))


def shared_spool(
    worker: Member, columns: Sequence[Column], rows: int, write: Callable[[SpoolWriter, int, int], None]
) -> Spool:
    """All rows, read once per host; all workers call it together.

    Args:
        worker: This worker.
        columns: What is kept of each row.
        rows: How many rows there are.
        write: Called with a writer and a range of rows, which it appends.
    """
    folder, place, count = _meet(worker)
    start, stop = share(rows, count, place)
    with SpoolWriter(folder, columns, rows=stop - start, first=start) as writer:
        write(writer, start, stop)
        if count == 1 and worker.size == 1:
            return writer.close()
        if writer.ragged:
            writer.join(_values_before(worker, folder, writer.values()))
        writer.flush()
        layouts = worker.all_gather(json.dumps(writer.layout()).encode())
        return writer.whole(rows, agreed([json.loads(layout) for layout in layouts]))


def _values_before(worker: Member, folder: Path, mine: list[int]) -> list[int]:
    """How many values of each ragged column those have written into this folder whose rows come earlier."""
    told = [json.loads(part) for part in worker.all_gather(json.dumps([str(folder), mine]).encode())]
    earlier = [counts for where, counts in told[: worker.rank] if where == str(folder)]
    return [sum(counts[i] for counts in earlier) for i in range(len(mine))]


def _meet(worker: Member) -> tuple[Path, int, int]:
    """The folder of this worker's spool, its place among those who write there, and how many they are."""
    mine = fresh_folder(worker.scratch)
    # A worker that takes the place of a dead one finds no folder of its neighbours, who may be elsewhere.
    if len(set(worker.hosts)) == worker.size or getattr(worker, "replaceable", False):
        return mine, 0, 1
    here = [rank for rank, host in enumerate(worker.hosts) if host == worker.hosts[worker.rank]]
    folder = Path(worker.all_gather(str(mine).encode())[here[0]].decode())
    # Containers may have the name of a host in common, and no folder.
    seen = worker.all_gather(b"1" if _visible(folder) else b"")
    if all(seen[rank] for rank in here):
        return folder, here.index(worker.rank), len(here)
    return mine, 0, 1


def _visible(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK)
