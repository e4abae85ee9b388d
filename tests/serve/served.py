"""`kindler serve` as a process of its own, and small models whose answers are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.dummy import DummyRegressor
from sklearn.linear_model import LinearRegression

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).normal(size=(20, 3))
NAMES = ["a", "b", "c"]


def linear() -> LinearRegression:
    """A model whose answer is known: a + 2 b + 3 c."""
    return LinearRegression(fit_intercept=False).fit(X, X @ [1.0, 2.0, 3.0])


def constant(value: float) -> DummyRegressor:
    """A model that answers its own number, and so tells which version it is."""
    return DummyRegressor(strategy="constant", constant=value).fit(X, X[:, 0])


@dataclass
class Served:
    """A running server."""

    url: str
    store: str
    process: subprocess.Popen[str]
    grpc: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@contextmanager
def serving(store: Path | str, *arguments: str, paths: Sequence[Path] = ()) -> Iterator[Served]:
    """`kindler serve` on a free port; packages in `paths` are there too."""
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(store), "--port", "0", *arguments]
    process = subprocess.Popen(command, env=_environment(paths), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http" in line, line
        grpc = process.stdout.readline().split()[-1] if "--grpc-port" in arguments else ""
        yield Served(line.rpartition(" at ")[2].strip(), str(store), process, grpc)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
        if process.stdout is not None:
            process.stdout.close()


def command(
    *arguments: str, timeout: float = 240, paths: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """`kindler ...`, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kindler.cli", *arguments],
        env=_environment(paths),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _environment(paths: Sequence[Path]) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            map(str, [ROOT / "src", ROOT / "packages/kindler-tfrecord/src", *paths])
        ),
    }


def expected(rows: Any) -> Sequence[float]:
    """What `linear` answers."""
    return (np.asarray(rows) @ [1.0, 2.0, 3.0]).tolist()
