"""What `kindler.init` asks of Spark, decided without Spark.

Pure: arguments and an environment go in, a plan comes out. `session.py` carries it out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError

_MASTERS = "local, local[4], local[*], spark://host:7077, yarn, k8s://host:443 or sc://host:15002"
_MASTER = re.compile(r"local(\[[^\]]+\])?|local-cluster\[.+\]|yarn|(spark|k8s|sc)://.+")
_MEMORY = re.compile(r"(\d+)([kmgt]?)b?", flags=re.IGNORECASE)
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOGGING = re.compile(r"log4j2?\.configurationFile")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionPlan:
    """How to start a session.

    Attributes:
        remote: The Spark Connect server to speak to, or None to run a driver here.
        settings: Spark's settings, the caller's own ones last.
        needs_java: Whether a JVM has to be started here.
        quiet: Whether Spark's log is to be cut down to errors.
    """

    remote: str | None
    settings: Mapping[str, str]
    needs_java: bool
    quiet: bool

    @property
    def local(self) -> bool:
        """Whether driver and executors are all on this machine."""
        return self.settings.get("spark.master", "").startswith("local")


def requested_settings(
    master: str | None, cores: int | None, memory: str | None, conf: Mapping[str, Any] | None
) -> dict[str, str]:
    """The caller's arguments as Spark settings, nothing added.

    A Connect server's address is under "spark.remote".

    Raises:
        ConfigError: An argument cannot work, alone or with the others.
    """
    _check(master, cores, memory, conf)
    wanted = {str(key): _text(value) for key, value in (conf or {}).items()}
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


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def session_plan(
    wanted: Mapping[str, str], environ: Mapping[str, str], *, log4j: Path, spark_home: Path
) -> SessionPlan:
    """Complete the caller's settings to those of a well-set session.

    Args:
        wanted: What `requested_settings` gave.
        environ: The process's environment.
        log4j: The logging configuration to use unless the caller or the installation has one.
        spark_home: Where Spark is installed.
    """
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
    """Whether the installation has logging or driver options of its own, which ours would replace."""
    folder = Path(environ.get("SPARK_CONF_DIR") or spark_home / "conf")
    if any((folder / f"log4j2.{ending}").exists() for ending in ("properties", "xml", "yaml", "json")):
        return True
    defaults = folder / "spark-defaults.conf"
    return defaults.exists() and _JAVA_OPTIONS in defaults.read_text(encoding="utf-8", errors="replace")


def same_setting(key: str, one: str | None, other: str | None) -> bool:
    """Whether two values of a setting mean the same, as "1g" and "1024m" do."""
    if one is None or other is None or one == other:
        return one == other
    if key.lower().endswith("memory"):
        return _bytes(one) == _bytes(other)
    return one.lower() == other.lower() and {one.lower(), other.lower()} <= {"true", "false"}


def _bytes(amount: str) -> int | None:
    found = _MEMORY.fullmatch(amount)
    # Spark reads a bare number of memory as mebibytes.
    return int(found[1]) << {"k": 10, "": 20, "m": 20, "g": 30, "t": 40}[found[2].lower()] if found else None
