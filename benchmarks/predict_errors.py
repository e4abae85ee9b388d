"""What do rows that fail cost, and a run that is killed at half?

One row in a hundred is null, raises in a transform, is named by the model's error, or only makes the model
raise, so that it must be searched for. Each is compared with the clean rows under the same options: 784
float32 in memory, an MLP, batches of 1,024, one thread, CPU seconds of this process. Then files are scored
into files by two workers: from the start, and again after the first program was killed at half of the
parts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from _bench import WIDTH, Report, arguments, rounds, workplace

warnings.simplefilter("ignore")
ROWS = 40_960
FILE_ROWS = 400_000


def main() -> None:
    given = arguments(__doc__, repeats=5)
    rows, in_files = (4_096, 20_000) if given.quick else (ROWS, FILE_ROWS)
    report = Report("predict_errors", f"cost of 1% bad rows of {rows:,}", quick=given.quick)
    ways = in_memory(rows)
    spent = rounds(ways, repeats=given.repeats, warm_up=not given.quick)
    for name, values in spent.items():
        report.figure(name, values, "CPU s")
    for name in ("null", "transform", "named by the model", "searched for"):
        limit = None if name == "searched for" else 1.03
        report.ratio(f"{name}: 1% bad / clean", spent[name], spent[f"{name}, clean"], at_most=limit)
    whole, second = [], []
    with workplace() as folder:
        write(folder / "rows.parquet", in_files)
        for number in range(given.repeats):
            out = folder / f"out-{number}"
            whole.append(seconds_of(child(folder, out)))
            check(out, in_files)
            half = folder / f"half-{number}"
            killed = child(folder, half)
            parts = len(list(out.glob("part-*")))
            while len(list(half.glob("part-*"))) < parts / 2:
                assert killed.poll() is None, "it ended before it was killed"
                time.sleep(0.002)
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
            second.append(seconds_of(child(folder, half)))
            check(half, in_files)
    report.figure("files, from the start", whole, "s")
    report.figure("files, after a kill at half", second, "s")
    report.ratio("after a kill at half / from the start", second, whole, at_most=0.6)
    report.finish(rows=rows, file_rows=in_files)


def in_memory(rows: int) -> dict[str, Any]:
    import pyarrow as pa
    import torch

    from kindler import Estimator, Prepare

    torch.set_num_threads(1)
    x = np.random.default_rng(0).random((rows, WIDTH), np.float32)
    bad = np.arange(37, rows, 100)
    broken = x.copy()
    broken[bad, 0] = 1000
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH).cast(pa.list_(pa.float32()))
    places = [None if row % 100 == 37 else row for row in range(rows)]
    nulls = lists.take(pa.array(places, pa.int64()))

    def timed(estimator: Any, data: Any) -> Any:
        def run() -> float:
            began = time.process_time()
            estimator.predict(data, feature_cols="x", on_error="null", verbose=0)
            return time.process_time() - began

        return run

    plain = Estimator.from_torch(model=checked("not"))
    transformed = Estimator.from_torch(model=checked("not"), prepare=Prepare(transform=halved))
    named, searched = (Estimator.from_torch(model=checked(how)) for how in ("named", "searched"))
    return {
        "null, clean": timed(plain, pa.table({"x": lists})),
        "null": timed(plain, pa.table({"x": nulls})),
        "transform, clean": timed(transformed, {"x": x}),
        "transform": timed(transformed, {"x": broken}),
        "named by the model, clean": timed(named, {"x": x}),
        "named by the model": timed(named, {"x": broken}),
        "searched for, clean": timed(searched, {"x": x}),
        "searched for": timed(searched, {"x": broken}),
    }


def halved(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"][0] > 100:
        raise ValueError("too large")
    return {"x": row["x"] / 2}


def checked(how: str) -> Any:
    import torch
    from torch import nn

    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
            self.layers = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), *wide, nn.Linear(1024, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bad = x[:, 0] > 100
            if how != "not" and bad.any():
                error = ValueError("too large")
                if how == "named":
                    error.positions = bad.nonzero().flatten().tolist()  # type: ignore[attr-defined]
                raise error
            made: torch.Tensor = self.layers(x)
            return made

    torch.manual_seed(0)
    return Checked()


def write(path: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema({"id": pa.int64(), "x": pa.list_(pa.float32())})) as writer:
        for start in range(0, rows, 10_000):
            x = random.random((min(10_000, rows - start), WIDTH), np.float32)
            writer.write_table(
                pa.table({"id": np.arange(start, start + len(x)), "x": list(x)}, writer.schema)
            )


def child(folder: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--score", str(folder / "rows.parquet"), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def seconds_of(process: subprocess.Popen[str]) -> float:
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return float(printed.split()[-1])


def score(source: str, out: str) -> None:
    """Prints how long `predict` took, with starting its workers and without imports."""
    from kindler import Estimator
    from kindler.config import RunSettings

    estimator = Estimator.from_torch(model=checked("not"), workers=2, settings=RunSettings(threads=1))
    began = time.perf_counter()
    estimator.predict(source, feature_cols="x", output_path=out, on_error="null", verbose=0)
    print(time.perf_counter() - began)


def check(out: Path, rows: int) -> None:
    import pyarrow.parquet as pq

    assert pq.read_table(out, columns=["id"])["id"].to_pylist() == list(range(rows))


if __name__ == "__main__":
    score(*sys.argv[2:]) if sys.argv[1:2] == ["--score"] else main()
