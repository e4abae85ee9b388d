"""Real brokers on ports of their own, in folders of their own; and workers of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

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


def mortal(command: Sequence[str]) -> list[str]:
    """A command that gets SIGTERM when this process is gone, however it went."""
    return ["setpriv", "--pdeathsig", "TERM", *command]


@contextmanager
def running(command: Sequence[str], *, until: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed a line with `until`; its process group is ended afterwards."""
    process = subprocess.Popen(
        mortal(command),
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
        # Somebody must go on reading, or it would wait for that when it has much to say.
        reader = threading.Thread(target=shutil.copyfileobj, args=(process.stdout, sys.stderr), daemon=True)
        reader.start()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        with suppress(ProcessLookupError):  # what it has started may outlive it, and holds the pipe
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        reader.join(10)
        if not reader.is_alive():  # closing would wait for whoever reads
            process.stdout.close()


class Broker:
    """A broker that can be stopped and started again, at the same port and with what it had."""

    def __init__(self, url: str, run: Callable[[], AbstractContextManager[Any]]) -> None:
        self.url = url
        self._run = run
        self._stack = ExitStack()

    def start(self) -> None:
        self._stack.enter_context(self._run())

    def stop(self) -> None:
        self._stack.close()


@contextmanager
def redis() -> Iterator[Broker]:
    """A Redis server of our own, that is not started yet."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("Redis is not installed (apt-get install redis-server)")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kindler-redis-") as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        command += ["--appendonly", "yes"]
        broker = Broker(
            f"redis://127.0.0.1:{port}/0?lease_s=3",
            lambda: running(command, until="Ready to accept connections"),
        )
        yield broker
        broker.stop()


@contextmanager
def rabbitmq() -> Iterator[Broker]:
    """A RabbitMQ server of our own, that is not started yet."""
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
        names = subprocess.Popen(mortal([epmd, "-port", mapper, "-address", "127.0.0.1"]), env=environment)
        stack.callback(names.wait, 10)
        stack.callback(names.terminate)
        broker = Broker(
            f"amqp://guest:guest@127.0.0.1:{port}//",
            lambda: running([str(RABBIT)], until="startup complete", env=environment),
        )
        stack.callback(broker.stop)
        yield broker


@contextmanager
def worker(
    store: str, broker: str, *arguments: str, until: str = "ready:"
) -> Iterator[subprocess.Popen[str]]:
    """A `kindler worker` that is ready, or has come so far."""
    command = [sys.executable, "-m", "kindler.cli", "worker", "--store", store, "--broker", broker]
    paths = os.pathsep.join([str(SRC), str(HERE)])
    with running([*command, *arguments], until=until, env={**os.environ, "PYTHONPATH": paths}) as process:
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
