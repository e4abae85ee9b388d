"""What Spark's executors can run, asked before a run that needs it.

A task on each slot says which Python it is and which packages that has. The function that does so travels by
value and uses the standard library alone, so that it also runs where Kindler or Arrow are missing. Answers
are kept for as long as the application has the same executors; where the executors are this very Python, as
on "local[4]", nothing is asked at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import kindler
from kindler.errors import ConfigError
from kindler.spark.engine import driver_hosts
from kindler.spark.session import is_connect
from kindler.spark.slots import slots

_CONNECT_S = 10.0
_ALWAYS = ("kindler", "numpy", "pyarrow", "cloudpickle")
_PLACE = re.compile(r"\(TID \d+\) \((\S+) executor \S+\)")
_OTHER_PYTHON = re.compile(r"Python in worker has different version[^\n]*")
_NO_PYTHON = re.compile(r'Cannot run program "[^"]*"[^\n]*?: ([^\n]*)')
# By session: which executors were asked about which packages, and what they said.
_answers: weakref.WeakKeyDictionary[Any, tuple[Any, list[ExecutorPython]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ExecutorPython:
    """A Python that Spark's tasks run in.

    Attributes:
        host: Its machine.
        executable: Its path.
        python: Its version.
        versions: Package -> version, or None where it is not installed; "" if it does not say.
        gpus: The names of device files of GPUs on the machine.
        free_shm: Bytes that are free in shared memory.
        free_temp: Bytes that are free where temporary files go.
    """

    host: str
    executable: str
    python: str
    versions: dict[str, str | None]
    gpus: tuple[str, ...] = ()
    free_shm: int | None = None
    free_temp: int | None = None

    def complaints(self, packages: Sequence[str]) -> list[str]:
        """Why workers that need these packages cannot run in it."""
        missing = [f"{name} is not installed" for name in packages if self.versions.get(name) is None]
        own = self.versions.get("kindler")
        if own is not None and own != kindler.__version__:
            missing.append(f"kindler is {own}, and {kindler.__version__} on the driver")
        return missing


def check_executors(spark: SparkSession, *packages: str | None) -> None:
    """Refuse a run whose workers could not start where Spark would put them.

    Args:
        spark: The session.
        packages: What workers import besides Kindler; None is nothing.

    Raises:
        ConfigError: What is missing, and on which hosts.
    """
    if _is_this_python(spark):
        return
    # What this process lacks as well is not needed: tf_keras does without keras.
    wanted = (*_ALWAYS, *(name for name in packages if name and find_spec(name) is not None))
    faults = []
    for found in executor_pythons(spark, wanted):
        if complaints := found.complaints(wanted):
            faults.append(
                f"  {found.host} ({found.executable}, Python {found.python}): {'; '.join(complaints)}"
            )
    if faults:
        raise ConfigError(
            "workers cannot run on the executors of this Spark application:\n"
            + "\n".join(sorted(faults))
            + "\nHint: install it there; or set PYSPARK_PYTHON to a Python that has it;"
            ' or ship this environment with kindler.init(master, ship="venv").'
        )


def executor_pythons(spark: SparkSession, packages: Sequence[str]) -> list[ExecutorPython]:
    """The Pythons of the executors that run now, each once.

    Raises:
        ConfigError: Spark's tasks cannot start Python there, or it is of another version than this one.
    """
    known = _answers.get(spark)
    who = (_executor_ids(spark), tuple(packages))
    if known is not None and known[0] == who:
        return known[1]
    count = max(1, slots(spark))
    ask = F.udf(_travelling(_describe_python), "string", useArrow=False)
    frame = spark.range(0, count, 1, count).select(ask(F.lit(json.dumps(list(packages)))).alias("found"))
    try:
        rows = [json.loads(row.found) for row in frame.collect()]
    except (PySparkException, Py4JError) as exc:
        raise _cannot_start(str(exc)) or exc from None
    found = {}
    for row in rows:
        one = ExecutorPython(**{**row, "gpus": tuple(row["gpus"])})
        found[one.host, one.executable] = one
    pythons = [found[place] for place in sorted(found)]
    _answers[spark] = who, pythons
    return pythons


def reach_driver(spark: SparkSession) -> str | None:
    """Why executors cannot connect to this process, as workers do; None where they can."""
    bind, advertised = driver_hosts(spark)
    with socket.create_server((bind, 0), family=socket.AF_INET6 if ":" in bind else socket.AF_INET) as server:
        address = json.dumps([advertised, server.getsockname()[1], _CONNECT_S])
        ask = F.udf(_travelling(_connect), "string", useArrow=False)
        count = max(1, slots(spark))
        rows = spark.range(0, count, 1, count).select(ask(F.lit(address)).alias("problem")).collect()
    return next((row.problem for row in rows if row.problem), None)


def _connect(address: str) -> str:
    """Runs in a task, by value."""
    import json
    import socket

    host, port, timeout_s = json.loads(address)
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as exc:
        return f"{socket.gethostname()} cannot connect to the driver at {host}:{port} ({exc})"
    return ""


def _describe_python(wanted: str) -> str:
    """Runs in a task, by value: everything that it uses is imported here."""
    import glob
    import importlib.metadata
    import importlib.util
    import json
    import os
    import platform
    import shutil
    import socket
    import sys
    import tempfile

    def version(name: str) -> str | None:
        if importlib.util.find_spec(name) is None:
            return None
        if name == "kindler":
            return str(importlib.import_module(name).__version__)
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return ""

    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    return json.dumps(
        {
            "host": socket.gethostname(),
            "executable": sys.executable,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in json.loads(wanted)},
            "gpus": sorted(glob.glob("/dev/nvidia[0-9]*")),
            "free_shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
            "free_temp": shutil.disk_usage(folder).free if os.path.isdir(folder) else None,
        }
    )


def _travelling(function: Any) -> Any:
    """The function as one of the program's own: those are sent with their code, not by name."""
    copy = FunctionType(function.__code__, {"__name__": "__main__"}, "describe")
    copy.__module__ = "__main__"
    copy.__qualname__ = "describe"
    return copy


def _cannot_start(text: str) -> ConfigError | None:
    """What a job that failed says about Python on the executors; None where that is not the matter."""
    place = _PLACE.search(text)
    where = f" on {place[1]}" if place else ""
    hint = "Hint: set PYSPARK_PYTHON to the path of such a Python on the executors"
    if other := _OTHER_PYTHON.search(text):
        version = ".".join(map(str, sys.version_info[:2]))
        return ConfigError(
            f"Spark's executors{where} must run Python {version}, as this program does: {other[0]}\n"
            f'{hint}, or ship this environment with kindler.init(master, ship="venv").'
        )
    if nothing := _NO_PYTHON.search(text):
        return ConfigError(f"Spark's executors{where} cannot start Python: {nothing[0]}\n{hint}.")
    return None


def _is_this_python(spark: Any) -> bool:
    """Whether Spark's tasks run on this machine, in the Python of this process."""
    master = spark.conf.get("spark.master", None) or ""
    if not master.startswith("local") or master.startswith("local-cluster"):
        return False
    if is_connect(spark):
        from pyspark import SparkContext

        if SparkContext._active_spark_context is None and "SPARK_LOCAL_REMOTE" not in os.environ:
            return False  # a server that somebody else has started
        asked = spark.conf.get("spark.pyspark.python", None) or os.environ.get("PYSPARK_PYTHON", "python3")
    else:
        asked = spark.sparkContext.pythonExec
    path = shutil.which(asked)
    # Not the files that links lead to: those of two environments may be one and the same.
    return path is not None and os.path.abspath(path) == os.path.abspath(sys.executable)


def _executor_ids(spark: Any) -> Any:
    if is_connect(spark):
        return None  # nobody tells
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    return frozenset(str(listed.apply(number).id()) for number in range(listed.size()))
