"""What `kindler doctor` looks at on this machine. Nothing is started, and no framework is imported."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from kindler.engine.placement import machine_gpus, usable_cores
from kindler.errors import JavaNotFoundError
from kindler.spark.java import find_java
from kindler.spark.versions import parse, too_old

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "openvino", "onnxruntime", "mxnet")
_OLDEST_PYTHON = (3, 10)
_LITTLE_SHM = 256 << 20
_LITTLE_DISK = 2 << 30
_FEW_FILES = 1024


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: "ok"; "warn" for what limits what can be done; "fail" for what must be mended.
        found: What there is.
        advice: What to do about it.
        where: The machine.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    where: str = "here"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def machine_checks() -> Iterator[Check]:
    """Everything that matters on this machine, in the order in which it is shown."""
    yield _python()
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
    """The version of an installed package; None where it is not installed."""
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
        advice = "rows are kept there: set TMPDIR, or spark.local.dir, to a folder on a larger disk."
    return Check(name, "warn", found, advice, where)


def _free(path: str) -> int | None:
    return shutil.disk_usage(path).free if os.path.isdir(path) and os.access(path, os.W_OK) else None


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= _OLDEST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "install Python 3.10 or newer.")


def _pyspark() -> Check:
    version = version_of("pyspark")
    if version is None:
        advice = "for Spark DataFrames: pip install 'kindler[spark,java]'. Everything else works without."
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
    installed = {name: version_of(name) for name in FRAMEWORKS if find_spec(name) is not None}
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
        advice = "the installed torch is the one for CPUs: install one with CUDA."
        return Check("gpus", "warn", f"{len(found)}, and torch cannot use them", advice)
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
    return Check("ports", "ok", f"free ones on 127.0.0.1 and {address} ({host})")


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Check("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}")
    return Check("open files", "warn", f"up to {soft:,}", "ulimit -n 4096, before many workers are started.")
