"""Functions that the tests store as scripts, models and datasets; workers import them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np


def echo(*args: Any, **options: Any) -> Any:
    return [list(args), options]


def fail(message: str) -> None:
    raise ValueError(message)


def talk(text: str) -> int:
    sys.stdout.write(f"{text}\n")
    return os.getpid()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker() -> None:
    """Kill the `kindler worker` that runs this, and wait to be ended with it."""
    import psutil

    (worker,) = [one for one in psutil.Process().parents() if "kindler.cli" in one.cmdline()]
    worker.kill()
    signal.pause()


def die_once(mark: str) -> str:
    path = Path(mark)
    if not path.exists():
        path.touch()
        die()
    return "the second time"


def hold(port: int) -> str:
    """Say that it runs, and go on when it is told to."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{os.getpid()}\n".encode())
        return connection.recv(100).decode()


def count_and_hold(path: str, port: int) -> str:
    """Write down that it runs, as `hold` does."""
    with Path(path).open("a") as file:
        file.write("run\n")
    return hold(port)


def remember(result: Any, path: str | None = None) -> None:
    from kindler import om

    om.datasets.put({"result": [float(n) for n in result]}, "remembered", mode="replace")


def rows(count: int = 3) -> Any:
    return np.arange(float(count))[:, None]


def twice(data: Any, verb: str, **options: Any) -> Any:
    """A model that is a function."""
    return {"verb": verb, "result": np.asarray(data) * 2, "options": options}
