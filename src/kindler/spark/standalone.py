"""A standalone Spark cluster on this machine, from pip's pyspark. Its processes are recorded in a file, so
that another command can find and end them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kindler.engine.fork_server import leave_running
from kindler.errors import ConfigError, StartTimeoutError
from kindler.spark.java import find_java

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = re.compile(r"Successfully registered with master")
_CLASS = "org.apache.spark.deploy."
_HOST = "127.0.0.1"
_STOP_S = 20.0
_LOOK_S = 0.1
_RECORD = "cluster.json"
_TAIL = 2000


@dataclass(frozen=True)
class Daemon:
    name: str
    pid: int
    log: str

    @property
    def is_alive(self) -> bool:
        """Another process that got the same pid does not count."""
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False
        return _CLASS.encode() in command


@dataclass(frozen=True)
class StandaloneCluster:
    address: str
    daemons: tuple[Daemon, ...]


def up(
    folder: Path, *, workers: int, cores: int, memory: str, port: int = 0, timeout_s: float = 120.0
) -> StandaloneCluster:
    """Waits until all have registered; none is left if they do not in time. `folder` keeps logs and
    record."""
    if workers < 1 or cores < 1:
        raise ConfigError(f"workers={workers}, cores={cores}: both must be at least 1.")
    if not re.fullmatch(r"\d+[kmgtKMGT]?", memory):
        raise ConfigError(f"memory={memory!r}: must be a number with a unit, like 3g.")
    running = status(folder)
    if running is not None:
        raise ConfigError(f"a cluster is already running: {running.address}.\nHint: kindler cluster down.")
    folder.mkdir(parents=True, exist_ok=True)
    daemons: list[Daemon] = []
    try:
        place = ["--host", _HOST, "--port", str(port), "--webui-port", "0"]
        daemons.append(_start(folder, "master", "master.Master", place))
        address = _await(daemons[0], _MASTER, timeout_s)
        for number in range(workers):
            work = ["--host", _HOST, "--webui-port", "0", "--work-dir", str(folder / f"work-{number}")]
            size = ["--cores", str(cores), "--memory", memory]
            daemons.append(_start(folder, f"worker-{number}", "worker.Worker", [*work, *size, address]))
        for daemon in daemons[1:]:
            _await(daemon, _REGISTERED, timeout_s)
    except BaseException:
        _end(daemons)
        raise
    cluster = StandaloneCluster(address, tuple(daemons))
    (folder / _RECORD).write_text(json.dumps(asdict(cluster)))
    return cluster


def status(folder: Path) -> StandaloneCluster | None:
    cluster = _recorded(folder)
    return cluster if cluster.daemons and cluster.daemons[0].is_alive else None


def _recorded(folder: Path) -> StandaloneCluster:
    try:
        record = json.loads((folder / _RECORD).read_text())
        return StandaloneCluster(record["address"], tuple(Daemon(**d) for d in record["daemons"]))
    except (OSError, ValueError, KeyError, TypeError):
        return StandaloneCluster("", ())


def down(folder: Path) -> int:
    """End all processes; returns how many there were."""
    alive = [daemon for daemon in _recorded(folder).daemons if daemon.is_alive]
    _end(alive)
    (folder / _RECORD).unlink(missing_ok=True)
    return len(alive)


def _start(folder: Path, name: str, main: str, words: list[str]) -> Daemon:
    import pyspark

    home = Path(pyspark.__file__).parent
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(home / "bin" / "spark-class"), f"{_CLASS}{main}", *words],
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "JAVA_HOME": str(find_java().home),
                "SPARK_LOCAL_IP": _HOST,
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it stays when the command ends
        )
    leave_running(process)
    return Daemon(name, process.pid, str(log))


def _await(daemon: Daemon, pattern: re.Pattern[str], timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        text = Path(daemon.log).read_text(errors="replace")
        if match := pattern.search(text):
            return match[match.re.groups]
        if time.monotonic() > deadline or _has_ended(daemon.pid):
            raise StartTimeoutError(
                f"Spark's {daemon.name} did not start. Its log ends with:\n{text[-_TAIL:]}"
            )
        time.sleep(_LOOK_S)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _end(daemons: list[Daemon]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for daemon in daemons:
            if daemon.is_alive:
                os.kill(daemon.pid, number)
        deadline = time.monotonic() + _STOP_S
        while any(d.is_alive for d in daemons) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
    for daemon in daemons:
        _has_ended(daemon.pid)  # collects it, where it is our own child
