"""A real standalone Spark cluster on this machine: a master and workers, started from pip's pyspark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from kindler.spark.java import find_java
from tests.java_options import JAVA_OPTIONS

ONE_GPU_A_TASK = {f"spark.{who}.resource.gpu.amount": "1" for who in ("executor", "task")}
_MASTER_ADDRESS = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = re.compile(r"Successfully registered with master")


@dataclass
class Cluster:
    """The master's address, and its workers."""

    address: str
    folder: Path
    stack: ExitStack
    size: int
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: int = 0

    def mend(self) -> None:
        """Start workers until there are as many as there should be, and wait until they have registered."""
        self.workers = [process for process in self.workers if process.poll() is None]
        logs = []
        while len(self.workers) < self.size:
            place = self.folder / f"work-{self.started}"
            self.workers.append(self.stack.enter_context(worker(self.address, place)))
            self.started += 1
            logs.append(place / "worker.log")
        for log in logs:
            _await(log, _REGISTERED)


@contextmanager
def standalone(folder: Path, *, workers: int = 2) -> Iterator[Cluster]:
    """A cluster whose workers have all registered with its master."""
    log = folder / "master.log"
    with ExitStack() as stack:
        any_port = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        stack.enter_context(_daemon("master.Master", any_port, log))
        cluster = Cluster(_await(log, _MASTER_ADDRESS), folder, stack, workers)
        cluster.mend()
        yield cluster


@contextmanager
def worker(master: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker of a cluster."""
    folder.mkdir(exist_ok=True)
    place = ["--host", "127.0.0.1", "--webui-port", "0", "--work-dir", str(folder)]
    size = ["--cores", "1", "--memory", "1g"]
    with _daemon(
        "worker.Worker",
        [*place, *size, master],
        folder / "worker.log",
        SPARK_WORKER_OPTS=f"-Dspark.decommission.enabled=true {_made_up_gpu(folder)}",  # by SIGPWR
    ) as process:
        yield process


def _made_up_gpu(folder: Path) -> str:
    """Options of a worker whose machine says that it has a GPU, of another number than any other worker's."""
    script = folder / "gpus.sh"
    found = json.dumps({"name": "gpu", "addresses": [str(zlib.crc32(bytes(folder)))]})
    script.write_text(f"#!/bin/sh\necho '{found}'\n")
    script.chmod(0o755)
    names = {"amount": "1", "discoveryScript": str(script)}
    return " ".join(f"-Dspark.worker.resource.gpu.{name}={value}" for name, value in names.items())


@contextmanager
def _daemon(
    name: str, arguments: list[str], log: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    home = Path(pyspark.__file__).parent
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments],
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "JAVA_HOME": str(find_java().home),
                "SPARK_LOCAL_IP": "127.0.0.1",
                "JAVA_TOOL_OPTIONS": JAVA_OPTIONS,  # executors inherit it from their worker
                **variables,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(log: Path, pattern: re.Pattern[str], *, timeout_s: float = 90) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = pattern.search(log.read_text())
        if found:
            return found[found.re.groups]
        time.sleep(0.1)
    raise TimeoutError(f"{pattern.pattern!r} did not appear in {log}:\n{log.read_text()[-2000:]}")
