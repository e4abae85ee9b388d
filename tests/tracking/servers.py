"""Real servers of MLflow on this machine: a tracking server, and one that serves a model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the server needs besides the client; `make test` installs it beside, for it wants other versions.
SERVER = Path(sys.prefix) / "mlflow-server"
_RUNNING = re.compile(r"Uvicorn running on (?P<url>http://\S+)")


@contextmanager
def tracking_server(folder: Path) -> Iterator[str]:
    """`mlflow server` on a free port, with a SQLite file; its URL."""
    if find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed")
    if not SERVER.is_dir() and find_spec("alembic") is None:
        pytest.skip(f"the packages of MLflow's server are not at {SERVER} (make test installs them)")
    command = ["server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination"]
    with _running([*command, str(folder / "artifacts"), "--workers", "1", "--port", "0"]) as url:
        yield url


@contextmanager
def model_server(model: Path) -> Iterator[str]:
    """`mlflow models serve` of a model's folder, in this environment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:  # MLflow takes 0 for its default
        port = taken.getsockname()[1]
    with _running(["models", "serve", "--env-manager", "local", "-m", str(model), "-p", str(port)]) as url:
        yield url


@contextmanager
def _running(arguments: list[str]) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *arguments, "--host", "127.0.0.1"],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(SERVER)]),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    drain = threading.Thread(target=process.stdout.read)  # or it would wait for us to read what it says
    try:
        url = _url(process)
        drain.start()
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if drain.is_alive():
            drain.join(30)
        process.stdout.close()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := _RUNNING.search(line):
            return found["url"]
    raise AssertionError("".join(said)[-4000:])
