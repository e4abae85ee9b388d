"""How much memory of its own does a worker need when its rows are 4 GB?

The peak of RssAnon (what cannot be dropped like page cache can) of each worker, from its start to its end,
less the peak of a worker that trains the same network on a few rows: what the framework itself takes.
One worker with all 4 GB as its spool, and two that share them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import getpid
from pathlib import Path

from _bench import WIDTH, Report, arguments, mlp, workplace, write_rows

BATCH = 2048
FEW_ROWS = 8 * BATCH
SPOOL_GB = {"full": 4.0, "small": 0.5, "quick": 0.04}
_EVERY_S = 0.02


def main() -> None:
    given = arguments(__doc__, repeats=1, small="half a gigabyte instead of four")
    size = SPOOL_GB["quick" if given.quick else "small" if given.small else "full"]
    count = int(size * 1e9 / (WIDTH * 4 + 8))
    quick = given.quick or given.small
    report = Report("memory", f"RssAnon of workers beyond the framework's own, spool {size} GB", quick=quick)
    with workplace() as folder:
        few = write_rows(folder / "few.parquet", min(FEW_ROWS, count))
        many = write_rows(folder / "many.parquet", count)
        for workers in (1, 2):
            own = peaks(few, workers)
            whole = peaks(many, workers)
            name = f"{workers} worker{'s' if workers > 1 else ''}"
            report.figure(f"{name}, few rows", [max(own) / 1e6], "MB")
            report.figure(f"{name}, {size} GB", [max(whole) / 1e6], "MB")
            beyond = (max(whole) - max(own)) / 1e9
            report.limit(f"{name}: beyond the framework's own", [beyond], "GB", at_most=1.0)
    report.finish(rows=count, spool_gb=size)


def peaks(path: Path, workers: int) -> list[int]:
    """Each worker's highest RssAnon in bytes during one epoch, reading included."""
    import torch

    from kindler import Estimator
    from kindler.config import RunSettings

    model = mlp()
    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=torch.nn.CrossEntropyLoss(),
        workers=workers,
        engine="local",
        settings=RunSettings(threads=1),
    )
    with _watched() as seen:
        estimator.fit(
            str(path), epochs=1, batch_size=BATCH, feature_cols="features", label_cols="label", verbose=0
        )
    found = sorted(seen.values(), reverse=True)[:workers]
    if len(found) < workers:
        raise RuntimeError(f"{len(found)} of {workers} workers were seen.")
    return found


@contextmanager
def _watched() -> Iterator[dict[int, int]]:
    """The peaks of this process's grandchildren, who are the workers: their parent is the fork server."""
    seen: dict[int, int] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(_EVERY_S):
            for child in _children(getpid()):
                for worker in _children(child):
                    seen[worker] = max(seen.get(worker, 0), _rss_anon(worker))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue  # the thread is over
    return found


def _rss_anon(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # the process is over
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    main()
