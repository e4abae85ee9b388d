"""How much memory do 2 GB of rows take on their way through XShards into a model that trains?

The peak of the sum of anonymous memory (what cannot be dropped like page cache can) of the driver, its
workers and Spark's Python workers, from the making of the shards to the end of an epoch, over the rows' size.
Frameworks and interpreters are counted, the JVM is not, and pages that processes share are counted once. Each
way is a driver process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import Report, arguments, spark_session, workplace

from kindler import Columns

COLUMNS = 64
FILES = 16
BATCH = 8192
SIZE_GB = {"full": 2.0, "small": 0.5, "quick": 0.02}
_EVERY_S = 0.1


def main() -> None:
    given = arguments(__doc__, repeats=1, small="half a gigabyte instead of two")
    size = SIZE_GB["quick" if given.quick else "small" if given.small else "full"]
    count = int(size * 1e9 / (COLUMNS + 1) / 8)
    quick = given.quick or given.small
    report = Report("shards_memory", f"anonymous memory of {size} GB of rows through XShards", quick=quick)
    with workplace() as folder:
        write(folder / "rows", count)
        for name in WAYS:
            peak = in_own_process(name, folder / "rows")
            report.figure(name, [peak / 1e6], "MB")
            report.limit(f"{name}, over the rows' size", [peak / (size * 1e9)], "x", at_most=1.5)
    report.finish(rows=count, columns=COLUMNS + 1, size_gb=size)


def write(folder: Path, count: int) -> None:
    """Rows of numbers in Parquet files of equal size."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(FILES):
        rows = count // FILES
        columns = {f"f{i}": random.random(rows) for i in range(COLUMNS)}
        pq.write_table(pa.table({**columns, "label": random.random(rows)}), folder / f"{number:02d}.parquet")


def in_own_process(name: str, folder: Path) -> int:
    command = [sys.executable, __file__, "--way", name, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def train(way: Way, folder: Path) -> int:
    """The peak while shards are made and one epoch is trained on them."""
    import torch

    from kindler import Estimator

    model = torch.nn.Linear(COLUMNS, 1)
    estimator = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01), loss=torch.nn.MSELoss(), workers=2
    )
    names = [f"f{i}" for i in range(COLUMNS)]
    given = way.given(folder)
    with watched() as peak:
        estimator.fit(
            way.shards(given),
            batch_size=BATCH,
            feature_cols=names,
            label_cols="label",
            columns=Columns(stack_features=True),
            verbose=0,
        )
    return peak[0]


def a_frame(folder: Path) -> Any:
    """A pandas DataFrame in the driver, which is counted."""
    import numpy as np
    import pandas as pd
    import pyarrow.parquet as pq

    files = sorted(folder.glob("*.parquet"))
    names = pq.read_schema(files[0]).names
    rows = pq.read_metadata(files[0]).num_rows
    values = np.empty((rows * len(files), len(names)))
    for number, file in enumerate(files):
        part = pq.read_table(file)
        for i, name in enumerate(names):
            values[number * rows : (number + 1) * rows, i] = part.column(name).to_numpy()
    return pd.DataFrame(values, columns=names, copy=False)


def a_frame_and_a_session(folder: Path) -> Any:
    spark_session(2, memory="8g")  # Spark holds what the driver sent and the shards made of it
    return a_frame(folder)


def a_scan(folder: Path) -> Any:
    return spark_session(2).read.parquet(str(folder))


@dataclass(frozen=True)
class Way:
    """Where rows are before anybody looks at the memory, and how shards are made of them."""

    given: Callable[[Path], Any]
    shards: Callable[[Any], Any]


def _shards() -> Any:
    from kindler import XShards

    return XShards


WAYS = {
    "local engine, from files": Way(
        lambda folder: folder, lambda f: _shards().load_parquet(f, engine="local")
    ),
    "local engine, from pandas": Way(a_frame, lambda f: _shards().partition(f, FILES, engine="local")),
    "Spark engine, from a DataFrame": Way(a_scan, lambda f: _shards().from_spark_df(f)),
    "Spark engine, from pandas": Way(
        a_frame_and_a_session, lambda f: _shards().partition(f, FILES, engine="spark")
    ),
}


@contextmanager
def watched() -> Iterator[list[int]]:
    """The highest sum so far, in a list of one."""
    peak = [0]
    done = threading.Event()

    def look() -> None:
        while not done.wait(_EVERY_S):
            peak[0] = max(peak[0], sum(map(_anonymous, _family())))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _family() -> set[int]:
    """This process and all that it has started, at any remove; a fork server may have lost its parent."""
    parents: dict[int, int] = {}
    owners: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"kindler.engine._fork_server_main" in words:
                owners[int(entry.name)] = int(json.loads(words[-2])["owner"])
        except (OSError, ValueError, KeyError):
            continue  # the process is over
    family = {os.getpid()}
    while True:
        more = {p for p, parent in parents.items() if parent in family or owners.get(p) in family} - family
        if not more:
            return family
        family |= more


def _anonymous(pid: int) -> int:
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
            return 0
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # the process is over
    # Proportional: pages that workers share with the process they were forked from are counted once.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:")), 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--way"]:
        print(json.dumps(train(WAYS[sys.argv[2]], Path(sys.argv[3]))))
    else:
        main()
