"""Leak police: a test must leave the environment, threads and worker processes as it found them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.java_options import set_java_options

SHARED = Path(__file__).parents[2] / "shared" / "data"

set_java_options()
# A shell ignores it for what it starts in the background, and so would the programs of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Threads of OpenMP that wait for each other leave their core to the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def fork_servers() -> list[psutil.Process]:
    """The fork servers of this process, and of the Spark that it started."""
    family = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "kindler.engine._fork_server_main" in command and json.loads(command[-1])["owner"] in family:
            found.append(process)
    # A worker is a fork of its fork server and has its command line; only the topmost is the fork server.
    return [p for p in found if p.ppid() not in {q.pid for q in found}]


def workers() -> list[psutil.Process]:
    """The worker processes that run on this machine."""
    found = []
    for server in fork_servers():
        try:
            found += server.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def eventually_none(look: object, timeout_s: float = 60.0) -> list[object]:
    """What `look()` still finds when the time is over: what ends by itself gets the time to."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    return found  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before, threads = dict(os.environ), set(threading.enumerate())
    yield
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    changed -= {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"}
    # Set by importing TensorFlow, JAX and h5py, which Keras does at times of its own.
    changed -= {"TF2_BEHAVIOR", "HDF5_PLUGIN_PATH", "ENABLE_RUNTIME_UPTIME_TELEMETRY"}
    changed -= {"_RJEM_MALLOC_CONF"}  # set by importing Polars, which other packages do if it is there
    changed -= {"TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION", "TPU_SKIP_MDS_QUERY"}
    assert not changed, f"the test leaks environment variables: {sorted(changed)}"
    left = eventually_none(
        lambda: [t for t in threading.enumerate() if t.name.startswith("kindler-") and t not in threads]
    )
    assert not left, f"the test leaks threads: {left}"


@pytest.fixture
def no_workers_left() -> Iterator[None]:
    """Fails the test when worker processes outlive it."""
    yield
    assert not eventually_none(workers), "worker processes are left"


@pytest.fixture(scope="session")
def mnist() -> Path:
    folder = SHARED / "mnist"
    if not folder.is_dir():
        pytest.skip(f"MNIST is not at {folder}")
    return folder
