"""`kindler.init` and `kindler.stop`: a well-set Spark session, and the end of it.

At most one session of a process is Kindler's own. A session that somebody else started is used as
it is and never stopped. What to ask of Spark is decided in `session_settings.py`, which Java to
run it on in `java.py`. pyspark is imported on the first call, not with this module.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kindler.errors import ConfigError
from kindler.spark.java import find_java
from kindler.spark.session_settings import SessionPlan, requested_settings, same_setting, session_plan
from kindler.spark.shipping import PYTHON, is_shipped, ship_settings
from kindler.spark.versions import require_pyspark, too_old

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOG4J = Path(__file__).with_name("log4j2.properties")
_JVM_EXIT_TIMEOUT_S = 10.0

# Set by us or by pyspark while a session of ours runs; put back by `stop`.
_VARIABLES = (
    "JAVA_HOME",
    "PYSPARK_DRIVER_PYTHON",
    "PYSPARK_PYTHON",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_CONNECT_AUTHENTICATE_TOKEN",
    "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_LOCAL_IP",
    "SPARK_LOCAL_REMOTE",
    "SPARK_REMOTE",
)

_Variables = dict[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    """What `init` started, and what it takes to undo it."""

    session: SparkSession
    wanted: Mapping[str, str]
    owns_jvm: bool
    before: _Variables
    during: _Variables
    process: int


_lock = threading.RLock()
_started: _Started | None = None


def init(
    master: str | None = None,
    cores: int | None = None,
    memory: str | None = None,
    conf: Mapping[str, Any] | None = None,
    *,
    ship: str | None = None,
) -> SparkSession:
    """Give a Spark session that is set up for training; the running one, where there is one.

    A new session uses the Python of this process on its executors, moves data as Arrow, and
    keeps the console quiet. No Java need be installed with `pip install 'kindler[java]'`.

    Args:
        master: Where to run: "local[4]", "spark://host:7077", "yarn", or "sc://host:15002" for a
            Spark Connect server. Default: this machine.
        cores: Cores to use, on this machine or on a standalone cluster. Default: all.
        memory: Memory of the driver, like "4g"; on this machine that is the whole of Spark's.
        conf: Further Spark settings; they win over Kindler's own.
        ship: "venv" packs the environment of this process, a virtual environment or one of conda, and has
            Spark unpack it on the executors of a cluster, whose workers then run in it. None: they have one.

    Returns:
        The session. A running one is used as it is: of `conf`, what Spark lets change at run time
        is applied to it, and anything else that differs is an error.

    Raises:
        ConfigError: An argument cannot work, a running session cannot be changed that way, or Spark is older
            than 3.5.
        MissingExtraError: pyspark is not installed.
        JavaNotFoundError: Spark needs Java and there is none.
    """
    global _started
    wanted = requested_settings(master, cores, memory, conf)
    _refuse_api_mode(wanted, require_pyspark("kindler.init()"))
    with _lock:
        session = _running_session()
        if session is not None:
            _apply(session, wanted)
            if ship is not None:
                _require_shipped(session, ship)
            return session
        _quiet_py4j()
        stop()  # a session of ours that the user stopped: its JVM and variables go first
        _started = _start(wanted if ship is None else {**wanted, **ship_settings(ship, wanted)})
        return _started.session


def _quiet_py4j() -> None:
    """py4j logs every connection that it closes as INFO, a line for each thread that asks Spark something."""
    logger = logging.getLogger("py4j")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)


def stop() -> None:
    """End the session that `init` started, if it did; a session of somebody else stays.

    May be called any number of times, and is called when the process ends.
    """
    global _started
    with _lock:
        started, _started = _started, None
        if started is None or started.process != os.getpid():  # a fork has our variables, not our Spark
            return
        try:
            _end(started)
        finally:
            _restore(started.before, started.during)


def running() -> SparkSession | None:
    """The session that runs, whoever started it; None where there is none."""
    with _lock:
        return _running_session()


def spark_conf(settings: Mapping[str, str]) -> Any:
    """A `SparkConf` with these settings, for programs that build one before they start Spark."""
    require_pyspark("kindler.init()")
    from pyspark import SparkConf

    return SparkConf(loadDefaults=False).setAll(list(settings.items()))


def is_connect(session: SparkSession) -> bool:
    """Whether the session speaks to a Spark Connect server."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def is_on_this_machine(session: SparkSession) -> bool:
    """Whether the session's driver shares this machine, its files and its network."""
    # The driver of a classic session is this process; a Connect client may be anywhere.
    return not is_connect(session) or session.client.host in LOOPBACK


def default_file_system(session: SparkSession) -> str:
    """The file system of paths without a scheme, as Hadoop has it; a Connect client cannot ask."""
    if is_connect(session):
        return "file://"
    context: Any = session.sparkContext
    name = str(context._jsc.hadoopConfiguration().get("fs.defaultFS") or "file:///")
    return "file://" if name.startswith("file:") else name.rstrip("/")


def _refuse_api_mode(wanted: Mapping[str, str], version: tuple[int, int]) -> None:
    if version < (4, 0) and wanted.get("spark.api.mode", "classic") != "classic":
        raise ConfigError(
            f"init(conf={{'spark.api.mode': {wanted['spark.api.mode']!r}}}): pyspark 3.5 does not know this"
            " setting.\nHint: start a Spark Connect server, and pass its address as master: 'sc://host:15002'."
        )


def _require_shipped(session: SparkSession, ship: str) -> None:
    if ship != "venv" or not is_shipped({"spark.archives": session.conf.get("spark.archives", None) or ""}):
        raise ConfigError(
            f"init(ship={ship!r}): a Spark session is already running, and was started without it.\n"
            "Hint: stop it first (kindler.stop(), or spark.stop() if you started it)."
        )


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
    return _session_of_running_context()


def _session_of_running_context() -> SparkSession | None:
    """The session of a program that made a SparkContext and no session yet."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    return SparkSession.builder.getOrCreate() if SparkContext._active_spark_context is not None else None


def _alive(session: SparkSession) -> bool:
    if is_connect(session):
        return not session.client.is_closed
    return getattr(session.sparkContext, "_jsc", None) is not None


def _apply(session: SparkSession, wanted: Mapping[str, str]) -> None:
    """Set what may be set on a running session, all of it or nothing."""
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
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext
    from pyspark.find_spark_home import _find_spark_home

    plan = session_plan(wanted, os.environ, log4j=_LOG4J, spark_home=Path(_find_spark_home()))
    owns_jvm = plan.needs_java and SparkContext._gateway is None
    before = _variables()
    launched: list[subprocess.Popen[bytes]] = []
    try:
        _prepare_environment(plan, start_jvm=owns_jvm)
        with _noting_processes(launched):
            session = _create(plan)
    except BaseException as exc:  # also Ctrl-C while the JVM comes up
        # Java's own words, while the JVM that holds them is there.
        refused = str(exc.java_exception.toString()) if isinstance(exc, Py4JJavaError) else None
        if owns_jvm:
            _stop_context()
            _end_jvm()
        for process in launched:
            _end_process(process)
        _restore(before, _variables())
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
        before=before,
        during=_variables(),
        process=os.getpid(),
    )


@contextlib.contextmanager
def _noting_processes(launched: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Note the JVM as it is launched: pyspark remembers it only once it has answered."""
    java_gateway: Any = importlib.import_module("pyspark.java_gateway")
    launch = java_gateway.Popen

    def noted(*args: Any, **options: Any) -> Any:
        with _interrupts_held():  # between the fork and our knowing of it, nobody else would end it
            launched.append(launch(*args, **options))
        return launched[-1]

    java_gateway.Popen = noted
    try:
        yield
    finally:
        java_gateway.Popen = launch


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Have Ctrl-C wait until the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # it is ignored, or not raised on this thread
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


def _stop_context() -> None:
    """Stop what a start that did not succeed has left half made."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is not None:
        with contextlib.suppress(Py4JError, OSError):
            context.stop()


def _prepare_environment(plan: SessionPlan, *, start_jvm: bool) -> None:
    if start_jvm:
        os.environ["JAVA_HOME"] = str(find_java(newest=_newest_java()).home)
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


def _newest_java() -> int | None:
    """The newest Java that the installed Spark runs on, where that is known."""
    version = require_pyspark("kindler.init()")
    # Tried: pyspark 4.0 runs on Java 17 and fails on 25, 4.3 runs on both; the limits between are a guess.
    return 22 if version < (4, 2) else None


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


def _end(started: _Started) -> None:
    from py4j.protocol import Py4JError

    with contextlib.suppress(Py4JError, OSError):  # the JVM may be gone already
        if _alive(started.session):
            started.session.stop()
    if started.owns_jvm:
        _end_jvm()


def _end_jvm() -> None:
    """End the JVM: pyspark would keep it, with its memory, for a next session of the same settings."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:  # the user has gone on with a context of their own
        return
    gateway: Any = SparkContext._gateway
    SparkContext._gateway = None
    SparkContext._jvm = None
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


def _variables() -> _Variables:
    return {name: os.environ.get(name) for name in _VARIABLES}


def _restore(before: _Variables, during: _Variables) -> None:
    """Put the variables back, except those that the user has changed meanwhile."""
    for name, value in before.items():
        if os.environ.get(name) not in (during[name], None):
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
