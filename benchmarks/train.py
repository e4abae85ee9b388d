"""How fast does training go, once it goes, against loops written by hand?

MLP 784-256-256-10, batch 256, Adam, 60,000 rows, one thread a process. Rows per second of each epoch but the
first, the median of them. The hand-written loops hold their rows in memory as tensors, take them in a new
random order each epoch, and are otherwise what torch's tutorials show: one process, and two with
DistributedDataParallel over gloo, each with its half of the rows and of the batch.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from _bench import ROWS, WIDTH, Report, arguments, mlp, rounds, workplace, write_rows

from kindler.strategies import Strategy, Zero1

BATCH = 256


def main() -> None:
    given = arguments(__doc__, repeats=5)
    count, epochs = (4_096, 2) if given.quick else (ROWS, 5)
    report = Report(
        "train", f"rows/s of training, {count:,} rows, batch {BATCH}, 1 thread each", quick=given.quick
    )
    with workplace() as folder:
        path = write_rows(folder / "rows.parquet", count)
        measured = rounds(
            {
                "torch loop": lambda: by_hand(path, epochs, processes=1),
                "kindler, 1 worker": lambda: kindler(path, epochs, workers=1),
                "DDP, 2 processes": lambda: by_hand(path, epochs, processes=2),
                "kindler, 2 workers": lambda: kindler(path, epochs, workers=2),
                "kindler, 2 workers, sharded": lambda: kindler(path, epochs, workers=2, strategy="zero1"),
                "kindler, 2 workers, one copy": lambda: kindler(
                    path, epochs, workers=2, strategy=Zero1(one_copy=True)
                ),
                "kindler, 2 hosts' worth": lambda: kindler(path, epochs, workers=2, shared_memory=False),
            },
            repeats=given.repeats,
            warm_up=not given.quick,
        )
    for name, values in measured.items():
        report.figure(name, values, "rows/s")
    one, two = measured["kindler, 1 worker"], measured["kindler, 2 workers"]
    report.ratio("1 worker / torch loop", one, measured["torch loop"], at_least=0.95)
    report.ratio("2 workers / DDP", two, measured["DDP, 2 processes"], at_least=1.3)
    report.ratio("2 workers / 1 worker", two, one, at_least=1.2)
    sharded = measured["kindler, 2 workers, sharded"]
    report.ratio("2 workers, sharded / 1 worker", sharded, one, at_least=1.2)
    one_copy = measured["kindler, 2 workers, one copy"]
    report.ratio("2 workers, sharded, one copy / 1 worker", one_copy, one, at_least=1.3)
    apart = measured["kindler, 2 hosts' worth"]
    report.ratio("no shared memory / DDP", apart, measured["DDP, 2 processes"], at_least=0.95)
    report.finish(rows=count, epochs=epochs, batch_size=BATCH)


def kindler(
    path: Path,
    epochs: int,
    *,
    workers: int,
    shared_memory: bool = True,
    strategy: str | Strategy = "allreduce",
) -> float:
    """Steady rows/s of an Estimator on the local engine."""
    import torch

    from kindler import Estimator
    from kindler.config import RunSettings

    torch.manual_seed(0)
    model = mlp()
    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=torch.nn.CrossEntropyLoss(),
        workers=workers,
        engine="local",
        settings=RunSettings(threads=1, shared_memory=shared_memory),
    )
    history = estimator.fit(
        str(path),
        epochs=epochs,
        batch_size=BATCH,
        feature_cols="features",
        label_cols="label",
        strategy=strategy,
        verbose=0,
    )
    return median(history["rows_per_s"][1:])


def by_hand(path: Path, epochs: int, *, processes: int) -> float:
    """Steady rows/s of the loop below, in fresh processes."""
    spawn = multiprocessing.get_context("spawn")
    found = spawn.Queue()
    meeting = path.with_name(f"meeting-{time.monotonic_ns()}")
    os.environ["OMP_NUM_THREADS"] = "1"
    children = [
        spawn.Process(target=_loop, args=(rank, processes, str(path), epochs, str(meeting), found))
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    per_epoch = found.get(timeout=600)
    for child in children:
        child.join(60)
    return median(per_epoch[1:])


def _loop(rank: int, size: int, path: str, epochs: int, meeting: str, found: Any) -> None:
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = _tensors(path, rank, size)
    model = mlp()
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    share = BATCH // size
    rows_per_s = []
    for _ in range(epochs):
        started = time.perf_counter()
        total = torch.zeros(())
        order = torch.randperm(len(x))
        for start in range(0, len(x), share):
            picked = order[start : start + share]
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(x[picked]), y[picked])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if size > 1:
            dist.barrier()
        rows_per_s.append(size * len(x) / (time.perf_counter() - started))
    if rank == 0:
        found.put(rows_per_s)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _tensors(path: str, rank: int, size: int) -> Any:
    """This process's rows in memory."""
    import numpy as np
    import pyarrow.parquet as pq
    import torch

    table = pq.read_table(path).combine_chunks()
    mine = slice(rank * len(table) // size, (rank + 1) * len(table) // size)
    pixels = table.column("features").chunk(0).flatten().to_numpy().reshape(-1, WIDTH)
    labels = table.column("label").to_numpy()
    return torch.from_numpy(np.array(pixels[mine])), torch.from_numpy(np.array(labels[mine]))


if __name__ == "__main__":
    main()
