"""Analytics Zoo's module paths: `zoo.tfpark` is `kindler.compat.zoo.tfpark`, and so on.

Here are also `zoo.common.nncontext` and the table of old paths whose names are in another module.
"""

from __future__ import annotations

from typing import Any

from kindler.compat.bigdl.alias import alias
from kindler.compat.not_provided import refuse_the_rest
from kindler.errors import ConfigError
from kindler.spark.session import init, spark_conf
from kindler.spark.versions import is_connect

__all__ = ["getOrCreateSparkContext", "init_nncontext", "init_spark_conf", "init_spark_on_local"]

_CALLBACKS = "base", "maincallback", "maxsteps", "model_checkpoint", "tensorboard"
_ESTIMATORS = "bigdl", "mxnet", "openvino", "pytorch", "tf", "tf2"
_IMAGES = "parquet_dataset", "preprocessing", "utils", "voc_dataset"
_PATHS = {
    "common.nncontext": "",
    "feature.common": "feature",
    "feature.image": "feature",
    "feature.text": "feature",
    "orca.common": "orca",
    "orca.data.shard": "orca.data",
    **{f"orca.data.image.{name}": "orca.data.image" for name in _IMAGES},
    **{f"orca.learn.{name}.estimator": f"orca.learn.{name}" for name in _ESTIMATORS},
    **{f"orca.learn.pytorch.callbacks.{name}": "orca.learn.pytorch.callbacks" for name in _CALLBACKS},
    "pipeline.api.net": "tfpark",
    "pipeline.nnframes.nn_classifier": "pipeline.nnframes",
    "tfpark.frozen": "tfpark.tfnet",  # in stored models
    "tfpark.gan.gan_estimator": "tfpark.gan",
    "tfpark.tf_predictor": "tfpark.tfnet",
    "tfpark.zoo_optimizer": "tfpark.optimizers",
}
for _old, _new in _PATHS.items():
    alias(f"{__name__}.{_old}", f"{__name__}.{_new}".rstrip("."))
alias(f"{__name__}.orca.data.pandas", "kindler.readers")
alias(f"{__name__}.orca.learn.optimizers.schedule", "kindler.compat.bigdl.optim.schedules")
alias(f"{__name__}.orca.learn.trigger", "kindler.compat.bigdl.optim.triggers")
refuse_the_rest()


def init_nncontext(
    conf: Any = None, spark_log_level: str = "WARN", redirect_spark_log: bool = True, **options: Any
) -> Any:
    """The running Spark context, or a new one on this machine; with Spark Connect the session.

    `conf` may also be a dict or a name. Clusters other than "local" are started by spark-submit.
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
    return init_nncontext(conf, cores=cores)


def getOrCreateSparkContext(conf: Any = None, appName: str | None = None) -> Any:
    return init_nncontext(conf if conf is not None else appName)


def init_spark_conf(conf: Any = None) -> Any:
    """A `SparkConf`; Kindler needs no settings of its own in it."""
    return spark_conf(_settings(conf) or {})


def _settings(conf: Any) -> dict[str, Any] | None:
    if isinstance(conf, str):
        return {"spark.app.name": conf}
    if hasattr(conf, "getAll"):
        return dict(conf.getAll())
    if conf is None or isinstance(conf, dict):
        return conf
    raise ConfigError(
        f"init_nncontext takes a SparkConf, a dict or a name; received {type(conf).__qualname__}."
    )
