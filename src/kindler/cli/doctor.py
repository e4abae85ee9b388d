"""`kindler doctor`: what this machine, and a Spark cluster, have and lack.

On this machine nothing is started, and no framework is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Literal

from kindler.engine.placement import machine_gpus, usable_cores
from kindler.errors import ConfigError, JavaNotFoundError, KindlerError
from kindler.spark.java import find_java
from kindler.spark.versions import parse, too_old

_MARKS = {"ok": "ok", "warn": "warning", "fail": "FAILED"}
_LOOK_S = 0.25
_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "openvino", "onnxruntime", "mxnet")
_PACKAGES = ("kindler", "numpy", "pyarrow", "cloudpickle", *_FRAMEWORKS)
_LITTLE_SHM = 256 << 20
_LITTLE_DISK = 2 << 30
_FEW_FILES = 1024


@dataclass(frozen=True)
class Check:
    """One result: "warn" limits what can be done, "fail" must be fixed; `found` is the current state."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    where: str = "here"


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine and a Spark cluster, and say what to do",
        description="Checks this machine and, with --master, the executors of a cluster. Exits with 1 if"
        " any check fails.",
    )
    add = parser.add_argument
    add("--master", metavar="URL", help="also check this Spark master, or sc://host")
    waiting = "seconds to wait for executors (default: 60)"
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help=waiting)
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)


def _doctor(chosen: argparse.Namespace) -> int:
    checks = list(_machine_checks())
    if chosen.master is not None:
        checks += _cluster(chosen.master, chosen.timeout)
    if chosen.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for line in _lines(checks):
            print(line)
    return 1 if any(check.status == "fail" for check in checks) else 0


def _lines(checks: list[Check]) -> Iterator[str]:
    where = None
    for check in checks:
        if check.where != where:
            where = check.where
            yield "this machine" if where == "here" else where
        yield f"  {_MARKS[check.status]:<8} {check.name:<16} {check.found}"
        if check.advice:
            yield f"  {'':<8} {'':<16} -> {check.advice}"


def _cluster(master: str, timeout_s: float) -> list[Check]:
    from kindler.spark.session import init, stop

    try:
        spark = init(master)
    except Exception as exc:  # noqa: BLE001 - Spark's own, of any kind: to be shown, not raised
        first, _, hint = str(exc).strip().partition("\n")
        advice = (
            hint if isinstance(exc, KindlerError) else ""
        ) or "is the address correct, and the cluster running?"
        return [Check("spark", "fail", first[:300], advice, where=master)]
    try:
        return list(_executors(spark, master, timeout_s))
    finally:
        stop()


def _executors(spark: Any, master: str, timeout_s: float) -> Iterator[Check]:
    from kindler.spark.executors import executor_pythons, is_dynamic, reach_driver, slots

    yield Check("spark", "ok", str(spark.version), where=master)
    deadline = time.monotonic() + timeout_s
    while not is_dynamic(spark) and not slots(spark):
        if time.monotonic() > deadline:
            advice = "are there free workers with enough cores and memory (spark.executor.memory)?"
            yield Check("executors", "fail", f"none started within {timeout_s:g} s", advice, master)
            return
        time.sleep(_LOOK_S)
    try:
        pythons = executor_pythons(spark, _PACKAGES)
    except ConfigError as exc:
        first, _, rest = str(exc).partition("\n")
        yield Check("executors", "fail", first, rest.removeprefix("Hint: "), master)
        return
    yield Check("executors", "ok", f"{slots(spark)} slots, {len(pythons)} Python(s)", where=master)
    complaint = reach_driver(spark)
    if complaint is None:
        yield Check("ports", "ok", "executors reach the driver", where=master)
    else:
        advice = "open a port range for RunSettings(port_range=...), or set spark.driver.host."
        yield Check("ports", "fail", complaint, advice, master)
    for found in pythons:
        yield from _one_python(found)


def _one_python(found: Any) -> Iterator[Check]:
    where = f"{found.host} ({found.executable})"
    yield Check("python", "ok", found.python, where=where)
    for complaint in found.complaints(_PACKAGES[:4]):
        advice = 'install it there, or: kindler.init(master, ship="venv")'
        yield Check(complaint.partition(" ")[0], "fail", complaint, advice, where)
    for name, version in found.versions.items():
        if version is not None:
            yield Check(name, "ok", version or "installed", where=where)
    if not any(found.versions[name] is not None for name in _FRAMEWORKS):
        advice = "install the framework of your models, such as torch."
        yield Check("frameworks", "warn", "none", advice, where)
    yield Check("gpus", "ok", str(len(found.gpus)) if found.gpus else "none", where=where)
    yield free_space("shared memory", "/dev/shm", found.free_shm, where)
    yield free_space("temporary files", "its temporary folder", found.free_temp, where)


def _machine_checks() -> Iterator[Check]:
    """Everything that matters on this machine, in the order in which it is shown."""
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Check("kindler", "ok", version_of("kindler") or "not installed, but importable")
    yield _pyspark()
    yield _java()
    yield from _frameworks()
    yield _gpus()
    yield Check("cores", "ok", str(usable_cores()))
    yield free_space("shared memory", "/dev/shm", _free("/dev/shm"))
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    yield free_space("temporary files", folder, _free(folder))
    yield _ports()
    yield _open_files()


def version_of(package: str) -> str | None:
    from importlib import metadata  # takes as long to load as all the rest of `kindler --help`

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def free_space(name: str, path: str, free: int | None, where: str = "here") -> Check:
    """Whether there is room for workers."""
    least = _LITTLE_SHM if path == "/dev/shm" else _LITTLE_DISK
    if free is None:
        advice = f"make the folder {path} and let this user write to it."
        return Check(
            name, "fail" if path != "/dev/shm" else "warn", f"{path} cannot be written", advice, where
        )
    found = f"{path}, {free / 1e9:,.1f} GB free"
    if free >= least:
        return Check(name, "ok", found, where=where)
    if path == "/dev/shm":
        advice = "workers of one machine exchange gradients there: start the container with --shm-size=1g."
    else:
        advice = "rows are stored there: set TMPDIR, or spark.local.dir, to a folder on a larger disk."
    return Check(name, "warn", found, advice, where)


def _free(path: str) -> int | None:
    return shutil.disk_usage(path).free if os.path.isdir(path) and os.access(path, os.W_OK) else None


def _pyspark() -> Check:
    version = version_of("pyspark")
    if version is None:
        advice = "for Spark DataFrames: pip install 'kindler[spark,java]'. Everything else works without it."
        return Check("pyspark", "warn", "not installed", advice)
    complaint = too_old(version)
    if complaint is not None:
        return Check("pyspark", "fail", complaint, "pip install 'pyspark>=3.5'")
    if parse(version) < (4, 0) and sys.version_info[:2] > (3, 11):
        advice = "pip install 'pyspark>=4', or use Python 3.11: Spark 3.5 does not support newer ones."
        return Check("pyspark", "fail", version, advice)
    return Check("pyspark", "ok", version)


def _java() -> Check:
    newest = 22 if parse(version_of("pyspark") or "99.0") < (4, 2) else None
    try:
        java = find_java(newest=newest)
    except JavaNotFoundError as exc:
        lines = str(exc).splitlines()
        status: Literal["warn", "fail"] = "fail" if version_of("pyspark") else "warn"
        return Check(
            "java", status, " ".join(line.strip() for line in lines[:-1]), lines[-1].removeprefix("Hint: ")
        )
    return Check("java", "ok", f"{java.version} ({java.origin}: {java.home})")


def _frameworks() -> Iterator[Check]:
    installed = {name: version_of(name) for name in _FRAMEWORKS if find_spec(name) is not None}
    if not installed:
        yield Check(
            "frameworks", "warn", "none", "to train: pip install 'kindler[torch]' or 'kindler[tensorflow]'"
        )
    for name, version in installed.items():
        yield Check(name, "ok", version or "installed")


def _gpus() -> Check:
    found = machine_gpus()
    if not found:
        return Check("gpus", "ok", "none")
    if (version_of("torch") or "").endswith("+cpu"):
        advice = "the installed torch is the CPU build: install a CUDA build."
        return Check("gpus", "warn", f"{len(found)}, but torch cannot use them", advice)
    return Check("gpus", "ok", str(len(found)))


def _ports() -> Check:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as listener:
            listener.bind((address, 0))
    except OSError as exc:
        advice = f"add {host} to /etc/hosts, or set SPARK_LOCAL_IP to an address of this machine."
        return Check("ports", "warn", f"cannot listen on the address of {host} ({exc})", advice)
    return Check("ports", "ok", f"available on 127.0.0.1 and {address} ({host})")


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Check("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}")
    return Check("open files", "warn", f"up to {soft:,}", "ulimit -n 4096, before starting many workers.")
