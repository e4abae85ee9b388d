"""`init_nncontext`: the Spark context of a program."""

from __future__ import annotations

from typing import Any

from kindler.errors import ConfigError
from kindler.spark.session import init
from kindler.spark.versions import is_connect

__all__ = ["getOrCreateSparkContext", "init_nncontext", "init_spark_conf", "init_spark_on_local"]


def init_nncontext(
    conf: Any = None, spark_log_level: str = "WARN", redirect_spark_log: bool = True, **options: Any
) -> Any:
    """The running Spark context, or a new one on this machine.

    Args:
        conf: A `SparkConf`, a dict of Spark's settings, or the name of the application.
        spark_log_level: Spark's log level.
        redirect_spark_log: Without effect.
        options: `cluster_mode` ("local" only here; other clusters are started by spark-submit), `cores`,
            `memory`.

    Returns:
        The `SparkContext`. With Spark Connect, which has none, the session: use the DataFrame factories of
        `TFDataset`.
    """
    mode = options.pop("cluster_mode", "local")
    if mode not in ("local", "spark-submit"):
        raise ConfigError(
            f"init_nncontext(cluster_mode={mode!r}): start the program with spark-submit, or call"
            " kindler.init(master=...) before init_nncontext()."
        )
    known = {name: options.pop(name) for name in ("cores", "memory") if name in options}
    if options:
        raise ConfigError(f"init_nncontext: unknown options {sorted(options)}.")
    if known.get("cores") == "*":
        known.pop("cores")
    session = init(conf=_settings(conf), **known)
    if is_connect(session):
        return session
    context = session.sparkContext
    context.setLogLevel(spark_log_level)
    return context


def init_spark_on_local(cores: int | str = 2, conf: Any = None, **options: Any) -> Any:
    """A Spark context on this machine with so many cores; "*" takes all."""
    return init_nncontext(conf, cores=cores)


def getOrCreateSparkContext(conf: Any = None, appName: str | None = None) -> Any:
    return init_nncontext(conf if conf is not None else appName)


def init_spark_conf(conf: Any = None) -> Any:
    """A `SparkConf` for `init_nncontext`; Kindler needs no settings of its own in it."""
    from kindler.spark.session import spark_conf

    return spark_conf(_settings(conf) or {})


def _settings(conf: Any) -> dict[str, Any] | None:
    if conf is None:
        return None
    if isinstance(conf, str):
        return {"spark.app.name": conf}
    if hasattr(conf, "getAll"):
        return dict(conf.getAll())
    if isinstance(conf, dict):
        return conf
    raise ConfigError(
        f"init_nncontext takes a SparkConf, a dict or a name; received {type(conf).__qualname__}."
    )
