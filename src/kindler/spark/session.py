"""`kindler.init` and `kindler.stop`. At most one session of a process is Kindler's own; a session that
somebody else started is used as it is and never stopped. pyspark is imported on the first call, not
with this module."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindler.errors import ConfigError
from kindler.spark.java import find_java
from kindler.spark.shipping import PYTHON, is_shipped, ship_settings
from kindler.spark.versions import (
    active_context,
    has_gateway,
    is_connect,
    java_context,
    noting_jvms,
    require_pyspark,
    spark_home,
    take_gateway,
    too_old,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOG4J = Path(__file__).with_name("log4j2.properties")
_JVM_EXIT_TIMEOUT_S = 10.0
_MASTERS = "local, local[4], local[*], spark://host:7077, yarn, k8s://host:443 or sc://host:15002"
_MASTER = re.compile(r"local(\[[^\]]+\])?|local-cluster\[.+\]|yarn|(spark|k8s|sc)://.+")
_MEMORY = re.compile(r"(\d+)([kmgt]?)b?", flags=re.IGNORECASE)
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOGGING = re.compile(r"log4j2?\.configurationFile")

_Changes = dict[str, tuple[str | None, str | None]]  # a variable's value before and after


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    session: SparkSession
    wanted: Mapping[str, str]
    owns_jvm: bool
    environment: _Changes  # put back by `stop`
    process: int


_lock = threading.RLock()
_started: _Started | None = None
# By session and setting: how many blocks need it changed, and what it was before.
_changed: dict[tuple[int, str], tuple[int, str | None]] = {}


def init(
    master: str | None = None,
    cores: int | None = None,
    memory: str | None = None,
    conf: Mapping[str, Any] | None = None,
    *,
    ship: str | None = None,
) -> SparkSession:
    """Start a Spark session configured for training, or use the running one.

    A new session uses the Python of this process on its executors, moves data as Arrow, and
    keeps the console quiet. With `pip install 'kindler[java]'`, no Java has to be installed.

    Args:
        master: Where to run: "local[4]", "spark://host:7077", "yarn", or "sc://host:15002" for a
            Spark Connect server. Default: this machine.
        cores: Cores to use, on this machine or on a standalone cluster. Default: all.
        memory: Memory of the driver, like "4g"; on this machine that is the whole of Spark's.
        conf: Further Spark settings; they override Kindler's own.
        ship: "venv" packs the virtual or conda environment of this process and has Spark unpack it on the
            executors of a cluster, whose workers then run in it. Default: executors have their own.

    Returns:
        The session. On a running one, settings of `conf` that Spark can change at run time are applied;
        any other difference is an error.

    Raises:
        ConfigError: An argument is invalid, a running session cannot be changed that way, or Spark is older
            than 3.5.
        MissingExtraError: pyspark is not installed.
        JavaNotFoundError: Spark needs Java, and none was found.
    """
    global _started
    wanted = requested_settings(master, cores, memory, conf)
    if require_pyspark("kindler.init()") < (4, 0) and wanted.get("spark.api.mode", "classic") != "classic":
        raise ConfigError(
            f"init(conf={{'spark.api.mode': {wanted['spark.api.mode']!r}}}): pyspark 3.5 does not know this"
            " setting.\nHint: start a Spark Connect server, and pass its address as master: 'sc://host:15002'."
        )
    with _lock:
        session = _running_session()
        if session is not None:
            _apply(session, wanted)
            archives = {"spark.archives": session.conf.get("spark.archives", None) or ""}
            if ship is not None and (ship != "venv" or not is_shipped(archives)):
                raise ConfigError(
                    f"init(ship={ship!r}): a Spark session is already running, and was started without it.\n"
                    "Hint: stop it first (kindler.stop(), or spark.stop() if you started it)."
                )
            return session
        logger = logging.getLogger("py4j")  # logs at INFO for each thread that used Spark
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
        stop()  # a session of ours that the user stopped: its JVM and variables go first
        _started = _start(wanted if ship is None else {**wanted, **ship_settings(ship, wanted)})
        return _started.session


def stop() -> None:
    """Stop the session that `init` started, if any; sessions started by others stay.

    Safe to call repeatedly; also called when the process ends.
    """
    global _started
    with _lock:
        started, _started = _started, None
        if started is None or started.process != os.getpid():  # a fork has our variables, not our Spark
            return
        from py4j.protocol import Py4JError

        try:
            with contextlib.suppress(Py4JError, OSError):  # the JVM may be gone already
                if _alive(started.session):
                    started.session.stop()
            if started.owns_jvm:
                _end_jvm()
        finally:
            _restore(started.environment)


def running() -> SparkSession | None:
    with _lock:
        return _running_session()


def spark_conf(settings: Mapping[str, str]) -> Any:
    require_pyspark("kindler.init()")
    from pyspark import SparkConf

    return SparkConf(loadDefaults=False).setAll(list(settings.items()))


@contextlib.contextmanager
def setting(session: SparkSession, key: str, value: str) -> Iterator[None]:
    """Change a setting within the block; of overlapping blocks, the last one restores it."""
    place = id(session), key
    with _lock:
        users, before = _changed.get(place, (0, None))
        if users == 0:
            before = session.conf.get(key, None)
            session.conf.set(key, value)
        _changed[place] = users + 1, before
    try:
        yield
    finally:
        with _lock:
            users, before = _changed.pop(place)
            if users > 1:
                _changed[place] = users - 1, before
            elif before is None:
                session.conf.unset(key)
            else:
                session.conf.set(key, before)


def is_on_this_machine(session: SparkSession) -> bool:
    # The driver of a classic session is this process; a Connect client may be anywhere.
    return not is_connect(session) or session.client.host in LOOPBACK


def default_file_system(session: SparkSession) -> str:
    """The scheme of paths without one, from Hadoop; a Connect client cannot ask."""
    if is_connect(session):
        return "file://"
    name = str(java_context(session.sparkContext).hadoopConfiguration().get("fs.defaultFS") or "file:///")
    return "file://" if name.startswith("file:") else name.rstrip("/")


def _running_session() -> SparkSession | None:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    # A Connect session may be there without pyspark's own switch for it being set.
    connect = sys.modules.get("pyspark.sql.connect.session")
    for kind in filter(None, (SparkSession, getattr(connect, "SparkSession", None))):
        with contextlib.suppress(PySparkRuntimeError):
            session: SparkSession = kind.active()
            if _alive(session):
                return session
    # A program may have made a SparkContext and no session yet.
    return SparkSession.builder.getOrCreate() if active_context() is not None else None


def _alive(session: SparkSession) -> bool:
    if is_connect(session):
        return not session.client.is_closed
    return java_context(session.sparkContext) is not None


def _apply(session: SparkSession, wanted: Mapping[str, str]) -> None:
    """All or nothing."""
    ours = _started.wanted if _started is not None and _started.session is session else {}
    changes = {
        key: value
        for key, value in wanted.items()
        if ours.get(key) != value and not same_setting(key, value, _current(session, key, value))
    }
    fixed = [key for key in changes if key == "spark.remote" or not session.conf.isModifiable(key)]
    if fixed:
        lines = "\n".join(f"  {key} = {changes[key]} (it has {_current(session, key, '')})" for key in fixed)
        raise ConfigError(
            f"init: a Spark session is already running, and these cannot be changed on it:\n{lines}\n"
            "Hint: call kindler.init() without them to use that session, or stop it first"
            " (kindler.stop(), or spark.stop() if you started it)."
        )
    for key, value in changes.items():
        session.conf.set(key, value)


def _current(session: SparkSession, key: str, wanted: str) -> str | None:
    from pyspark.errors import PySparkException

    if key == "spark.api.mode":
        return "connect" if is_connect(session) else "classic"
    if key == "spark.remote":
        host = session.client.host if is_connect(session) else None
        # Of the address only the host can be read back.
        return wanted if host and host == wanted.removeprefix("sc://").split("/")[0].split(":")[0] else host
    try:
        value: str | None = session.conf.get(key)
    except PySparkException:  # neither set nor known
        return None
    return value


def _start(wanted: Mapping[str, str]) -> _Started:
    from py4j.protocol import Py4JError, Py4JJavaError

    plan = session_plan(wanted, os.environ, log4j=_LOG4J, spark_home=spark_home())
    owns_jvm = plan.needs_java and not has_gateway()
    before = dict(os.environ)
    launched: list[subprocess.Popen[bytes]] = []
    try:
        _prepare_environment(plan, start_jvm=owns_jvm)
        with noting_jvms(launched):  # pyspark remembers one only after it has answered
            session = _create(plan)
    except BaseException as exc:  # also Ctrl-C while the JVM comes up
        # Java's own words, while the JVM that holds them is there.
        refused = str(exc.java_exception.toString()) if isinstance(exc, Py4JJavaError) else None
        if owns_jvm:
            if (context := active_context()) is not None:
                with contextlib.suppress(Py4JError, OSError):
                    context.stop()
            _end_jvm()
        for process in launched:
            _end_process(process)
        _restore(_changes(before))
        if refused is None:
            raise
        raise ConfigError(
            f"init: Spark did not start: {refused}\nRequested settings: {dict(wanted)}."
        ) from None
    atexit.register(stop)
    return _Started(
        session=session,
        wanted=dict(wanted),
        owns_jvm=owns_jvm,
        environment=_changes(before),
        process=os.getpid(),
    )


def _prepare_environment(plan: SessionPlan, *, start_jvm: bool) -> None:
    if start_jvm:
        # Tried: pyspark 4.0 runs on Java 17 and fails on 25, 4.3 runs on both; the limit between is a guess.
        newest = 22 if require_pyspark("kindler.init()") < (4, 2) else None
        os.environ["JAVA_HOME"] = str(find_java(newest=newest).home)
    if plan.remote is None:
        if is_shipped(plan.settings):
            os.environ["PYSPARK_PYTHON"] = PYTHON
        elif "spark.pyspark.python" in plan.settings:
            # A driver that is running already does not look at the setting.
            os.environ["PYSPARK_PYTHON"] = plan.settings["spark.pyspark.python"]
        # Spark's own default is whatever `python3` is on PATH, most often not this environment's.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if plan.local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _create(plan: SessionPlan) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    if plan.remote is not None:
        builder = builder.remote(plan.remote)
    session = builder.config(map=dict(plan.settings)).getOrCreate()
    if plan.remote is not None and (complaint := too_old(session.version)) is not None:
        session.stop()
        raise ConfigError(f"init(master={plan.remote!r}): the server's Spark {complaint}")
    if plan.quiet and not is_connect(session):
        session.sparkContext.setLogLevel("ERROR")  # for a JVM that was there before our log4j file
    return session


def _end_jvm() -> None:
    """pyspark would keep the JVM, with its memory, for a next session of the same settings."""
    from py4j.protocol import Py4JError

    if active_context() is not None:  # the user has gone on with a context of their own
        return
    gateway = take_gateway()
    if gateway is None:
        return
    process: subprocess.Popen[bytes] | None = gateway.proc
    with contextlib.suppress(Py4JError, OSError):
        gateway.shutdown()
    if process is not None:
        _end_process(process)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()  # the JVM ends with its standard input
    try:
        process.wait(_JVM_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_JVM_EXIT_TIMEOUT_S)


def _changes(before: Mapping[str, str]) -> _Changes:
    """The variables that we or pyspark have changed since."""
    names = {*before, *os.environ}
    pairs = {name: (before.get(name), os.environ.get(name)) for name in names}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _restore(changes: _Changes) -> None:
    """Leaves variables alone that the user has changed meanwhile."""
    for name, (old, new) in changes.items():
        if os.environ.get(name) not in (new, None):
            continue
        if old is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = old


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionPlan:
    remote: str | None
    settings: Mapping[str, str]
    needs_java: bool
    quiet: bool

    @property
    def local(self) -> bool:
        return self.settings.get("spark.master", "").startswith("local")


def requested_settings(
    master: str | None, cores: int | None, memory: str | None, conf: Mapping[str, Any] | None
) -> dict[str, str]:
    """The arguments as Spark settings, nothing added; a Connect server is under "spark.remote"."""
    _check(master, cores, memory, conf)
    wanted = {
        str(key): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in (conf or {}).items()
    }
    if master is not None and master.startswith("sc://"):
        wanted["spark.remote"] = master
    elif master is not None or cores is not None:
        wanted.update(_master_settings(master or "local", cores))
    if memory is not None:
        wanted["spark.driver.memory"] = memory.lower()
    return wanted


def _check(master: str | None, cores: int | None, memory: str | None, conf: Mapping[str, Any] | None) -> None:
    if master is not None and not _MASTER.fullmatch(master):
        raise ConfigError(f"init(master={master!r}): not a Spark master.\nHint: use {_MASTERS}.")
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int) or cores < 1):
        raise ConfigError(
            f"init(cores={cores!r}): cores must be a whole number of at least 1, or None for all."
        )
    if memory is not None and not (isinstance(memory, str) and _MEMORY.fullmatch(memory)):
        raise ConfigError(f'init(memory={memory!r}): not a memory size.\nHint: write it as "512m" or "4g".')
    if conf is not None and not isinstance(conf, Mapping):
        raise ConfigError(
            f"init(conf=...): expected a dict, received a {type(conf).__name__}.\n"
            'Hint: pass a dict, like conf={"spark.sql.shuffle.partitions": 8}.'
        )
    for name, value in (("cores", cores), ("memory", memory)):
        if value is not None and master is not None and master.startswith("sc://"):
            raise ConfigError(
                f"init(master={master!r}, {name}={value!r}): a Connect server sets its own {name}.\n"
                f"Hint: leave out {name}."
            )


def _master_settings(master: str, cores: int | None) -> dict[str, str]:
    if cores is None:
        return {"spark.master": master}
    if master in ("local", "local[*]", f"local[{cores}]"):
        return {"spark.master": f"local[{cores}]"}
    if master.startswith("spark://"):
        return {"spark.master": master, "spark.cores.max": str(cores)}
    raise ConfigError(
        f"init(master={master!r}, cores={cores}): this master sets the cores.\n"
        'Hint: leave out cores, or set conf={"spark.executor.instances": ..., "spark.executor.cores": ...}.'
    )


def session_plan(
    wanted: Mapping[str, str], environ: Mapping[str, str], *, log4j: Path, spark_home: Path
) -> SessionPlan:
    """Add Kindler's defaults; `log4j` is used unless the caller or the installation configures logging."""
    remote = wanted.get("spark.remote")
    if remote is None and "spark.master" not in wanted:
        remote = environ.get("SPARK_REMOTE")
    if remote is not None and remote.startswith("sc://"):
        settings = {key: value for key, value in wanted.items() if key != "spark.remote"}
        return SessionPlan(remote=remote, settings=settings, needs_java=False, quiet=False)
    if "PYSPARK_GATEWAY_PORT" in environ:  # spark-submit has started the JVM and chosen the master
        settings = {"spark.sql.execution.arrow.pyspark.enabled": "true", **wanted}
        return SessionPlan(remote=None, settings=settings, needs_java=False, quiet=False)
    master = wanted.get("spark.master") or remote or "local[*]"
    settings = {**_defaults(master), **wanted, "spark.master": master}
    quiet = not _LOGGING.search(wanted.get(_JAVA_OPTIONS, "")) and not _configured(environ, spark_home)
    if quiet:
        option = f"-Dlog4j2.configurationFile={log4j.as_uri()}"
        settings[_JAVA_OPTIONS] = " ".join(filter(None, [wanted.get(_JAVA_OPTIONS), option]))
    if remote is not None:  # SPARK_REMOTE=local[2]: a Connect server in this process
        settings["spark.api.mode"] = "connect"
    return SessionPlan(remote=None, settings=settings, needs_java=True, quiet=quiet)


def _defaults(master: str) -> dict[str, str]:
    settings = {
        "spark.app.name": "kindler",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if master.startswith("local"):
        # Nobody else has to reach this driver, and a laptop's name may not resolve.
        settings.update({"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"})
    return settings


def _configured(environ: Mapping[str, str], spark_home: Path) -> bool:
    folder = Path(environ.get("SPARK_CONF_DIR") or spark_home / "conf")
    if any((folder / f"log4j2.{ending}").exists() for ending in ("properties", "xml", "yaml", "json")):
        return True
    defaults = folder / "spark-defaults.conf"
    return defaults.exists() and _JAVA_OPTIONS in defaults.read_text(encoding="utf-8", errors="replace")


def same_setting(key: str, one: str | None, other: str | None) -> bool:
    """Compares by meaning: "1g" is "1024m"."""
    if one is None or other is None or one == other:
        return one == other
    if key.lower().endswith("memory"):
        return _bytes(one) == _bytes(other)
    return one.lower() == other.lower() and {one.lower(), other.lower()} <= {"true", "false"}


def _bytes(amount: str) -> int | None:
    parts = _MEMORY.fullmatch(amount)
    # Spark reads a bare number of memory as mebibytes.
    return int(parts[1]) << {"k": 10, "": 20, "m": 20, "g": 30, "t": 40}[parts[2].lower()] if parts else None
