"""spark-tensorflow-distributor: `MirroredStrategyRunner` runs a training function on Kindler's clusters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kindler.cluster import cluster as clusters
from kindler.cluster.context import Context
from kindler.compat.bigdl.alias import alias
from kindler.errors import ConfigError
from kindler.spark.session import running

__all__ = ["MirroredStrategyRunner"]

alias(f"{__name__}.mirrored_strategy_runner", __name__)


def _called(function: Any, options: dict[str, Any], strategy: str | None) -> Any:
    """The function's value, within the scope of a strategy of `tf.distribute` where one is named."""
    if strategy is None:
        return function(**options)
    import tensorflow as tf

    with getattr(tf.distribute, strategy)().scope():
        return function(**options)


@dataclass(frozen=True)
class _Main:
    function: Any
    options: dict[str, Any]
    strategy: str | None
    num_slots: int
    use_gpu: bool

    @property
    def __wrapped__(self) -> Any:
        return self.function

    def __call__(self, args: Any, ctx: Context) -> Any:
        if self.use_gpu:
            share = self.num_slots // ctx.size + (ctx.rank < self.num_slots % ctx.size)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ctx.gpus[:share])
        return _called(self.function, self.options, self.strategy)


class MirroredStrategyRunner:
    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = "gpu",
        use_custom_strategy: bool = False,
    ) -> None:
        if num_slots <= 0:
            raise ValueError(f"num_slots is {num_slots} but must be a positive integer.")
        if local_mode and not use_gpu and num_slots != 1:
            raise ValueError("num_slots must be 1 when running locally on CPU.")
        self.num_slots = num_slots
        self._local_mode = local_mode
        self._use_gpu = use_gpu
        self._resource = gpu_resource_name
        self._use_custom_strategy = use_custom_strategy
        self._session = None if local_mode else running()
        if not local_mode and self._session is None:
            raise ConfigError("there is no Spark session.\nHint: start one first, or local_mode=True.")

    def get_num_tasks(self) -> int:
        return -(-self.num_slots // self._gpus_per_task()) if self._use_gpu else self.num_slots

    def run(self, train_fn: Any, **kwargs: Any) -> Any:
        """Run `train_fn(**kwargs)` in every process; gives what the first returned."""
        if self._local_mode:
            return self._run_here(train_fn, kwargs)
        strategy = None if self._use_custom_strategy else "MultiWorkerMirroredStrategy"
        main = _Main(train_fn, kwargs, strategy, self.num_slots, self._use_gpu)
        gpus = None if self._use_gpu else 0  # those that Spark gave to the task
        tasks = self.get_num_tasks()
        return clusters.run(main, None, tasks, spark=self._session, chief=False, gpus=gpus).wait()[0]

    def _gpus_per_task(self) -> int:
        if self._local_mode or self._session is None:
            return self.num_slots
        amount = self._session.conf.get(f"spark.task.resource.{self._resource}.amount", None)
        if amount is None:
            raise ConfigError(
                f"spark.task.resource.{self._resource}.amount is not set, and use_gpu=True.\n"
                "Hint: use_gpu=False trains on CPUs."
            )
        return max(1, int(float(amount)))

    def _run_here(self, train_fn: Any, options: dict[str, Any]) -> Any:
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            if not self._use_gpu:
                os.environ["CUDA_VISIBLE_DEVICES"] = ""
            return _called(train_fn, options, None if self._use_custom_strategy else "MirroredStrategy")
        finally:
            if before is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
