"""How many workers a Spark application can run side by side, and whether that is enough."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kindler.config import RunSettings
from kindler.errors import ConfigError, StartTimeoutError
from kindler.spark.session import is_connect

_LOOK_AGAIN_S = 0.25
_WORKERS_COME_S = 5.0  # for machines to join a standalone cluster that has just been started
_PAGE_S = 3.0
_NO_LIMIT = 2**31 - 1
_RANGE = 1 << 16  # rows: more than there are cores
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,")
_NOT_HELD = (
    "this Spark application has spark.dynamicAllocation.enabled=true; nodes that Spark jobs feed live beside"
    " Spark's tasks, and Spark may end the executors they are on.\n"
    "Hint: start it with spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances."
)


def slots(spark: SparkSession) -> int:
    """The tasks that can run at the same time right now."""
    known = slots_without_a_job(spark)
    if known is not None:
        return known
    parts = spark.range(_RANGE).select(F.spark_partition_id().alias("part")).distinct().count()
    return _tasks(spark, parts)


def slots_without_a_job(spark: SparkSession) -> int | None:
    """The same, also while a run has all the slots, which a job would wait for; None if unknown."""
    return _connect_slots(spark) if is_connect(spark) else _classic_slots(spark)


def most_slots(spark: SparkSession) -> int | None:
    """The tasks that the application's settings let run at the same time; None where there is no limit."""
    if is_dynamic(spark):
        executors = _number(spark, "spark.dynamicAllocation.maxExecutors", _NO_LIMIT)
        return None if executors == _NO_LIMIT else executors * max(1, _slots_of_executor(spark))
    master = _conf(spark, "spark.master") or ""
    if found := _LOCAL_CLUSTER.match(master):
        return int(found[1]) * _slots_of(spark, int(found[2]))
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
    """The tasks that run at the same time on executors that have so many cores together."""
    return cores // _number(spark, "spark.executor.cores", cores) * _slots_of_executor(spark, cores)


def _slots_of_workers(spark: Any) -> int | None:
    """The tasks that all workers of a standalone cluster could run at the same time; None where nobody says.

    A driver is told what it gets, and not what there is. The worker of an executor has a page that names its
    master, and the master one that names all workers.
    """
    if is_connect(spark) or not (_conf(spark, "spark.master") or "").startswith("spark://"):
        return None
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    logs = [listed.apply(number).executorLogs().get("stdout") for number in range(listed.size())]
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
    """The number of workers to start: as asked, or as many as there are slots.

    Executors may still be starting, so this waits for them, unless there cannot be enough: that is known at
    once where the application's settings say so, and after a few seconds, in which machines may still join,
    where the master of a standalone cluster does. Where Spark allocates executors dynamically, the workers'
    own tasks make it start them, and hold them until the run has ended.

    Args:
        spark: The session.
        workers: How many were asked for; None is all.
        settings: How long to wait.
        detached: Whether Spark's tasks end as soon as the workers run, so that none holds an executor.

    Raises:
        ConfigError: There are fewer slots than workers, or Spark may take the executors away.
    """
    if is_dynamic(spark):
        if detached:
            raise ConfigError(_NOT_HELD)
        return _elastic_workers(spark, workers)
    wanted = workers or 1
    began = time.monotonic()
    while (free := slots(spark)) < wanted:
        waited = time.monotonic() - began
        most = most_slots(spark)
        if most is None and waited > _WORKERS_COME_S:
            most = _slots_of_workers(spark)
        if waited > settings.start_timeout_s:
            most = free
        if most is not None and most < wanted:
            raise ConfigError(
                f"workers={wanted} but this Spark application can run {most} tasks side by side.\n"
                f"Hint: ask for at most {most} workers, or start Spark with more cores"
                " (kindler.init(cores=...), spark.cores.max, more executors)."
            )
        time.sleep(_LOOK_AGAIN_S)  # executors register when they are up; Spark offers nothing to wait on
    return workers or free


def _elastic_workers(spark: SparkSession, workers: int | None) -> int:
    """The number of workers where Spark starts executors for tasks that wait, up to a limit."""
    most = most_slots(spark)
    if most is None:
        if workers is not None:
            return workers
        raise ConfigError(
            "this Spark application has spark.dynamicAllocation.enabled=true and no limit of executors, so"
            " the number of workers cannot be taken from it.\n"
            "Hint: pass workers=..., or set spark.dynamicAllocation.maxExecutors."
        )
    if workers is not None and workers > most:
        raise ConfigError(
            f"workers={workers} but this Spark application can run {most} tasks side by side.\n"
            f"Hint: ask for at most {most} workers, or raise spark.dynamicAllocation.maxExecutors."
        )
    return workers or most


def remaining_workers(
    spark: SparkSession, wanted: int, settings: RunSettings, say: Callable[[str], None]
) -> int:
    """The number of workers to go on with after a loss: as many as wanted, if executors come back in time.

    Args:
        spark: The session.
        wanted: How many there were at first.
        settings: How long to wait.
        say: Called with a line for the user: that it waits, and that the run goes on with fewer workers.

    Raises:
        StartTimeoutError: No executor is left, and none came.
    """
    if is_dynamic(spark):
        return wanted  # executors come when tasks wait for them
    began = time.monotonic()
    longest = max(settings.executor_wait_s, settings.start_timeout_s)
    announced = False
    while (free := slots(spark)) < wanted:
        waited = time.monotonic() - began
        if not announced:
            say(
                f"{free} of {wanted} slots are left; waiting up to {settings.executor_wait_s:g} s for"
                " the lost executor to be replaced (RunSettings(executor_wait_s=...))."
            )
            announced = True
        if free and waited > settings.executor_wait_s:
            say(
                f"no replacement came in {settings.executor_wait_s:g} s: the run goes on with {free} instead"
                f" of {wanted} workers, and with all of them from the end of an epoch on once it is back."
            )
            return free
        if waited > longest:
            raise StartTimeoutError(f"no executor came back in {longest:g} s after a loss.")
        time.sleep(_LOOK_AGAIN_S)
    return wanted


def cores_per_host(spark: SparkSession) -> int | None:
    """The cores that Spark's executors have on a machine, the least of any; None where nobody knows.

    A worker takes its share of those, not of the machine: other applications may have the rest.
    """
    if is_connect(spark):
        cores = _conf(spark, "spark.executor.cores")
        return int(cores) if cores else None
    return least_cores(_executors(spark))


def least_cores(executors: Iterable[tuple[str, int]]) -> int | None:
    """Of the hosts in (host, cores of an executor there), the cores of the one that has the fewest.

    >>> least_cores([("a", 4), ("b", 2), ("b", 3), ("driver", 0)])
    4
    """
    by_host: Counter[str] = Counter()
    for host, cores in executors:
        by_host[host] += cores
    return min((cores for cores in by_host.values() if cores > 0), default=None)


def _executors(spark: Any) -> list[tuple[str, int]]:
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = [listed.apply(number) for number in range(listed.size())]
    return [(str(e.hostPort()).rpartition(":")[0], int(e.totalCores())) for e in executors]


def never_retries(spark: SparkSession) -> bool:
    """Whether Spark does not run a failed task again, as on "local[4]"; on "local[4, 2]" it does."""
    master = _conf(spark, "spark.master") or ""
    return master.startswith("local") and not master.startswith("local-cluster") and "," not in master


def is_dynamic(spark: SparkSession) -> bool:
    """Whether Spark starts executors when tasks wait for them, and ends those without tasks."""
    if _is_local(spark):
        return False  # where Spark does not heed the setting
    return (_conf(spark, "spark.dynamicAllocation.enabled") or "false").lower() == "true"


def _is_local(spark: SparkSession) -> bool:
    return (_conf(spark, "spark.master") or "").startswith("local")


def _number(spark: SparkSession, key: str, default: int) -> int:
    return int(_conf(spark, key) or default)


def _conf(spark: SparkSession, key: str) -> str | None:
    return spark.conf.get(key, None)


def _classic_slots(spark: Any) -> int:
    context = spark.sparkContext._jsc.sc()
    profile = context.resourceProfileManager().defaultResourceProfile()
    return int(context.maxNumConcurrentTasks(profile))  # the number that Spark itself checks gangs against


def _connect_slots(spark: SparkSession) -> int | None:
    """Connect has no scheduler to ask; the plan of a range without a partition count has one a core."""
    plan: Any = spark.range(_RANGE)
    parts = re.search(r"Range \(.*\bsplits=(\d+)", plan._explain_string())
    return None if parts is None else _tasks(spark, int(parts[1]))


def _tasks(spark: SparkSession, cores: int) -> int:
    return cores // int(_conf(spark, "spark.task.cpus") or 1)
