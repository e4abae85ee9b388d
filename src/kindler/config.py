"""Groups of arguments as values: frozen, units in the names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from kindler.errors import ConfigError

if TYPE_CHECKING:
    from kindler.train.triggers import Trigger
    from kindler.types import Dtypes, Shapes

Ingest: TypeAlias = Literal["auto", "inline", "direct"]
NanLoss: TypeAlias = Literal["raise", "warn", "skip"]

__all__ = ["Checkpoints", "Columns", "Device", "Epochs", "Optimization", "RunSettings"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How columns are read: `fit(columns=Columns(shapes={"image": (28, 28, 1)}))`.

    What you leave out in `evaluate` and `predict` is taken from the last `fit`, except for `ingest`.

    Attributes:
        shapes: The shape of one row, by column.
        dtypes: numpy dtypes, by column. Binary columns need one.
        stack_features: Whether to join all feature columns into one float32 matrix.
        allow_nan: Whether NaN is an allowed value, for all columns or for the ones named. `predict` always
            allows it.
        ingest: How the rows of a Spark DataFrame reach the workers: "direct" (they read its Parquet files),
            "inline" (Spark sends them), or "auto": direct where the DataFrame is a plain scan of files.
        weight_col: A column with the weight of each row, in training and validation. With `class_weight`, the
            two are multiplied. For `fit` only.
        class_weight: The weight of a row by its label, in training only. It is 1 for classes that are not
            named. The loss of a row is multiplied by it, and means still divide by the number of rows, as in
            Keras. For PyTorch and Keras models; a `train_step` finds both weights in `run.sample_weight`. For
            `fit` only.
    """

    shapes: Shapes | None = None
    dtypes: Dtypes | None = None
    stack_features: bool | None = None
    allow_nan: bool | Sequence[str] | None = None
    ingest: Ingest = "auto"
    weight_col: str | None = None
    class_weight: Mapping[int, float] | None = None


@dataclass(frozen=True)
class Epochs:
    """How long to train: `fit(epochs=Epochs(10, steps_per_epoch=500))`.

    Attributes:
        epochs: Number of epochs to train. None trains one, or as many as it takes until `max_steps` or
            `stop_when` ends the run.
        steps_per_epoch: Steps of an epoch; the next epoch continues with the rows that follow. None is one
            pass over all rows.
        initial_epoch: As in Keras: the epoch to start counting from; `epochs` is then the number of the last
            epoch.
        validation_freq: Validate after every n-th epoch, or after the epochs with these numbers.
        stop_when: A function of `Progress` that ends training when it returns True. It is called after every
            step and epoch.
    """

    epochs: int | None = None
    _: KW_ONLY
    steps_per_epoch: int | None = None
    initial_epoch: int | None = None
    validation_freq: int | Sequence[int] = 1
    stop_when: Trigger | None = None


@dataclass(frozen=True)
class Checkpoints:
    """Where and when a run writes checkpoints: `fit(checkpoint=Checkpoints("runs/a", every=500))`.

    Attributes:
        folder: A path, or a URL that fsspec understands. Workers on several machines must share it.
        every: When one is written: a number of steps, which also writes one after every epoch, or a function
            of `Progress`. None is after every epoch.
        keep: How many of the newest checkpoints to keep, whichever run wrote them; the newest from the end of
            an epoch is always kept. None keeps all.
        best: A metric of the history, such as "val_loss" or "max:val_gain"; the checkpoint of its best epoch
            is kept too.
    """

    folder: str | PathLike[str]
    _: KW_ONLY
    every: Trigger | int | None = None
    keep: int | None = 3
    best: str | None = None


@dataclass(frozen=True)
class Device:
    """What a model is computed on, and how: `from_torch(device=Device("cuda", precision="bf16"))`.

    Keras models take `name` and `share`, LightningModules also `precision="bf16"` and `tf32`.

    Attributes:
        name: "auto" (a GPU if there is one), "cpu", "cuda" or, for PyTorch, "cuda:N".
        share: Whether several workers may compute on one GPU; otherwise each needs its own.
        precision: "bf16" and "fp16" run forward passes in half precision where torch considers it safe; with
            "fp16", losses are scaled so that small gradients are not lost.
        tf32: Whether a GPU may multiply float32 matrices with TF32's ten bits; faster, less exact.
        compile: "default" or "reduce-overhead" compile the model with `torch.compile`. "graphs" runs
            training steps as CUDA graphs; "auto" tries all of these and stays with the fastest. Both need a
            GPU.
        cache: Whether features stay on the GPU between epochs. "auto": if they take no more than a third of
            its free memory. Results are the same.
        process_group: Whether the model may call `torch.distributed`, as SyncBatchNorm does: the default
            process group joins all workers before the model is created.
    """

    name: str = "auto"
    _: KW_ONLY
    share: bool = False
    precision: Literal["bf16", "fp16"] | None = None
    tf32: bool = False
    compile: Literal["auto", "default", "graphs", "reduce-overhead"] | None = None
    cache: Literal["auto"] | bool = "auto"
    process_group: bool = False


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """What happens between gradients and weights: `from_torch(optimization=Optimization(clip_norm=1.0))`.

    LightningModules take `clip_norm` and `clip_value`; their other settings are in the module.

    Attributes:
        clip_norm: Clip the gradient to this norm.
        clip_value: Clip each element of the gradient to this absolute value.
        accumulation_steps: Split each step into this many forward and backward passes: less memory, same
            result.
        scheduler_step: Whether the scheduler steps after each "epoch" or each "step".
        loss_weights: The weight of each loss in their sum, as a list or dict. None is 1 for each.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    accumulation_steps: int = 1
    scheduler_step: Literal["epoch", "step"] = "epoch"
    loss_weights: Sequence[float] | Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """How workers are started, watched and ended.

    Attributes:
        start_timeout_s: Seconds for all workers to start, including the wait for executors.
        heartbeat_s: Seconds between a worker's heartbeats.
        heartbeat_timeout_s: Seconds of silence after which a worker counts as lost.
        sync_timeout_s: Seconds a worker waits for the others at an exchange.
        stall_timeout_s: Seconds without a step, an exchange or a report from any worker after which the run
            fails with the stacks of all of them.
        stop_timeout_s: Seconds for workers to end once asked to.
        max_failures: How many losses of workers a run survives: another process takes the place of the lost
            one, or the run restarts from its newest checkpoint.
        retry_backoff_s: Seconds before the first restart; doubled each time, up to 30.
        executor_wait_s: Seconds to wait for the replacement of a lost executor; after that the run continues
            with fewer workers until it is back.
        idle_s: Seconds that warm processes wait for the next run; 0 keeps none.
        threads: Compute threads per worker; None shares a machine's cores among its workers.
        shared_memory: Whether workers of one machine exchange through shared memory.
        rendezvous: Where workers meet: at the driver (live logs and progress), or among themselves if they
            cannot reach it, as with a remote Spark Connect client.
        port_range: The first and last TCP port that Kindler may listen on, on the driver and on workers,
            where a firewall or a container allows only some; None is any free port.
        notice_s: Seconds between the notice that a worker or its machine will be taken away (SIGTERM, or
            `notice`) and its end. A run whose checkpoint takes longer to write says so in a warning.
        notice: A file or URL in which the notice to a machine appears, looked at once a second on each
            machine of the run: what the cloud's agent writes, or the metadata service answers.
        nan_loss: What to do if a training loss is NaN or infinite: "raise", "warn" or "skip". The error
            names step, worker and rows; a skipped step leaves weights and optimizer unchanged on all
            workers. For PyTorch and Keras models and LightningModules.

    >>> RunSettings(heartbeat_s=0)
    Traceback (most recent call last):
    kindler.errors.ConfigError: RunSettings(heartbeat_s=0): heartbeat_s must be more than 0.
    """

    start_timeout_s: float = 120.0
    heartbeat_s: float = 2.0
    heartbeat_timeout_s: float = 60.0
    sync_timeout_s: float = 1800.0
    stall_timeout_s: float = 1800.0
    stop_timeout_s: float = 10.0
    max_failures: int = 3
    retry_backoff_s: float = 1.0
    executor_wait_s: float = 300.0
    idle_s: float = 300.0
    threads: int | None = None
    shared_memory: bool = True
    rendezvous: Literal["auto", "driver", "workers"] = "auto"
    port_range: tuple[int, int] | None = None
    notice_s: float = 25.0
    notice: str | PathLike[str] | None = None
    nan_loss: NanLoss = "raise"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (value > 0 or (field.name == "idle_s" and value == 0)):
                raise ConfigError(f"RunSettings({field.name}={value}): {field.name} must be more than 0.")
        if self.max_failures < 0:
            raise ConfigError(f"RunSettings(max_failures={self.max_failures}): must be 0 or more.")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"RunSettings(threads={self.threads}): threads must be at least 1.")
        if self.heartbeat_timeout_s <= self.heartbeat_s:
            raise ConfigError(
                f"RunSettings(heartbeat_s={self.heartbeat_s},"
                f" heartbeat_timeout_s={self.heartbeat_timeout_s}):"
                " the timeout must be longer than the interval."
            )
        if self.rendezvous not in ("auto", "driver", "workers"):
            raise ConfigError(
                f"RunSettings(rendezvous={self.rendezvous!r}): must be 'auto', 'driver' or 'workers'."
            )
        if self.notice is not None and not (isinstance(self.notice, str | PathLike) and str(self.notice)):
            raise ConfigError(f"RunSettings(notice={self.notice!r}): must be a path or a URL.")
        if self.nan_loss not in get_args(NanLoss):
            raise ConfigError(f"RunSettings(nan_loss={self.nan_loss!r}): must be 'raise', 'warn' or 'skip'.")
        if self.port_range is not None and not _is_port_range(self.port_range):
            raise ConfigError(
                f"RunSettings(port_range={self.port_range!r}): must be (first, last), whole numbers"
                " from 1 to 65535, the first not above the last."
            )


def _is_port_range(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    if not all(isinstance(port, int) and not isinstance(port, bool) for port in value):
        return False
    first, last = value
    return bool(1 <= first <= last <= 65535)
