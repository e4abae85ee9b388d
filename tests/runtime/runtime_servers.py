"""Real brokers on ports of their own, in folders of their own; and workers of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

X = np.array([[0.1], [0.2], [0.9], [1.1]])
Y = np.array([0, 0, 1, 1])
HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
RABBIT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], *, until: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed a line with `until`; its process group is ended afterwards."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if until in line:
                break
        else:
            raise AssertionError(f"{command[0]} ended with {process.wait(10)}:\n{''.join(said)}")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        process.stdout.close()


@contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis server of our own."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("Redis is not installed (apt-get install redis-server)")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kindler-redis-") as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with running(command, until="Ready to accept connections"):
            yield f"redis://127.0.0.1:{port}/0?lease_s=3"


@contextmanager
def rabbitmq() -> Iterator[str]:
    """The URL of a RabbitMQ server of our own."""
    epmd = shutil.which("epmd")
    if not RABBIT.exists() or epmd is None:
        pytest.skip("RabbitMQ is not installed (apt-get install rabbitmq-server)")
    port, mapper = free_port(), str(free_port())
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kindler-rabbitmq-"))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "LANG": "C.UTF-8",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": mapper,
            "RABBITMQ_NODENAME": f"kindler{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": f"{folder}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }
        # In the foreground, so that it ends with us; the server would leave one behind.
        names = subprocess.Popen([epmd, "-port", mapper, "-address", "127.0.0.1"], env=environment)
        stack.callback(names.wait, 10)
        stack.callback(names.terminate)
        stack.enter_context(running([str(RABBIT)], until="startup complete", env=environment))
        yield f"amqp://guest:guest@127.0.0.1:{port}//"


@contextmanager
def worker(
    store: str, broker: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A `kindler worker` that is ready."""
    command = [sys.executable, "-m", "kindler.cli", "worker"]
    given = ["--store", store, "--broker", broker, *arguments]
    paths = os.pathsep.join([str(SRC), str(HERE)])
    with running(
        [*command, *given],
        until="ready:",
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
    ) as process:
        yield process


class Meeting:
    """Where a script that `hold`s says that it runs, and is told to go on."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port: int = listener.getsockname()[1]

    def arrived(self) -> tuple[int, socket.socket]:
        connection, _ = self._listener.accept()
        connection.settimeout(60)
        with connection.makefile() as lines:
            return int(lines.readline()), connection
