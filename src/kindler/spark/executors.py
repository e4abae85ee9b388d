"""What Spark's executors can run: how many workers, in which Python, and where they meet.

Before a run, a task on each slot reports its Python and packages. The function travels by value and uses the
standard library alone, so that it also runs where Kindler or Arrow is missing. Answers are kept while the
application has the same executors; where those are this very Python, as on "local[4]", nothing is asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from types import FunctionType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import kindler
from kindler import limits
from kindler.config import RunSettings
from kindler.engine.placement import address_towards
from kindler.errors import ConfigError, StartTimeoutError
from kindler.spark.session import LOOPBACK, is_on_this_machine
from kindler.spark.versions import (
    active_context,
    concurrent_tasks,
    decommission,
    decommissioned,
    executor_summaries,
    explained,
    is_connect,
)

_POLL_S = 0.25
_JOIN_S = 5.0  # for machines to join a standalone cluster that has just been started
_PAGE_S = 3.0
_CONNECT_S = 10.0
_NO_LIMIT = 2**31 - 1
_RANGE = 1 << 16  # rows: more than there are cores
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,")
_ALWAYS = ("kindler", "numpy", "pyarrow", "cloudpickle")
_PLACE = re.compile(r"\(TID \d+\) \((\S+) executor \S+\)")
_OTHER_PYTHON = re.compile(r"Python in worker has different version[^\n]*")
_NO_PYTHON = re.compile(r'Cannot run program "[^"]*"[^\n]*?: ([^\n]*)')
# By session: which executors were asked about which packages, and what they said.
_answers: weakref.WeakKeyDictionary[Any, tuple[Any, list[ExecutorPython]]] = weakref.WeakKeyDictionary()


def slots(spark: SparkSession) -> int:
    known = slots_without_a_job(spark)
    if known is not None:
        return known
    parts = spark.range(_RANGE).select(F.spark_partition_id().alias("part")).distinct().count()
    return parts // _number(spark, "spark.task.cpus", 1)


def slots_without_a_job(spark: SparkSession) -> int | None:
    """Without a job, which would wait while a run has all slots; None if unknown."""
    if not is_connect(spark):
        return concurrent_tasks(spark)
    # Connect has no scheduler to ask; the plan of a range without a partition count has one a core.
    parts = re.search(r"Range \(.*\bsplits=(\d+)", explained(spark.range(_RANGE)))
    return None if parts is None else int(parts[1]) // _number(spark, "spark.task.cpus", 1)


def most_slots(spark: SparkSession) -> int | None:
    """Concurrent tasks that the settings allow; None without a limit."""
    if is_dynamic(spark):
        executors = _number(spark, "spark.dynamicAllocation.maxExecutors", _NO_LIMIT)
        return None if executors == _NO_LIMIT else executors * max(1, _slots_of_executor(spark))
    master = _master(spark)
    if sizes := _LOCAL_CLUSTER.match(master):
        return int(sizes[1]) * _slots_of(spark, int(sizes[2]))
    if master.startswith("local"):
        return slots(spark)
    if master.startswith("spark://"):
        limit = _conf(spark, "spark.cores.max")
        return None if limit is None else _slots_of(spark, int(limit))
    if master.startswith(("yarn", "k8s://")):
        return _number(spark, "spark.executor.instances", 2) * _slots_of_executor(spark)
    return None


def _slots_of_executor(spark: SparkSession, cores: int = 1) -> int:
    return _number(spark, "spark.executor.cores", cores) // _number(spark, "spark.task.cpus", 1)


def _slots_of(spark: SparkSession, cores: int) -> int:
    return cores // _number(spark, "spark.executor.cores", cores) * _slots_of_executor(spark, cores)


def _slots_of_workers(spark: Any) -> int | None:
    """None if unknown. A driver is told what it gets, not what there is: this reads the web pages of an
    executor's worker, and of its master."""
    if is_connect(spark) or not _master(spark).startswith("spark://"):
        return None
    logs = [executor.executorLogs().get("stdout") for executor in executor_summaries(spark)]
    pages = [urlsplit(str(log.get())) for log in logs if log.isDefined()]
    try:
        worker = _page(f"{pages[0].scheme}://{pages[0].netloc}/json/")
        workers = _page(f"{worker['masterwebuiurl'].rstrip('/')}/json/")["workers"]
        return sum(_slots_of(spark, int(each["cores"])) for each in workers if each["state"] == "ALIVE")
    except (OSError, ValueError, LookupError, TypeError):  # no pages, or nobody may read them
        return None


def _page(url: str) -> Any:
    opener = build_opener(ProxyHandler({}))  # a machine of the cluster's
    with opener.open(url, timeout=_PAGE_S) as page:
        return json.load(page)


def resolve_workers(
    spark: SparkSession, workers: int | None, settings: RunSettings, *, detached: bool = False
) -> int:
    """The number of workers to start: as requested, or one per slot.

    Waits for executors that are still starting, unless there cannot be enough: the settings tell at once, a
    standalone master after a few seconds in which machines may still join. With dynamic allocation, the
    workers' own tasks make Spark start and hold executors; `detached` workers have none.

    Raises ConfigError if there are fewer slots than workers, or Spark may take the executors away.
    """
    if is_dynamic(spark):
        if detached:
            raise ConfigError(
                "this Spark application has spark.dynamicAllocation.enabled=true; nodes that Spark jobs feed"
                " run next to Spark's tasks, and Spark may end the executors they are on.\n"
                "Hint: start it with spark.dynamicAllocation.enabled=false and a fixed"
                " spark.executor.instances."
            )
        return _elastic_workers(spark, workers)
    wanted = workers or 1
    began = time.monotonic()
    while (free := slots(spark)) < wanted:
        waited = time.monotonic() - began
        most = most_slots(spark)
        if most is None and waited > _JOIN_S:
            most = _slots_of_workers(spark)
        if waited > settings.start_timeout_s:
            most = free
        if most is not None and most < wanted:
            hint = "or start Spark with more cores (kindler.init(cores=...), spark.cores.max, more executors)"
            raise _too_few(wanted, most, hint)
        time.sleep(_POLL_S)  # executors register when they are up; Spark offers nothing to wait on
    return workers or free


def _elastic_workers(spark: SparkSession, workers: int | None) -> int:
    most = most_slots(spark)
    if workers is None and most is None:
        raise ConfigError(
            "this Spark application has spark.dynamicAllocation.enabled=true and no limit of executors, so"
            " the number of workers cannot be taken from it.\n"
            "Hint: pass workers=..., or set spark.dynamicAllocation.maxExecutors."
        )
    if workers is not None and most is not None and workers > most:
        raise _too_few(workers, most, "or raise spark.dynamicAllocation.maxExecutors")
    return workers or most or 1


def _too_few(workers: int, most: int, hint: str) -> ConfigError:
    return ConfigError(
        f"workers={workers} but this Spark application can run {most} tasks side by side.\n"
        f"Hint: ask for at most {most} workers, {hint}."
    )


def remaining_workers(
    spark: SparkSession, wanted: int, settings: RunSettings, say: Callable[[str], None]
) -> int:
    """As many as wanted, if executors come back in time; raises StartTimeoutError if none is left."""
    if is_dynamic(spark):
        return wanted  # executors come when tasks wait for them
    began = time.monotonic()
    longest = max(settings.executor_wait_s, settings.start_timeout_s)
    announced = False
    while (free := slots(spark)) < wanted:
        waited = time.monotonic() - began
        if not announced:
            announced = True
            say(
                f"{free} of {wanted} slots are left; waiting up to {settings.executor_wait_s:g} s for"
                " the lost executor to be replaced (RunSettings(executor_wait_s=...))."
            )
        if free and waited > settings.executor_wait_s:
            say(
                f"no replacement came in {settings.executor_wait_s:g} s: the run continues with {free} "
                f"instead"
                f" of {wanted} workers, and with all of them from the end of an epoch once it is back."
            )
            return free
        if waited > longest:
            raise StartTimeoutError(f"no executor came back in {longest:g} s after a loss.")
        time.sleep(_POLL_S)
    return wanted


class Polling(threading.Thread):
    """Looks at what Spark says every `every_s` until the block ends, or a look returns False."""

    def __init__(self, name: str, every_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._every_s = every_s
        self._ended = threading.Event()

    def __enter__(self) -> Polling:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self.join(limits.CLOSE_S)  # a JVM that hangs may keep it for ever

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            with suppress(Py4JError, OSError):  # the session may end meanwhile, or executors come and go
                if self.look() is False:
                    return

    def look(self) -> bool | None:
        raise NotImplementedError


class DecommissionWatch(Polling):
    """Tells of each executor with running tasks that Spark decommissions, unless `known` names it."""

    def __init__(self, spark: SparkSession, tell: Callable[..., None], known: Sequence[str]) -> None:
        super().__init__("kindler-decommissions", limits.NOTICE_POLL_S)
        self._spark, self._tell, self._known = spark, tell, set(known)

    def look(self) -> None:
        ids = {number for number in decommissioned(self._spark) if f"executor {number}" not in self._known}
        for executor in executor_summaries(self._spark) if ids else ():
            if str(executor.id()) in ids and executor.activeTasks():
                name = f"executor {executor.id()}"
                self._known.add(name)
                host = str(executor.hostPort()).rpartition(":")[0]
                self._tell(host, f"Spark decommissions {name}", key=name)


def leave(spark: SparkSession, address: str) -> None:
    """Let Spark take back the executors of a machine, if this application lets it decommission any."""
    if not has_executors(spark) or _conf(spark, "spark.decommission.enabled") != "true":
        return
    with suppress(Py4JError, OSError):
        hosts = {str(each.hostPort()).rpartition(":")[0].strip("[]") for each in executor_summaries(spark)}
        for host in {address} & hosts or {each for each in hosts if socket.gethostbyname(each) == address}:
            decommission(spark, host)


def spreads_evenly(spark: SparkSession, workers: int) -> bool:
    """Whether jobs of one task each leave no executor idle that the tasks of one job would use."""
    if is_connect(spark):
        return False
    if is_dynamic(spark) or concurrent_tasks(spark) == workers:
        return True
    return all(
        each.totalCores() <= _number(spark, "spark.task.cpus", 1) for each in executor_summaries(spark)
    )


def cores_per_host(spark: SparkSession) -> int | None:
    """The fewest on any machine. A worker takes its share of those: other applications may have the rest."""
    if is_connect(spark):
        cores = _conf(spark, "spark.executor.cores")
        return int(cores) if cores else None
    by_host: Counter[str] = Counter()
    for executor in executor_summaries(spark):
        by_host[str(executor.hostPort()).rpartition(":")[0]] += int(executor.totalCores())
    return min((cores for cores in by_host.values() if cores > 0), default=None)  # a driver has none


def never_retries(spark: SparkSession) -> bool:
    """True on "local[4]"; on "local[4, 2]" Spark runs failed tasks again."""
    return _in_one_process(spark) and "," not in _master(spark)


def has_executors(spark: SparkSession) -> bool:
    """Whether a classic session has executors, rather than this process alone."""
    return not is_connect(spark) and not _in_one_process(spark)


def is_dynamic(spark: SparkSession) -> bool:
    """Whether Spark starts executors for tasks that wait, and ends idle ones."""
    if _master(spark).startswith("local"):
        return False  # where Spark does not heed the setting
    return (_conf(spark, "spark.dynamicAllocation.enabled") or "false").lower() == "true"


def _in_one_process(spark: SparkSession) -> bool:
    return _master(spark).startswith("local") and not _master(spark).startswith("local-cluster")


def _master(spark: SparkSession) -> str:
    return _conf(spark, "spark.master") or ""


def _conf(spark: SparkSession, key: str) -> str | None:
    return spark.conf.get(key, None)


def _number(spark: SparkSession, key: str, default: int) -> int:
    return int(_conf(spark, key) or default)


def meets_at_driver(spark: SparkSession, settings: RunSettings) -> bool:
    if settings.rendezvous != "auto":
        return settings.rendezvous == "driver"
    return is_on_this_machine(spark)  # executors reach the driver of a classic session anyhow


def driver_hosts(spark: Any) -> tuple[str, str]:
    if is_connect(spark):
        server = str(spark.client.host)
        here = "127.0.0.1" if server in LOOPBACK else address_towards(server)
        return here, here
    reached = _conf(spark, "spark.driver.host") or socket.gethostbyname(socket.gethostname())
    bind = _conf(spark, "spark.driver.bindAddress") or reached
    return bind.strip("[]"), reached.strip("[]")


@dataclass(frozen=True)
class ExecutorPython:
    """`versions` has None for missing packages, "" for unknown versions; free space is in bytes."""

    host: str
    executable: str
    python: str
    versions: dict[str, str | None]
    gpus: tuple[str, ...] = ()
    free_shm: int | None = None
    free_temp: int | None = None

    def complaints(self, packages: Sequence[str]) -> list[str]:
        missing = [f"{name} is not installed" for name in packages if self.versions.get(name) is None]
        own = self.versions.get("kindler")
        if own is not None and own != kindler.__version__:
            missing.append(f"kindler is {own}, and {kindler.__version__} on the driver")
        return missing


def check_executors(spark: SparkSession, *packages: str | None) -> None:
    """Raise ConfigError if workers could not start on the executors, with what is missing on which hosts."""
    if _is_this_python(spark):
        return
    # What this process lacks as well is not needed: tf_keras does without keras.
    wanted = (*_ALWAYS, *(name for name in packages if name and find_spec(name) is not None))
    faults = []
    for each in executor_pythons(spark, wanted):
        if complaints := each.complaints(wanted):
            faults.append(f"  {each.host} ({each.executable}, Python {each.python}): {'; '.join(complaints)}")
    if faults:
        raise ConfigError(
            "workers cannot run on the executors of this Spark application:\n"
            + "\n".join(sorted(faults))
            + "\nHint: install it there; or set PYSPARK_PYTHON to a Python that has it;"
            ' or ship this environment with kindler.init(master, ship="venv").'
        )


def executor_pythons(spark: SparkSession, packages: Sequence[str]) -> list[ExecutorPython]:
    """Distinct ones. Raises ConfigError if Python cannot start there, or is of another version."""
    ids = None if is_connect(spark) else frozenset(str(each.id()) for each in executor_summaries(spark))
    asked = ids, tuple(packages)
    known = _answers.get(spark)
    if known is not None and known[0] == asked:
        return known[1]
    try:
        rows = [json.loads(answer) for answer in _ask(spark, _describe_python, json.dumps(list(packages)))]
    except (PySparkException, Py4JError) as exc:
        raise _cannot_start(str(exc)) or exc from None
    all_pythons = (ExecutorPython(**{**row, "gpus": tuple(row["gpus"])}) for row in rows)
    by_place = {(each.host, each.executable): each for each in all_pythons}
    pythons = [by_place[place] for place in sorted(by_place)]
    _answers[spark] = asked, pythons
    return pythons


def reach_driver(spark: SparkSession) -> str | None:
    bind, advertised = driver_hosts(spark)
    with socket.create_server((bind, 0), family=socket.AF_INET6 if ":" in bind else socket.AF_INET) as server:
        address = json.dumps([advertised, server.getsockname()[1], _CONNECT_S])
        return next(filter(None, _ask(spark, _connect, address)), None)


def _ask(spark: SparkSession, question: Any, argument: str) -> list[str]:
    # As one of the program's own, since those are sent with their code and not by name.
    copy = FunctionType(question.__code__, {"__name__": "__main__"}, "describe")
    copy.__module__, copy.__qualname__ = "__main__", "describe"
    function = F.udf(copy, "string", useArrow=False)
    count = max(1, slots(spark))
    rows = spark.range(0, count, 1, count).select(function(F.lit(argument)).alias("answer")).collect()
    return [row.answer for row in rows]


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
    """Runs in a task, by value: imports everything it uses."""
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


def _cannot_start(text: str) -> ConfigError | None:
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
    if not _in_one_process(spark):
        return False
    if is_connect(spark):
        if active_context() is None and "SPARK_LOCAL_REMOTE" not in os.environ:
            return False  # a server that somebody else has started
        asked = _conf(spark, "spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON", "python3")
    else:
        asked = spark.sparkContext.pythonExec
    path = shutil.which(asked)
    # Not the files that links lead to: those of two environments may be one and the same.
    return path is not None and os.path.abspath(path) == os.path.abspath(sys.executable)
