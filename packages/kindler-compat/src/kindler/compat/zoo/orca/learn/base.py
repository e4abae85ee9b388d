"""What Orca's estimators share: their methods, their backends and workers, and data that is cut short."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Any

from kindler import XShards
from kindler.compat.bigdl.optim.summaries import Summary, TrainSummary, ValidationSummary
from kindler.compat.bigdl.optim.validation import tag_of
from kindler.compat.flat import FlatEstimator as CoreEstimator
from kindler.compat.zoo.orca import InvalidInputError, as_orca
from kindler.compat.zoo.tfpark.training import TFParkEstimator, find_checkpoint
from kindler.data.arrays import is_spark_frame
from kindler.frameworks.creators import call, positional
from kindler.spark.session import running
from kindler.spark.versions import is_connect
from kindler.strategies import AllReduce, Strategy, Zero1


class OrcaEstimator:
    """An estimator of Orca, whose public methods raise `InvalidInputError`. In all of them:

    - data, validation_data: a Spark DataFrame or an `XShards` of {"x": ..., "y": ...}; other kinds where an
      estimator says so. Validation is after each epoch.
    - batch_size: rows of a step over all workers; to predict, rows of one call of the model. It need not be
      a multiple of anything.
    - feature_cols, label_cols: columns of a DataFrame for the inputs, in their order, and for the labels.
    """

    _core: CoreEstimator

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, member in list(vars(cls).items()):
            if isinstance(member, staticmethod):
                setattr(cls, name, staticmethod(as_orca(member.__func__)))
            elif inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, as_orca(member))

    def get_model(self) -> Any:
        return self._core.get_model()

    def shutdown(self, force: bool = False) -> None:
        """Release what the estimator holds: nothing."""


class SparkEstimator(OrcaEstimator):
    """An estimator with BigDL's summaries and checkpoints by their step."""

    _core: TFParkEstimator
    _empty: Any = None  # what a summary without values reads as; "array" is an empty array
    _loaded = False  # whether it goes on from a checkpoint

    def load_orca_checkpoint(
        self, path: str | PathLike[str], version: int | None = None, prefix: str | None = None
    ) -> Any:
        """`path` is a `model_dir` or a checkpoint; `prefix` is without effect: a checkpoint is one file."""
        self._core.load_checkpoint(find_checkpoint(path, version))
        self._loaded = True
        return self

    def set_tensorboard(self, log_dir: str, app_name: str) -> None:
        self._core.train_summary = TrainSummary(log_dir, app_name)
        self._core.val_summary = ValidationSummary(log_dir, app_name)

    def get_train_summary(self, tag: str | None = None) -> Any:
        return self._read(self._core.train_summary, tag or "Loss")

    def get_validation_summary(self, tag: str | None = None) -> Any:
        name = tag or "Loss"
        return self._read(self._core.val_summary, *dict.fromkeys((name, tag_of(name))))

    def _read(self, summary: Summary | None, *tags: str) -> Any:
        if summary is None:
            return None
        values = [summary.read_scalar(tag) for tag in tags]
        return next((read for read in values if len(read)), values[-1] if self._empty == "array" else None)


class TorchEstimator(SparkEstimator):
    """An estimator of a torch module, rebuilt where the clipping of gradients changes."""

    def __init__(self) -> None:
        self._clipping: dict[str, Any] = {"clip_norm": None, "limits": None}
        self._core = self._make(**self._clipping)

    def clear_gradient_clipping(self) -> None:
        self._clip(clip_norm=None, limits=None)

    def set_constant_gradient_clipping(self, min: float, max: float) -> None:  # noqa: A002 - Orca's names
        if not min < max:
            raise InvalidInputError(f"set_constant_gradient_clipping: {min} is not below {max}.")
        self._clip(limits=(float(min), float(max)))

    def set_l2_norm_gradient_clipping(self, clip_norm: float) -> None:
        if not clip_norm > 0:
            raise InvalidInputError(
                f"set_l2_norm_gradient_clipping: the norm must be above 0; received {clip_norm}."
            )
        self._clip(clip_norm=float(clip_norm))

    def _clip(self, **changes: Any) -> None:
        clipping = {**self._clipping, **changes}
        self._core, self._clipping = self._successor(**clipping), clipping

    def _successor(self, **options: Any) -> Any:
        """Another estimator of the same model that goes on from where this one is."""
        made = self._make(**{**self._clipping, **options})
        made.train_summary, made.val_summary = self._core.train_summary, self._core.val_summary
        made._continue_from(self._core)
        return made

    def _make(self, *, clip_norm: Any, limits: Any, **options: Any) -> TFParkEstimator:
        raise NotImplementedError


def workers_of(per_node: int) -> int | None:
    """The number of workers: so many on each node, of which a local session has one.

    None, one a slot of Spark, where the number of nodes of a cluster is not known.
    """
    if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1:
        raise InvalidInputError(f"workers_per_node must be at least 1; received {per_node!r}.")
    session = running()
    if session is None:
        return per_node
    if is_connect(session):
        return None if per_node == 1 else per_node
    conf = session.sparkContext.getConf()
    if conf.get("spark.master", "local").startswith("local"):
        return per_node
    nodes = conf.get("spark.executor.instances")
    return None if nodes is None else per_node * int(nodes)


def check_backend(backend: Any, known: Sequence[str]) -> str:
    if backend not in known:
        raise InvalidInputError(
            f"Only {', '.join(known[:-1])} and {known[-1]} backend are supported;"
            f" received backend={backend!r}."
        )
    return str(backend)


def check_config(config: Mapping[str, Any] | None, functions: str) -> None:
    if config is not None and "batch_size" in config:
        raise InvalidInputError(
            f"Please do not specify batch_size in config. Input batch_size in {functions} function of the"
            " estimator instead."
        )


def strategy_of(backend: str, *, divide: str | None) -> Strategy:
    """The strategy that a backend stands for.

    All of them compute the same steps. With "bigdl" each worker holds a slice of the optimizer's state.
    `divide` is what the optimizer's work can be divided into: "elements" where each element of a parameter
    moves by itself, "" where that is known of its class, None where it is not known.
    """
    if backend != "bigdl" or divide is None:
        return AllReduce()
    return Zero1(divide="elements" if divide else None)


def configured(data: Any, data_config: Mapping[str, Any] | None) -> Any:
    """A creator whose config has these entries as well; other data has none to read."""
    return _Configured(data, dict(data_config)) if data_config and _creates(data) else data


def first_steps(data: Any, steps: int | None, batch_size: int, argument: str) -> Any:
    """The first so many batches of a DataFrame, of shards or of what a creator makes; None is all of them."""
    if steps is None or data is None:
        return data
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidInputError(f"{argument} must be a whole number of at least 1; received {steps!r}.")
    if is_spark_frame(data):
        return data.limit(steps * batch_size)
    if isinstance(data, XShards):
        return XShards.from_shards([data.head(steps * batch_size)], engine=data.engine)
    if _creates(data):
        return _FirstSteps(data, steps)
    raise InvalidInputError(
        f"{argument} needs a DataFrame, an XShards or a function that creates data; received"
        f" {type(data).__qualname__}.\nHint: shorten the loader, or create it in a function."
    )


def _creates(data: Any) -> bool:
    return callable(data) and not hasattr(data, "element_spec") and not hasattr(data, "__iter__")


@dataclass(frozen=True)
class _Configured:
    creator: Callable[..., Any]
    config: Mapping[str, Any]

    def __call__(self, config: Mapping[str, Any], batch_size: int, rank: int, workers: int) -> Any:
        return _called(self.creator, {**config, **self.config}, batch_size, rank, workers)


@dataclass(frozen=True)
class _FirstSteps:
    creator: Callable[..., Any]
    steps: int

    def __call__(self, config: Mapping[str, Any], batch_size: int, rank: int, workers: int) -> Any:
        made = _called(self.creator, config, batch_size, rank, workers)
        own = _is_distributed(made)
        # Otherwise it has the batches of all workers, each of one worker's size.
        batches = self.steps * (1 if own else workers)
        return made.take(batches) if hasattr(made, "element_spec") else _Batches(made, batches, own)


@dataclass(frozen=True)
class _Batches:
    """The first batches of an iterable; `sharded` is whether they are this worker's alone."""

    batches: Any
    count: int
    sharded: bool

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.count)


def _is_distributed(made: Any) -> bool:
    """Whether it is this worker's part already, as the guide on creators says it."""
    if hasattr(made, "element_spec"):
        return str(made.options().experimental_distribute.auto_shard_policy.name) == "OFF"
    marked = any(getattr(part, "sharded", False) for part in (made, getattr(made, "dataset", None)))
    return marked or type(getattr(made, "sampler", None)).__name__ == "DistributedSampler"


def _called(creator: Callable[..., Any], config: Any, batch_size: int, rank: int, workers: int) -> Any:
    more = (rank, workers) if positional(creator) == 4 else ()
    return call(creator, config, batch_size, *more)
