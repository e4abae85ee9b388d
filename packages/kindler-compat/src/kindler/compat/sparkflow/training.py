"""Training a graph as SparkFlow does: asynchronously, a worker for each partition; its optimizers by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, is_remote

from kindler.compat.estimators import from_graph
from kindler.compat.sparkflow.graphs import OpenGraph
from kindler.compat.sparkflow.tensorflow_v1 import tf
from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.spark.executors import slots
from kindler.train.callbacks import Callback

OPTIMIZERS = {
    "adam": "AdamOptimizer",
    "rmsprop": "RMSPropOptimizer",
    "momentum": "MomentumOptimizer",
    "adadelta": "AdadeltaOptimizer",
    "adagrad": "AdagradOptimizer",
    "gradient_descent": "GradientDescentOptimizer",
    "adagrad_da": "AdagradDAOptimizer",
    "ftrl": "FtrlOptimizer",
    "proximal_adagrad": "ProximalAdagradOptimizer",
    "proximal_gradient_descent": "ProximalGradientDescentOptimizer",
}
_OLD_NAMES = {"initial_accumulator": "initial_accumulator_value"}

LossCallback = Callable[[float, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and how; the names are those of `SparkAsyncDL`."""

    graph: str
    tf_input: str
    tf_label: str | None
    make_optimizer: Callable[[], Any]
    iters: int = 1000
    partitions: int = 5
    mini_batch: int = 128
    mini_stochastic_iters: int = -1
    lock: bool = False
    shuffle: bool = True
    dropout: str | None = None
    to_keep: bool = False
    verbose: int = 0
    partition_shuffles: int = 1
    sync: str = "async"
    seed: int = 0
    loss_callback: LossCallback | None = None


def train(job: Job, frame: DataFrame, features: str, labels: str | None) -> OpenGraph:
    """Train; returns the graph with its trained values."""
    _check(job, labels)
    opened = OpenGraph.of(job.graph, seed=job.seed)
    partitions = _partitions(frame, job.partitions)
    workers = max(1, min(partitions, slots(frame.sparkSession)))
    with opened.graph.as_default():
        estimator = from_graph(
            Estimator,
            inputs=opened.tensor(job.tf_input, "tfInput"),
            labels=None if job.tf_label is None else opened.tensor(job.tf_label, "tfLabel"),
            loss=opened.loss(),
            optimizer=job.make_optimizer(),
            tensor_with_value=dropout_values(opened, job.dropout, to_keep=job.to_keep),
            sess=opened.sess,
            workers=workers,
            seed=job.seed,
        )
    whole = job.mini_batch < 1
    options: dict[str, Any] = {
        "epochs": job.iters,
        "batch_size": max(1, frame.count()) if whole else job.mini_batch * workers,
        "feature_cols": features,
        "label_cols": [] if labels is None else labels,
        "steps_per_epoch": job.mini_stochastic_iters if job.mini_stochastic_iters > 0 and not whole else None,
        "shuffle": job.shuffle,
        "verbose": job.verbose,
        "sync": job.sync,
        "sync_options": {"lock": job.lock} if job.sync == "async" else None,
        "callbacks": [] if job.loss_callback is None else [LossReport(job.loss_callback)],
    }
    for number in range(job.partition_shuffles):
        estimator.fit(frame if number == 0 else frame.repartition(partitions), **options)
    return opened


def dropout_values(opened: OpenGraph, name: str | None, *, to_keep: bool) -> dict[Any, Any]:
    """What the tensor of the dropout is fed with: its own value in training, no dropout otherwise."""
    if not name:
        return {}
    tensor = opened.tensor(name, "tfDropout")
    if tensor.op.type == "Placeholder":
        raise ConfigError(
            f"tfDropout={name!r} is a placeholder without a value for training.\n"
            f"Hint: tf.placeholder_with_default(0.5, shape=[], name={tensor.op.name!r}) has one."
        )
    return {tensor: (opened.sess.run(tensor), 1.0 if to_keep else 0.0)}


class LossReport(Callback):
    """Calls a function on each worker after each pass."""

    def __init__(self, function: LossCallback) -> None:
        self._function = function

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        self._function(float(logs["loss"]), int(logs["epoch"]), int(run.rank))


def _check(job: Job, labels: str | None) -> None:
    if (job.tf_label is None) != (labels is None):
        raise ConfigError(
            f"tfLabel={job.tf_label!r} and labelCol={labels!r}: a loss with labels needs both, one without"
            " needs neither."
        )
    for name, value in (
        ("iters", job.iters),
        ("partitions", job.partitions),
        ("partitionShuffles", job.partition_shuffles),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1; received {value}.")


def _partitions(frame: DataFrame, most: int) -> int:
    """As many as the frame has, at most so many; on Spark Connect nobody knows how many it has."""
    return most if is_remote() else max(1, min(most, frame.rdd.getNumPartitions()))


def build_optimizer(optimizer_name: str, learning_rate: float, optimizer_options: Any = None) -> Any:
    if optimizer_name not in OPTIMIZERS:
        raise ConfigError(f"tfOptimizer={optimizer_name!r}: there are {', '.join(OPTIMIZERS)}.")
    made = getattr(tf.train, OPTIMIZERS[optimizer_name])
    options = {"learning_rate": learning_rate, "use_locking": False, **options_of(optimizer_options)}
    options = {_OLD_NAMES.get(name, name): value for name, value in options.items()}
    if optimizer_name == "momentum":
        options.setdefault("momentum", 0.9)
    if optimizer_name == "adagrad_da":
        options.setdefault("global_step", tf.train.get_or_create_global_step())
    known = list(inspect.signature(made.__init__).parameters)[1:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"optimizerOptions: {optimizer_name!r} has no {', '.join(unknown)}; it has {', '.join(known)}."
        )
    return made(**options)


def options_of(given: Any) -> dict[str, Any]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    try:
        options = json.loads(given)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"optimizerOptions must be a JSON object; received {given!r}: {exc}") from exc
    if not isinstance(options, dict):
        raise ConfigError(f"optimizerOptions must be a JSON object; received {given!r}.")
    return options
