"""A real standalone Spark cluster on this machine: a master and workers, started from pip's pyspark."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from kindler.spark.java import find_java

_MASTER_ADDRESS = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = re.compile(r"Registering worker ")


@contextmanager
def standalone(folder: Path, *, workers: int = 2, cores: int = 1, memory: str = "1g") -> Iterator[str]:
    """The master's address, once all workers have registered with it."""
    host = "127.0.0.1"
    log = folder / "master.log"
    with ExitStack() as stack:
        any_port = ["--host", host, "--port", "0", "--webui-port", "0"]
        stack.enter_context(_daemon("master.Master", any_port, log))
        address = _await(log, _MASTER_ADDRESS, count=1)[0]
        for number in range(workers):
            stack.enter_context(worker(address, folder / f"work-{number}", cores=cores, memory=memory))
        _await(log, _REGISTERED, count=workers)
        yield address


@contextmanager
def worker(master: str, folder: Path, *, cores: int = 1, memory: str = "1g") -> Iterator[None]:
    """One more worker of a cluster."""
    folder.mkdir(exist_ok=True)
    place = ["--host", "127.0.0.1", "--webui-port", "0", "--work-dir", str(folder)]
    size = ["--cores", str(cores), "--memory", memory]
    with _daemon("worker.Worker", [*place, *size, master], folder / "worker.log"):
        yield


@contextmanager
def _daemon(name: str, arguments: list[str], log: Path) -> Iterator[None]:
    home = Path(pyspark.__file__).parent
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments],
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "JAVA_HOME": str(find_java().home),
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(log: Path, pattern: re.Pattern[str], *, count: int, timeout_s: float = 90) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = pattern.findall(log.read_text())
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{pattern.pattern!r} did not appear in {log}:\n{log.read_text()[-2000:]}")
