"""What the benchmarks share: data of MNIST's shape, interleaved repeats, the table, the JSON.

A ratio is taken within each round, where both sides ran one after the other on the same machine, and
the median over the rounds is what counts; the rounds' extremes are printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 784
CLASSES = 10
ROWS = 60_000

# The checkout that this file is in is measured, here and in every process that is started from here.
_PATHS = [str(ROOT / "src"), str(ROOT / "benchmarks")]
sys.path[:0] = [path for path in _PATHS if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_PATHS, os.environ.get("PYTHONPATH")]))


def arguments(description: str, *, repeats: int, **flags: str) -> argparse.Namespace:
    """The command line: `--quick`, `--repeats`, and flags of the benchmark's own with their help."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that it works")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="rounds that count (default: %(default)s)"
    )
    for name, text in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    given = parser.parse_args()
    if given.quick:
        given.repeats = 1
    return given


class Report:
    """The figures of one benchmark: printed as a table, written as JSON.

    Args:
        name: The benchmark; its JSON is `benchmarks/results/<name>.json`.
        question: What it answers, in a line.
        quick: A run too small to judge by; ratios are shown without a verdict.
    """

    def __init__(self, name: str, question: str, *, quick: bool) -> None:
        self._name = name
        self._question = question
        self._quick = quick
        self._load = os.getloadavg()[0]
        self._figures: list[dict[str, Any]] = []
        self._ratios: list[dict[str, Any]] = []
        print(f"{name}: {question}", flush=True)

    def figure(self, name: str, values: Sequence[float], unit: str) -> None:
        """A quantity that was measured in every round."""
        self._figures.append(
            {"name": name, "median": statistics.median(values), "unit": unit, "rounds": list(values)}
        )

    def ratio(
        self,
        name: str,
        above: Sequence[float],
        below: Sequence[float],
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """`above` over `below`, round by round, and what it ought to be."""
        rounds = [a / b for a, b in zip(above, below, strict=True)]
        self._judge(name, rounds, "x", at_least=at_least, at_most=at_most)

    def limit(self, name: str, values: Sequence[float], unit: str, *, at_most: float) -> None:
        """A quantity that is itself bounded."""
        self._judge(name, values, unit, at_least=None, at_most=at_most)

    def finish(self, **notes: Any) -> None:
        """Print, and write the JSON."""
        width = max(len(entry["name"]) for entry in [*self._figures, *self._ratios])
        for entry in self._figures:
            print(
                f"  {entry['name']:<{width}}  {_number(entry['median']):>10} {entry['unit']}{_spread(entry)}"
            )
        for entry in self._ratios:
            wanted = _wanted(entry)
            verdict = f"{wanted}: {entry['verdict']}" if wanted else ""
            shown = f"{_number(entry['median']):>10} {entry['unit']}"
            print(f"  {entry['name']:<{width}}  {shown:<17} {verdict}{_spread(entry)}")
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self._name}.json"
        path.write_text(
            json.dumps(
                {
                    "benchmark": self._name,
                    "question": self._question,
                    "quick": self._quick,
                    "commit": commit(),
                    "machine": machine(),
                    "load": {"before": self._load, "after": os.getloadavg()[0]},
                    "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    "figures": self._figures,
                    "ratios": self._ratios,
                    **notes,
                },
                indent=1,
            )
            + "\n"
        )
        print(f"  -> {path.relative_to(ROOT)}", flush=True)

    def _judge(
        self, name: str, rounds: Sequence[float], unit: str, *, at_least: float | None, at_most: float | None
    ) -> None:
        median = statistics.median(rounds)
        met = (at_least is None or median >= at_least) and (at_most is None or median <= at_most)
        bounded = at_least is not None or at_most is not None
        verdict = None if not bounded else "quick run" if self._quick else "PASS" if met else "FAIL"
        self._ratios.append(
            {
                "name": name,
                "median": median,
                "unit": unit,
                "at_least": at_least,
                "at_most": at_most,
                "verdict": verdict,
                "rounds": list(rounds),
            }
        )


def rounds(
    ways: Mapping[str, Callable[[], float]], *, repeats: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Run every way once per round, in turn; a first round that does not count warms all of them up."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1 if warm_up else 0, repeats):
        for name, way in ways.items():
            value = way()
            _tell(f"{'warm-up' if number < 0 else f'round {number + 1}'}: {name} {_number(value)}")
            if number >= 0:
                measured[name].append(value)
    return measured


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for the benchmark's files, which goes away with it."""
    folder = Path(tempfile.mkdtemp(prefix="kindler-bench-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a run that is cut off cleans up too
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_rows(path: Path, rows: int, *, row_group: int = 7_500, seed: int = 0) -> Path:
    """Random rows of MNIST's shape: `features` (784 float32) and `label`, a group at a time."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(seed)
    schema = pa.schema([("features", pa.list_(pa.float32())), ("label", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, row_group):
            count = min(row_group, rows - start)
            pixels = random.random((count, WIDTH), dtype=np.float32)
            offsets = np.arange(count + 1, dtype=np.int32) * np.int32(WIDTH)
            features = pa.ListArray.from_arrays(pa.array(offsets), pa.array(pixels.reshape(-1)))
            labels = pa.array(random.integers(0, CLASSES, count))
            writer.write_table(pa.table([features, labels], schema=schema), row_group_size=row_group)
    return path


def mlp() -> Any:
    """784-256-256-10, of torch's own classes, so that it unpickles anywhere."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    )


def spark_session(cores: int = 2, memory: str = "4g") -> Any:
    """The session that every side of a benchmark runs in."""
    import kindler

    return kindler.init(cores=cores, memory=memory, conf={"spark.ui.enabled": "false"})


def commit() -> str:
    """The commit that was measured; "+" where files differ from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", "src", "benchmarks") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """What it was measured on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "pyspark", "pyarrow", "numpy")},
    }


def _tell(line: str) -> None:
    """Where a long run is, for whoever watches it."""
    print(
        f"  [{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {line}", file=sys.stderr, flush=True
    )


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _wanted(entry: Mapping[str, Any]) -> str:
    if entry["at_least"] is not None:
        return f">= {entry['at_least']}"
    return f"<= {entry['at_most']}" if entry["at_most"] is not None else ""


def _spread(entry: Mapping[str, Any]) -> str:
    values = entry["rounds"]
    return f"  ({_number(min(values))} .. {_number(max(values))})" if len(values) > 1 else ""
