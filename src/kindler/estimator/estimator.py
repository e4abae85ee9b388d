"""The front door: one object that trains, evaluates and scores a model, wherever the data is.

It joins the parts and decides nothing that a part could decide: `inputs` recognises the data, an engine
starts the workers, `train` runs on them, `inference` scores.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from importlib.metadata import entry_points
from os import PathLike
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import cloudpickle
import numpy as np

from kindler.config import RunSettings
from kindler.data.column_options import ColumnOptions, Names
from kindler.data.columns import Column, Columns
from kindler.data.preparation import Preparation, Preparer
from kindler.engine import local
from kindler.errors import ConfigError, NotFittedError, UntrainedWarning, UntrustedError
from kindler.estimator.checks import (
    ability_complaints,
    backend_complaints,
    callback_complaints,
    checkpoint_complaints,
    column_complaints,
    division_complaints,
    engine_complaints,
    framework_sync_complaints,
    loader_complaints,
    nan_complaints,
    precision_complaints,
    preparation_complaints,
    refuse,
    row_weight_complaints,
    runtime_complaints,
    seed_complaints,
    server_complaints,
    sync_complaints,
    warn_caller,
)
from kindler.estimator.exporting import Example, example_of, in_openvino, write_onnx, write_openvino
from kindler.estimator.fit import RunObserver, RunPlan, RunResults, job_of, run
from kindler.estimator.inputs.contract import Input, ScoreRequest
from kindler.estimator.inputs.recognise import Engine, choose_engine, recognise
from kindler.estimator.inputs.sql_function import SqlFunction, SqlFunctionInput
from kindler.estimator.model import FrameworkModel, LiveModel
from kindler.files import beside, folder_at, place, split
from kindler.frameworks.caller_state import bare_interrupts, leaves_no_trace, untouched
from kindler.frameworks.creators import title
from kindler.frameworks.pickling import pickle_for_workers
from kindler.frameworks.registry import FRAMEWORKS
from kindler.frameworks.state_format import ScoringModel
from kindler.html import card
from kindler.sync.contract import SyncConfig
from kindler.train import estimator_file
from kindler.train.checkpoint_dir import is_model_file, latest
from kindler.train.checkpoint_file import Header, is_checkpoint, read_checkpoint, write_checkpoint
from kindler.train.driver_callbacks import DriverCallback, DriverCallbackList, split_callbacks
from kindler.train.history import History
from kindler.train.lightning_callbacks import translated
from kindler.train.loss_guard import OnNan
from kindler.train.metric_names import BOOKKEEPING
from kindler.train.options import EvaluateOptions, FitOptions, Ingest, PredictOptions, Runtime
from kindler.train.run_params import run_params
from kindler.train.summaries import Summaries
from kindler.train.tensorboard import board, log_folder
from kindler.train.triggers import Trigger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.ml.estimator import KindlerEstimator

Hear = Callable[[Mapping[str, Any]], None]
_OF_COMPAT = ("from_graph", "from_model_fn", "from_mxnet")
AnyOptions = TypeVar("AnyOptions", FitOptions, EvaluateOptions, PredictOptions)


class Door:
    """`Estimator.load`: on the class it makes an estimator, on an instance it loads weights into it."""

    @overload
    def __get__(self, est: None, cls: type[Estimator]) -> Callable[..., Estimator]: ...
    @overload
    def __get__(self, est: Estimator, cls: type[Estimator]) -> Callable[[str | PathLike[str]], Estimator]: ...
    def __get__(self, est: Estimator | None, cls: type[Estimator]) -> Callable[..., Estimator]:
        return cls.from_file if est is None else est.load_weights


class _Makers(type):
    """Class methods of other distributions, such as `Estimator.from_graph`: functions that entry points of
    the group `kindler.estimators` name, called with the class."""

    if not TYPE_CHECKING:  # a name that nobody has stays an error of type checkers

        def __getattr__(cls, name: str) -> Any:
            for entry in entry_points(group="kindler.estimators", name=name):
                return MethodType(entry.load(), cls)
            hint = "\nHint: pip install 'kindler[compat]'" if name in _OF_COMPAT else ""
            raise AttributeError(f"Estimator has no attribute {name!r}.{hint}", name=name, obj=cls)


class Estimator(metaclass=_Makers):
    """Trains, evaluates and scores a model on any number of workers.

    Create one with `Estimator.from_torch` or `Estimator.from_keras`. An estimator keeps what it has learned:
    a second `fit` continues training, and `predict` uses the weights trained so far.
    """

    def __init__(
        self,
        model: FrameworkModel,
        *,
        workers: int | None,
        engine: Engine,
        device: str,
        model_dir: str | PathLike[str] | None,
        seed: int,
        settings: RunSettings,
        log_dir: str | PathLike[str] | None = None,
        preparation: Preparation | None = None,
        share_gpus: bool = False,
    ) -> None:
        self._model = model
        self._preparation = preparation or Preparation()
        self._warned_of_chance = False
        self._workers = workers
        self._engine: Engine = engine
        self._device = device
        self._model_dir = None if model_dir is None else place(model_dir)
        self._seed = int(seed)
        self._settings = settings
        self._share_gpus = share_gpus
        self._live = LiveModel(model, self._seed)
        self._columns = ColumnOptions()
        self._layout: dict[str, Any] = {}
        self._log_dir = None if log_dir is None else log_folder(log_dir)
        self._summaries = Summaries()
        self._converted: tuple[str, FrameworkModel] | None = None
        self.history = History()

    @classmethod
    @leaves_no_trace
    def from_torch(
        cls,
        *,
        model: Any,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        scheduler_creator: Any = None,
        scheduler_step: Literal["epoch", "step"] = "epoch",
        config: Mapping[str, Any] | None = None,
        workers: int | None = None,
        engine: Engine = "auto",
        device: str = "auto",
        share_gpus: bool = False,
        model_dir: str | PathLike[str] | None = None,
        seed: int = 0,
        precision: Literal["bf16", "fp16"] | None = None,
        tf32: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulation_steps: int = 1,
        inputs: Literal["positional", "dict", "kwargs"] = "positional",
        compile: Literal["auto", "default", "graphs", "reduce-overhead"] | None = None,  # noqa: A002
        device_cache: Literal["auto"] | bool = "auto",
        process_group: bool = False,
        settings: RunSettings | None = None,
        backend: str | None = None,
        log_dir: str | PathLike[str] | None = None,
        transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        collate: Callable[..., Any] | None = None,
        pad: Any = None,
        pad_value: Any = None,
        masks: bool = True,
        length_col: str | None = None,
        loss_weights: Sequence[float] | Mapping[str, float] | None = None,
        train_step: Callable[..., Any] | None = None,
        eval_step: Callable[..., Any] | None = None,
    ) -> Estimator:
        """Create an estimator from a PyTorch model.

        Args:
            model: An `nn.Module`, or a creator: a callable that is called with `config` and returns one.
            optimizer: An `Optimizer` over the model's parameters; an optimizer class or a partial of one; or
                a creator that is called with `(model, config)`. Not needed to evaluate or predict.
            loss: A loss module, a function of `(outputs, targets)`, or a creator that is called with
                `config`. "model" is the loss that the model computes itself from its inputs and labels. A
                list has one loss for each output and label, a dict the same by the names of outputs.
            metrics: A metric, a list, or a dict from names to metrics: torchmetrics objects, functions of
                `(outputs, targets)` that return a mean over rows, or names: "accuracy", "top_5" (or another
                number), "auc", "f1", "precision", "recall", "log_loss", "mse", "rmse", "mae", "r2".
            scheduler_creator: Called with `(optimizer, config)`; returns a learning-rate scheduler.
            scheduler_step: Whether the scheduler steps after each "epoch" or each "step".
            config: The argument of all creators.
            workers: Number of workers. None is one per slot of the Spark application, or one per core.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            device: "auto", "cpu", "cuda" or "cuda:N".
            share_gpus: Whether several workers may compute on one GPU; otherwise each needs its own.
            model_dir: The folder for checkpoints, as a path or a URL that fsspec understands. Workers on
                several machines must share it.
            seed: Decides the initial weights that creators draw, the order of rows, and dropout.
            precision: "bf16" and "fp16" run forward passes in half precision where torch considers it safe;
                with "fp16", losses are scaled so that small gradients are not lost.
            tf32: Whether a GPU may multiply float32 matrices with TF32's ten bits; faster, less exact.
            clip_norm: Clip the gradient to this norm.
            clip_value: Clip each element of the gradient to this absolute value.
            accumulation_steps: Split each step into this many forward and backward passes: less memory, same
                result.
            inputs: "positional" calls `model(*columns)`, "dict" calls `model({name: column})`, "kwargs" calls
                `model(name=column)`, as models of Hugging Face want it.
            compile: "default" or "reduce-overhead" compile the model with `torch.compile`. "graphs" runs each
                training step as one CUDA graph, "auto" does so where it is possible; both need a GPU.
            device_cache: Whether features stay on the GPU between epochs. "auto": if they take no more than a
                third of its free memory. Results are the same.
            process_group: Whether the model may call `torch.distributed`, as SyncBatchNorm does: the default
                process group joins all workers before the model is made.
            settings: Time limits, threads, shared memory.
            backend: Accepted for programs written for Orca ("bigdl", "torch_distributed", "horovod", "spark",
                "ray"), without effect.
            log_dir: The folder that the driver writes event files for TensorBoard to.
            transform: A function of a row: a dict of its feature and label columns and, if it has a parameter
                `rng`, a random generator of that row and epoch. It returns a dict of columns, which the model
                takes instead, and runs in the workers, beside the steps. With `kindler.batched`, a function
                of a batch of columns.
            eval_transform: The same for `evaluate`, validation and `predict`. None uses `transform` there.
            collate: A function of a list of rows that returns a dict of arrays: the batch.
            pad: "batch" pads rows of different lengths to the longest of the batch, a number to that length;
                or a dict of these by column. The model gets a mask for each padded column, after all columns.
            pad_value: What rows are padded with, or a dict of that by column. None is 0, and -100 for labels.
            masks: Whether the model gets masks.
            length_col: A column whose rows are as long as a row is, or whose numbers say so: each step
                trains on rows of similar length.
            loss_weights: What each of several losses counts for in their sum, as a list or dict. None is 1.
            train_step: A function of `(run, batch)` that makes a training step itself; see `StepRun` for
                `run`. `batch` is a dict of tensors by column. It returns the loss, or a dict of numbers to
                log. `optimizer` may then be a dict of optimizers by name.
            eval_step: The same for `evaluate` and validation. None uses `loss` and `metrics` there.
        """
        steps = train_step is not None or eval_step is not None
        framework = "torch_step" if steps else "torch"
        FRAMEWORKS.load(framework)
        from kindler.frameworks.torch.spec import TorchSpec, check
        from kindler.frameworks.torch.step_spec import StepSpec, check_step

        own = {"train_step": train_step, "eval_step": eval_step} if steps else {}
        spec = (StepSpec if steps else TorchSpec)(
            model=model,
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            scheduler_creator=scheduler_creator,
            scheduler_step=scheduler_step,
            config=dict(config or {}),
            precision=precision,
            tf32=tf32,
            clip_norm=clip_norm,
            clip_value=clip_value,
            accumulation_steps=accumulation_steps,
            inputs=inputs,
            compile=compile,
            device_cache=device_cache,
            process_group=process_group,
            **own,
        )
        preparation = Preparation(
            transform=transform,
            eval_transform=eval_transform,
            collate=collate,
            pad=pad,
            pad_value=pad_value,
            masks=masks,
            length_col=length_col,
        )
        refuse(
            *(check_step(spec) if isinstance(spec, StepSpec) else check(spec)),
            *engine_complaints(workers, engine),
            *seed_complaints(seed),
            *backend_complaints(backend),
            *preparation.complaints(),
        )
        classes = {base for metric in _flat(metrics) for base in type(metric).__mro__}
        uses_torchmetrics = "torchmetrics" in {base.__module__.partition(".")[0] for base in classes}
        return cls(
            FrameworkModel(
                framework=framework,
                spec=spec,
                extra_preload=(*(("torchmetrics",) if uses_torchmetrics else ()), *_libraries(model)),
            ),
            workers=workers,
            engine=engine,
            device=device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or RunSettings(),
            share_gpus=share_gpus,
            log_dir=log_dir,
            preparation=preparation,
        )

    @classmethod
    @leaves_no_trace
    def from_lightning(
        cls,
        module: Any,
        *,
        batch: Literal["tuple", "dict"] = "tuple",
        config: Mapping[str, Any] | None = None,
        workers: int | None = None,
        engine: Engine = "auto",
        device: str = "auto",
        share_gpus: bool = False,
        model_dir: str | PathLike[str] | None = None,
        seed: int = 0,
        precision: Literal["bf16"] | None = None,
        tf32: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        inputs: Literal["positional", "dict", "kwargs"] = "positional",
        settings: RunSettings | None = None,
        log_dir: str | PathLike[str] | None = None,
        **preparation: Any,
    ) -> Estimator:
        """Create an estimator from a LightningModule, as it is.

        Its `training_step`, `validation_step`, `configure_optimizers` and hooks are called as Lightning calls
        them; what it logs is in the history. What is not supported is refused here, by name.

        Args:
            module: The module, or a creator: a callable that is called with `config` and returns one.
            batch: What its steps get: a "tuple" of feature and label columns (of a single column, the column
                itself), or a "dict" of columns by name.
            config: The argument of the creator.
            workers: Number of workers. None is one per slot of the Spark application, or one per core.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            device: "auto", "cpu", "cuda" or "cuda:N".
            share_gpus: Whether several workers may compute on one GPU; otherwise each needs its own.
            model_dir: The folder for checkpoints, as a path or a URL that fsspec understands.
            seed: Decides the initial weights that creators draw, the order of rows, and dropout.
            precision: "bf16" runs steps in half precision where torch considers it safe.
            tf32: Whether a GPU may multiply float32 matrices with TF32's ten bits; faster, less exact.
            clip_norm: Clip the gradient to this norm.
            clip_value: Clip each element of the gradient to this absolute value.
            inputs: How `predict` calls the module if it has no `predict_step`; see `from_torch`.
            settings: Time limits, threads, shared memory.
            log_dir: The folder that the driver writes event files for TensorBoard to.
            preparation: `transform`, `eval_transform`, `collate`, `pad`, `pad_value`, `masks` and
                `length_col`; see `from_torch`.
        """
        known = {field.name for field in fields(Preparation)} - {"text"}
        refuse(*(f"from_lightning has no argument {name!r}." for name in preparation if name not in known))
        prepared = Preparation(**preparation)
        refuse(*engine_complaints(workers, engine), *seed_complaints(seed), *prepared.complaints())
        spec = FRAMEWORKS.load("lightning").make_spec(
            model=module,
            batch=batch,
            config=config,
            precision=precision,
            tf32=tf32,
            clip_norm=clip_norm,
            clip_value=clip_value,
            inputs=inputs,
        )
        return cls(
            FrameworkModel(framework="lightning", spec=spec, extra_preload=_libraries(module)),
            workers=workers,
            engine=engine,
            device=device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or RunSettings(),
            share_gpus=share_gpus,
            log_dir=log_dir,
            preparation=prepared,
        )

    @classmethod
    @leaves_no_trace
    def from_keras(
        cls,
        model: Any = None,
        model_creator: Any = None,
        config: Mapping[str, Any] | None = None,
        compile_args_creator: Any = None,
        workers: int | None = None,
        engine: Engine = "auto",
        model_dir: str | PathLike[str] | None = None,
        seed: int = 0,
        keras_backend: Literal["tensorflow", "jax", "torch"] | None = None,
        *,
        device: str = "auto",
        share_gpus: bool = False,
        inputs: Literal["auto", "positional", "dict"] = "auto",
        log_dir: str | PathLike[str] | None = None,
        settings: RunSettings | None = None,
        transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        collate: Callable[..., Any] | None = None,
        pad: Any = None,
        pad_value: Any = None,
        masks: bool = True,
        length_col: str | None = None,
    ) -> Estimator:
        """Create an estimator from a Keras model: Keras 3 on any backend, or Keras 2 as `tf_keras`.

        Args:
            model: A compiled model: functional, sequential or subclassed.
            model_creator: Instead of `model`: a callable that is called with `config` and returns a compiled
                model.
            config: The argument of all creators.
            compile_args_creator: Called with `config`; returns the arguments of `compile`, for a model that
                is not compiled yet.
            workers: Number of workers. None is one per slot of the Spark application, or one per core.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            model_dir: The folder for checkpoints, as a path or a URL that fsspec understands. Workers on
                several machines must share it.
            seed: Decides the initial weights that creators draw, the order of rows, and dropout.
            keras_backend: The backend of the workers. None is the backend of the model, or the one that
                `import keras` would choose here.
            device: "auto", "cpu" or "cuda".
            share_gpus: Whether several workers may compute on one GPU; otherwise each needs its own.
            inputs: How several feature columns are passed to the model: in order ("positional"), by name
                ("dict"), or by name if the model's inputs have the names of the columns ("auto").
            log_dir: The folder that the driver writes event files for TensorBoard to.
            settings: Time limits, threads, shared memory.
            transform: A function of a row: a dict of its feature and label columns and, if it has a parameter
                `rng`, a random generator of that row and epoch. It returns a dict of columns, which the model
                takes instead, and runs in the workers, beside the steps. With `kindler.batched`, a function
                of a batch of columns.
            eval_transform: The same for `evaluate`, validation and `predict`. None uses `transform` there.
            collate: A function of a list of rows that returns a dict of arrays: the batch.
            pad: "batch" pads rows of different lengths to the longest of the batch, a number to that length;
                or a dict of these by column. The model gets a mask for each padded column, after all columns.
            pad_value: What rows are padded with, or a dict of that by column. None is 0, and -100 for labels.
            masks: Whether the model gets masks.
            length_col: A column whose rows are as long as a row is, or whose numbers say so: each step
                trains on rows of similar length.
        """
        from kindler.frameworks.keras import backends
        from kindler.frameworks.keras.spec import KerasSpec, check

        spec = KerasSpec(
            model=model,
            model_creator=model_creator,
            compile_args_creator=compile_args_creator,
            config=dict(config or {}),
            inputs=inputs,
        )
        preparation = Preparation(
            transform=transform,
            eval_transform=eval_transform,
            collate=collate,
            pad=pad,
            pad_value=pad_value,
            masks=masks,
            length_col=length_col,
        )
        refuse(
            *check(spec),
            *engine_complaints(workers, engine),
            *seed_complaints(seed),
            *preparation.complaints(),
        )
        chosen = backends.backend_of(model, keras_backend)
        backends.require(chosen)
        return cls(
            FrameworkModel(framework="keras", spec=replace(spec, backend=chosen)),
            workers=workers,
            engine=engine,
            device=device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or RunSettings(),
            share_gpus=share_gpus,
            log_dir=log_dir,
            preparation=replace(preparation, text=chosen == "tensorflow"),
        )

    @classmethod
    @leaves_no_trace
    def from_openvino(
        cls,
        model_path: str | PathLike[str],
        *,
        threads: int | None = None,
        config: Mapping[str, Any] | None = None,
        device: str = "CPU",
        workers: int | None = None,
        engine: Engine = "auto",
        settings: RunSettings | None = None,
    ) -> Estimator:
        """Create an estimator that predicts with a model of OpenVINO; it cannot be trained.

        `predict` takes any number of rows and any `batch_size`, also for a model that was made for one number
        of rows. Every host compiles the model once. Columns go to the inputs of their names, or else in
        their order.

        Args:
            model_path: The .xml file of a model, with its weights in a .bin file beside it; or a file of
                another format that OpenVINO reads, such as ONNX.
            threads: Compute threads of each process. None is one in Spark's tasks, and otherwise the cores
                that the process may use.
            config: Properties of OpenVINO to compile the model with, such as
                `{"PERFORMANCE_HINT": "THROUGHPUT"}`.
            device: The OpenVINO device that computes.
            workers: Processes that score local shards and Parquet files. None is one per core.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            settings: Time limits, threads.

        Raises:
            ConfigError: There is no such file, or OpenVINO cannot read it.
            MissingExtraError: OpenVINO is not installed.
        """
        refuse(*engine_complaints(workers, engine))
        spec = FRAMEWORKS.load("openvino").make_spec(
            model_path=model_path, threads=threads, properties=config, device=device
        )
        return cls(
            FrameworkModel(framework="openvino", spec=spec),
            workers=workers,
            engine=engine,
            device="cpu",
            model_dir=None,
            seed=0,
            settings=settings or RunSettings(),
        )

    @classmethod
    @leaves_no_trace
    def from_framework(
        cls,
        framework: str,
        *,
        workers: int | None = None,
        engine: Engine = "auto",
        device: str = "auto",
        share_gpus: bool = False,
        model_dir: str | PathLike[str] | None = None,
        seed: int = 0,
        log_dir: str | PathLike[str] | None = None,
        settings: RunSettings | None = None,
        **options: Any,
    ) -> Estimator:
        """Make an estimator of a model of any framework, including those that other packages add.

        Args:
            framework: "torch", "keras", or the name of an entry point of the group `kindler.frameworks`.
            workers: Number of workers. None is one for each slot of the Spark application, or each core.
            engine: "spark", "local", or "auto": Spark if the data is Spark's.
            device: Where workers compute.
            share_gpus: Whether several workers may compute on one GPU; otherwise each needs its own.
            model_dir: The folder of checkpoints; see `fit`.
            seed: Decides the initial weights of creators, the order of rows, and dropout.
            log_dir: Where event files for TensorBoard are written.
            settings: Time limits, threads, shared memory.
            options: The framework's own: the model, its optimizer and so on.
        """
        refuse(*engine_complaints(workers, engine), *seed_complaints(seed))
        return cls(
            FrameworkModel(framework=framework, spec=FRAMEWORKS.load(framework).make_spec(**options)),
            workers=workers,
            engine=engine,
            device=device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or RunSettings(),
            share_gpus=share_gpus,
            log_dir=log_dir,
        )

    @bare_interrupts
    def fit(
        self,
        data: Any,
        epochs: int | None = None,
        batch_size: int = 32,
        feature_cols: Names = None,
        label_cols: Names = None,
        validation_data: Any = None,
        callbacks: Sequence[Any] | None = None,
        max_steps: int | None = None,
        verbose: int = 1,
        *,
        shapes: Mapping[str, Any] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        stack_features: bool = False,
        allow_nan: bool | Sequence[str] = False,
        shuffle: bool = True,
        ingest: Ingest = "auto",
        steps_per_epoch: int | None = None,
        end_trigger: Trigger | None = None,
        checkpoint_trigger: Trigger | None = None,
        keep_checkpoints: int | None = 3,
        best_metric: str | None = None,
        resume: bool = False,
        initial_epoch: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        class_weight: Mapping[int, float] | None = None,
        sample_weight_col: str | None = None,
        on_nan: OnNan = "raise",
        sync: str = "allreduce",
        sync_options: Mapping[str, Any] | None = None,
    ) -> History:
        """Train the model: every epoch uses each row of `data` once.

        Args:
            data: A Spark DataFrame, an `XShards` (of `{"x": ..., "y": ...}` or of DataFrames), a Parquet path
                or list of paths, a dict or tuple of numpy arrays, a pandas DataFrame, a pyarrow Table, or a
                Hugging Face or ray dataset. Or batches that your own code makes: a torch `DataLoader`, a
                `tf.data.Dataset`, or a function of `(config, batch_size)` that returns one of these, a Keras
                `PyDataset`, or an iterable of batches.
            epochs: Number of epochs to train. None trains one, or as many as it takes until `max_steps` or
                `end_trigger` ends the run.
            batch_size: Rows per step, over all workers together.
            feature_cols: The model's input columns, in its order. None looks for "features" or "x".
            label_cols: The target columns. None looks for "label" or "y".
            validation_data: Data to evaluate after each epoch; may be of another kind than `data`.
            callbacks: `kindler.Callback` objects; for a Keras model, callbacks of Keras. They run on the
                workers. For either, `kindler.MLflowLogger`, which runs on the driver.
            max_steps: Optimizer steps after which training ends, also in the middle of an epoch.
            verbose: 0 shows neither progress nor the output of the workers.
            shapes: The shape of one row, by column: `{"image": (28, 28, 1)}`.
            dtypes: numpy dtypes, by column. Binary columns need one.
            stack_features: Whether to join all feature columns into one float32 matrix.
            allow_nan: Whether NaN is an allowed value, for all columns or for the ones named.
            shuffle: Whether each epoch takes the rows in a new order, which the seed decides.
            ingest: How the rows of a Spark DataFrame reach the workers: "direct" (the workers read its
                Parquet files), "inline" (Spark sends them), or "auto": direct where the DataFrame is a plain
                scan of files.
            steps_per_epoch: Steps of an epoch; the next epoch continues with the rows that follow. None is
                one pass over all rows.
            end_trigger: Ends training when it fires, unless `epochs` or `max_steps` ends it earlier.
            checkpoint_trigger: When a checkpoint is written to `model_dir`. None is after every epoch.
            keep_checkpoints: How many of the newest checkpoints to keep, whichever run wrote them, besides
                the newest that was written at the end of an epoch. None keeps all.
            best_metric: A metric of the history, such as "val_loss" or "max:val_gain"; the checkpoint of its
                best epoch is kept, too.
            resume: Continue from the newest complete checkpoint in `model_dir`, with any number of workers,
                to where the run that wrote it would have ended. Starts from the beginning if there is none.
            initial_epoch: As in Keras: the epoch to start counting from; `epochs` is then the number of the
                last epoch.
            validation_freq: Validate every so many epochs, or after the epochs with these numbers.
            class_weight: The weight of a row by its label. It acts in training only, and is 1 for classes
                that are not named. The loss of a row is multiplied by it, and means still divide by the
                number of rows, as in Keras. For PyTorch and Keras models; a `train_step` finds it, with the
                column below, in `run.sample_weight`.
            sample_weight_col: A column with the weight of each row, in training and validation. With
                `class_weight`, the two are multiplied.
            on_nan: What to do about a training loss that is NaN or infinite: "raise", "warn" or "skip". The
                error names step, worker and rows; a step that is skipped leaves weights and optimizer as they
                were, on all workers. For PyTorch and Keras models and LightningModules.
            sync: How workers agree: "allreduce", "sharded" (the same result, each worker updating a slice of
                the parameters; PyTorch only), "fsdp" (the parameters are divided, too; PyTorch only), "async"
                (a parameter server applies what each worker learns), "rounds" (workers train by themselves
                and average their weights), or the name of a sync that another package adds.
            sync_options: Options of that sync.

        Returns:
            One row per epoch; after `resume`, also those of the earlier part of the run.

        Raises:
            ConfigError: An argument cannot work. Raised before any worker starts.
            DataError: A value in the data cannot be used.
            NonFiniteLossError: A training loss is NaN or infinite.
            WorkerError: The model's own code raised an error; this is also an instance of that error's class.
            WorkerLost: A worker died. With `model_dir`, the run has by then been continued from its newest
                checkpoint as often as `RunSettings.max_failures` allows.
        """
        driver_callbacks, on_workers = split_callbacks(translated(callbacks))
        options = FitOptions(
            batch_size=batch_size,
            columns=ColumnOptions(
                feature_cols=feature_cols,
                label_cols=label_cols,
                weight_col=sample_weight_col,
                shapes=shapes,
                dtypes=dtypes,
                stack_features=stack_features,
                allow_nan=allow_nan,
                need_labels=self._model.facts.labels,
            ),
            ingest=ingest,
            verbose=verbose,
            epochs=epochs,
            callbacks=tuple(on_workers),
            max_steps=max_steps,
            shuffle=shuffle,
            steps_per_epoch=steps_per_epoch,
            end_trigger=end_trigger,
            checkpoint_trigger=checkpoint_trigger,
            keep_checkpoints=keep_checkpoints,
            best_metric=best_metric,
            resume=resume,
            initial_epoch=initial_epoch,
            validation_freq=validation_freq if isinstance(validation_freq, int) else tuple(validation_freq),
            class_weight=class_weight,
            on_nan=on_nan,
            sync=SyncConfig(name=sync, options=dict(sync_options or {})),
        )
        adapt = self._model.facts.adapt
        return self._fit(
            recognise(adapt(data)), _recognised(adapt(validation_data)), options, driver_callbacks
        )

    def _fit(
        self,
        data: Input,
        validation: Input | None,
        options: FitOptions,
        driver_callbacks: Sequence[DriverCallback],
    ) -> History:
        model, validated = self._model, validation is not None
        refuse(
            *ability_complaints(model.row, "train"),
            *preparation_complaints(self._preparation, options, data, validation),
            *model.complaints("train"),
            *model.complaints("data", data.data),
            *row_weight_complaints(model, options),
            *nan_complaints(model.row, options),
            *sync_complaints(options.sync),
            *framework_sync_complaints(options.sync, model.row),
            *loader_complaints(options.sync, data),
            *server_complaints(options.sync, model),
            *division_complaints(options.sync, model),
            *options.complaints(),
            *checkpoint_complaints(options, model_dir=self._model_dir, validated=validated),
            *column_complaints(options.columns, data, validation),
            *callback_complaints(options.callbacks, model.row, validated=validated),
        )
        options = self._with_preparation(options, trains=True)
        if validated:
            refuse(*model.complaints("judge"))
            self._warn_of_chance()
        inputs = [data] if validation is None else [data, validation]
        params = run_params(
            model.spec,
            options,
            framework=model.framework,
            engine=choose_engine(self._engine, *inputs),
            workers=self._workers,
            device=self._device,
            seed=self._seed,
        )
        with (
            DriverCallbackList(driver_callbacks).running(self, params) as on_driver,
            board(self._log_dir) as sink,
            self._summaries.writing(sink),
        ):
            results = self._run(
                data,
                options,
                validation=validation,
                model_dir=self._model_dir,
                log_steps=sink is not None,
                watched=on_driver.wants_progress,
                hear=_both(self._summaries.report, on_driver.report),
            )
            self._summaries.finish(results.rows)
            on_driver.finish(results.rows)
            self._layout = results.layout
            self._columns = replace(options.columns, weight_col=None, ragged=None, length_col=None)
            self._live.state = results.state
            first = results.rows[0]["epoch"] if options.resume and results.rows else math.inf
            earlier = [row for row in self.history if row["epoch"] < first]
            self.history = History([*earlier, *results.rows], results.mode)
            if results.halted:
                raise KeyboardInterrupt(_kept_message(results.step, self._model_dir))
        return History(results.rows, results.mode)

    @bare_interrupts
    def evaluate(
        self,
        data: Any,
        batch_size: int = 256,
        feature_cols: Names = None,
        label_cols: Names = None,
        verbose: int = 1,
        *,
        shapes: Mapping[str, Any] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        stack_features: bool | None = None,
        allow_nan: bool | Sequence[str] | None = None,
        ingest: Ingest = "auto",
    ) -> dict[str, Any]:
        """Evaluate the model on every row of `data`.

        A model that a creator makes and that was never trained is evaluated with an `UntrainedWarning`.

        Args:
            data: Data of any kind that `fit` takes.
            batch_size: Rows per step, over all workers together.
            feature_cols: The model's input columns. None takes those of the last `fit`, as do the options
                below.
            label_cols: The target columns.
            verbose: 0 shows neither progress nor the output of the workers.
            shapes: The shape of one row, by column.
            dtypes: numpy dtypes, by column.
            stack_features: Whether to join all feature columns into one float32 matrix.
            allow_nan: Whether NaN is an allowed value, for all columns or for the ones named.
            ingest: How the rows of a Spark DataFrame reach the workers; see `fit`.

        Returns:
            The loss, each metric by its name, and `num_samples`: the values that a single process computes.
        """
        given = recognise(self._model.facts.adapt(data))
        columns = ColumnOptions(
            feature_cols=feature_cols,
            label_cols=label_cols,
            shapes=shapes,
            dtypes=dtypes,
            stack_features=stack_features,
            allow_nan=allow_nan,
            need_labels=self._model.facts.labels,
        )
        options = EvaluateOptions(batch_size=batch_size, columns=columns, ingest=ingest, verbose=verbose)
        refuse(
            *ability_complaints(self._model.row, "evaluate"),
            *self._model.complaints("judge"),
            *self._model.complaints("data", given.data),
            *options.complaints(),
            *column_complaints(columns, given),
            *preparation_complaints(self._preparation, options, given),
        )
        self._warn_of_chance()
        self._warn_if_untrained("evaluate")
        options = replace(options, columns=given.complete(columns, self._columns))
        options = self._with_preparation(options)
        return self._run(given, options, hear=self._summaries.report).rows[0]

    @bare_interrupts
    def predict(
        self,
        data: Any,
        batch_size: int = 1024,
        feature_cols: Names = None,
        output_cols: Names = None,
        output_path: str | PathLike[str] | None = None,
        verbose: int = 1,
        *,
        shapes: Mapping[str, Any] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        stack_features: bool | None = None,
        ingest: Ingest = "auto",
        runtime: Runtime | None = None,
        precision: str | None = None,
    ) -> Any:
        """Score every row of `data`.

        What comes back is of the same kind as the data. A Spark DataFrame, batch or streaming, gives a lazy
        DataFrame with the outputs as new columns. Arrays, a pandas DataFrame and a pyarrow Table give the
        same. An `XShards` gives an `XShards`: its dicts get a `prediction` beside `x`, its DataFrames a
        column. For a Parquet path the scored rows are written to Parquet files.

        A model that a creator makes and that was never trained is scored with an `UntrainedWarning`.

        Args:
            data: The rows to score.
            batch_size: Rows per call of the model.
            feature_cols: The model's input columns. None takes those of the last `fit`.
            output_cols: Names of the output columns. None is "prediction" ("prediction_0", ... for several
                outputs), or the keys if the model returns a dict.
            output_path: The folder that the scored rows of Parquet files are written to.
            verbose: 0 shows no progress.
            shapes: The shape of one row, by column.
            dtypes: numpy dtypes, by column.
            stack_features: Whether to join all feature columns into one float32 matrix. None does as the last
                `fit` did.
            ingest: For a DataFrame that is a plain scan of Parquet files: "direct" reads the files in Python,
                "inline" sends the rows through Spark.
            runtime: "openvino" converts the model and computes it with OpenVINO, which is often faster on
                CPUs. None computes it with its own framework.
            precision: "bf16" or "fp16" computes a PyTorch model in half precision where PyTorch considers it
                safe, "fp32" in full; outputs are float32. None is the precision that it was made with.

        Returns:
            The scored data; for a Parquet path, `output_path`.
        """
        given = recognise(data)
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(
                feature_cols=feature_cols,
                shapes=shapes,
                dtypes=dtypes,
                stack_features=stack_features,
                allow_nan=True,
            ),
            ingest=ingest,
            verbose=verbose,
            output_cols=(output_cols,) if isinstance(output_cols, str) else tuple(output_cols or ()) or None,
            output_path=output_path,
            runtime=runtime,
            precision=precision,
        )
        return self._predict(given, options)

    def _predict(self, given: Input, options: PredictOptions) -> Any:
        refuse(
            *given.score_complaints(options),
            *options.complaints(),
            *precision_complaints(self._model.row, options),
        )
        self._warn_of_chance()
        self._warn_if_untrained("predict")
        known = self._columns.without_labels()
        columns = replace(given.complete(options.columns, known), label_cols=None, need_labels=False)
        options = self._with_preparation(replace(options, columns=columns))
        model, weights = self._model, self._live.for_scoring()
        if options.runtime is not None and options.runtime != model.row.form:
            refuse(*ability_complaints(model.row, "export"), *runtime_complaints(options))
            example = Example.of_columns(*given.sample(columns, self._layout))
            model = self._in_openvino(example, weights)
            weights = ScoringModel.of(model.packed, b"", None)
            options = replace(options, columns=columns, preparation=None)  # which is for text
        request = ScoreRequest(
            framework=model.framework,
            model=weights,
            options=options,
            layout=self._layout,
            device=self._device,
            seed=self._seed,
            labels=tuple(self._columns.labels or ("label", "y")),
            job=job_of(
                model,
                self._settings,
                target="kindler.inference.files:run",
                buffers=(),
                workers=self._workers or local.slots(),
            ),
        )
        return given.score(request)

    def _in_openvino(self, example: Example, weights: ScoringModel) -> FrameworkModel:
        """The model as it is now, converted; the last conversion is kept."""
        key = example.key(self._model, weights)
        if self._converted is None or self._converted[0] != key:
            with untouched():
                self._converted = (key, in_openvino(self._model, weights, example))
        return self._converted[1]

    @bare_interrupts
    def predict_with(self, data: Any, options: PredictOptions) -> Any:
        """`predict` with its options as one value; columns that they leave open are those of the last `fit`.

        Args:
            data: The rows to score.
            options: The options; `finish`, which `predict` lacks, makes the columns of the model's outputs.
        """
        return self._predict(recognise(data), options)

    @bare_interrupts
    def register_udf(
        self,
        spark: SparkSession,
        name: str,
        *,
        feature_cols: Names = None,
        output_cols: Names = None,
        batch_size: int = 1024,
        shapes: Mapping[str, Any] | None = None,
        dtypes: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Make this model a function of Spark SQL: `spark.sql("SELECT score(features) FROM t")`.

        The function has the weights of now; register it again after another `fit`. It lives as long as the
        session.

        Args:
            spark: The session.
            name: The function's name. A function of this name that was registered before is replaced.
            feature_cols: The function's arguments, in their order. None takes the columns of the last `fit`.
            output_cols: If the model has several outputs, the function returns a struct with these fields.
            batch_size: Rows per call of the model.
            shapes: The shape of one row, by column.
            dtypes: numpy dtypes, by column.

        Returns:
            The function for DataFrames: `frame.select(score("features"))`.
        """
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(feature_cols=feature_cols, shapes=shapes, dtypes=dtypes, allow_nan=True),
            output_cols=(output_cols,) if isinstance(output_cols, str) else tuple(output_cols or ()) or None,
        )
        function: Callable[..., Any] = self._predict(SqlFunctionInput(SqlFunction(spark, name)), options)
        return function

    @leaves_no_trace
    def copy(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        learning_rate: float | None = None,
        workers: int | None = None,
        seed: int | None = None,
        model_dir: str | PathLike[str] | None = None,
        settings: RunSettings | None = None,
    ) -> Estimator:
        """An independent estimator of the same model, with what it has learned so far.

        Training the copy does not change this estimator, nor the model that it was made of.

        Args:
            config: Entries of `config` that are to be different; creators are called with them.
            learning_rate: The optimizer's learning rate, instead of its own.
            workers: Number of workers, instead of its own.
            seed: The seed, instead of its own.
            model_dir: The folder for the copy's checkpoints; None is none, so that the two do not mix.
            settings: Time limits, threads, shared memory, instead of its own.

        Raises:
            ConfigError: The framework, or how the model was given, has no place for the config or the rate.
        """
        own, state = self._model, self._live.state
        seed = self._seed if seed is None else seed
        refuse(*engine_complaints(workers, self._engine), *seed_complaints(seed))
        if learning_rate is not None and state:
            raise ConfigError(
                f"learning_rate={learning_rate}: this estimator was trained already, and continues with the"
                " rate of its optimizer's state.\nHint: copy it before its first fit."
            )
        model = FrameworkModel.unpacked(own.framework, own.packed, own.extra_preload)
        if config or learning_rate is not None:
            changed = model.replica_type.changed(
                model.spec, config=dict(config or {}), learning_rate=learning_rate
            )
            model = replace(model, spec=changed)
        made = type(self)(
            model,
            workers=self._workers if workers is None else workers,
            engine=self._engine,
            device=self._device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or self._settings,
            preparation=self._preparation,
            share_gpus=self._share_gpus,
        )
        if state:
            made._live.state = state
        return made.restore_columns(self.signature, list(self.history))

    def as_stage(
        self,
        *,
        inputCol: str | None = None,
        labelCol: str | None = None,
        predictionCol: str | None = None,
        **params: Any,
    ) -> KindlerEstimator:
        """This estimator as a stage of a Spark ML pipeline.

        `fit` of the stage trains a copy: this estimator stays as it is, and is where each fit begins.

        Args:
            inputCol: The model's input column; `inputCols` for several.
            labelCol: The target column.
            predictionCol: The column that the trained model adds.
            params: Any other parameter of `kindler.ml.KindlerEstimator`, such as `epochs` or `batchSize`.
        """
        stages: Any = importlib.import_module("kindler.ml")  # above this part, and loaded for this call alone
        stage: KindlerEstimator = stages.KindlerEstimator(
            estimator=self, inputCol=inputCol, labelCol=labelCol, predictionCol=predictionCol, **params
        )
        return stage

    def get_train_summary(self, tag: str = "loss") -> np.ndarray[Any, np.dtype[np.float64]]:
        """A training metric over all fits so far, as rows of (step, value, wall time).

        Args:
            tag: "loss" (per epoch), a metric's name, "rows_per_s" or "lr"; with `log_dir`, also "batch_loss"
                (per step). Orca's names "Loss", "LearningRate" and "Throughput" work, too.

        Raises:
            ConfigError: There is no such metric; the message lists the ones there are.
        """
        return self._summaries.series("train", tag)

    def get_validation_summary(self, tag: str = "loss") -> np.ndarray[Any, np.dtype[np.float64]]:
        """A validation metric over all fits so far, "loss" or a metric's name; see `get_train_summary`."""
        return self._summaries.series("validation", tag)

    @leaves_no_trace
    def get_model(self) -> Any:
        """The model with its trained weights, ready to predict: your own instance if you passed one."""
        return self._live.replica.trained_model()

    def _storable(self) -> Any:
        """What a kind of models can write: the model, or all that belongs to it where that is more."""
        return self._live.replica.stored_model()

    def _facts(self) -> dict[str, Any]:
        """What displays show, without making the model."""
        last = self.history[-1] if len(self.history) else {}
        spec = self._model.spec
        model = getattr(spec, "model", None) or getattr(spec, "model_creator", None)
        return {
            "framework": self._model.framework,
            "model": None if model is None else title(model).removesuffix("()"),
            "workers": "all slots" if self._workers is None else self._workers,
            "engine": self._engine,
            "device": self._device,
            "seed": self._seed,
            "model_dir": self._model_dir,
            "feature_cols": ", ".join(self._columns.features or ()),
            "label_cols": ", ".join(self._columns.labels or ()),
            "epochs": last.get("epoch", 0),
            **{name: value for name, value in last.items() if name not in BOOKKEEPING},
        }

    def __repr__(self) -> str:
        facts = self._facts()
        model = f"{facts['model']}, " if facts["model"] else ""
        return f"Estimator({facts['framework']}: {model}{facts['epochs']} epochs trained)"

    def _repr_html_(self) -> str:
        return card("Estimator", self._facts())

    @property
    def config(self) -> Mapping[str, Any]:
        """What creators are called with."""
        spec = self._model.spec
        found = spec.get("config") if isinstance(spec, Mapping) else getattr(spec, "config", None)
        return dict(found or {})

    @property
    def inputs(self) -> str | None:
        """How a PyTorch model is called: "positional", "dict" or "kwargs"; None for other frameworks."""
        return getattr(self._model.spec, "inputs", None) if self._model.row.package == "torch" else None

    @property
    def workers(self) -> int | None:
        """Number of workers; None is one per slot of the Spark application, or one per core."""
        return self._workers

    @property
    def settings(self) -> RunSettings:
        """Time limits, threads, shared memory."""
        return self._settings

    @property
    def model_dir(self) -> str | None:
        """The folder of checkpoints."""
        return self._model_dir

    @property
    def signature(self) -> dict[str, Any]:
        """The columns that the last `fit` read, as JSON: their names, and the dtype and row shape of each."""
        columns = self._columns
        shapes = {name: np.atleast_1d(shape).tolist() for name, shape in (columns.shapes or {}).items()}
        dtypes = {name: np.dtype(dtype).name for name, dtype in (columns.dtypes or {}).items()}
        return {
            "feature_cols": columns.feature_cols,
            "label_cols": columns.label_cols,
            "shapes": shapes or None,
            "dtypes": dtypes or None,
            "stack_features": columns.stack_features or False,
            "allow_nan": columns.allow_nan or False,
            "layout": self._layout,
        }

    @property
    def replica(self) -> Any:
        """The model in this process as its framework holds it: the model, its optimizer, epoch and step."""
        return self._live.replica

    def observers(self, options: FitOptions | EvaluateOptions) -> Sequence[RunObserver]:
        """What follows a run that begins; for subclasses that hear more of it than callbacks do."""
        return ()

    def continue_from(self, other: Estimator) -> None:
        """Take over what another estimator of the same model has learned, its columns and its history."""
        if other._live.state:
            self._live.state = other._live.state
            self.restore_columns(other.signature, list(other.history))

    def restore_columns(
        self, signature: Mapping[str, Any], history: Sequence[dict[str, Any]] = ()
    ) -> Estimator:
        """Take over the columns, and the history, of another estimator of the same model.

        Args:
            signature: The other estimator's `signature`.
            history: The rows of its `history`.
        """
        self._layout = dict(signature["layout"])
        self._columns = ColumnOptions(**{key: value for key, value in signature.items() if key != "layout"})
        self.history = History(history)
        return self

    @leaves_no_trace
    def save(self, path: str | PathLike[str]) -> None:
        """Write the model in its framework's own format. A file is written completely or not at all.

        For PyTorch this is a state dict that `torch.load` reads. For Keras the name decides: `.keras` is the
        model, `.weights.h5` its weights, and a name without a suffix a SavedModel for serving (on
        TensorFlow). For either, a name that ends in `.estimator` saves this whole estimator for
        `Estimator.load`.
        """
        self._warn_if_untrained("save")
        with beside(path) as unfinished:
            if str(path).endswith(estimator_file.SUFFIX):
                estimator_file.write(unfinished, self._as_saved())
            else:
                self._live.replica.save(str(unfinished))

    @leaves_no_trace
    def to_onnx(self, path: str | PathLike[str], example: Any = None) -> None:
        """Write the trained model as an ONNX file that takes any number of rows.

        Args:
            path: The file.
            example: A few rows, as `predict` takes them. None takes the shapes of the last `fit`.

        Raises:
            ConfigError: The model cannot be exported, or the shapes of its inputs are not known.
            MissingExtraError: A package that this needs is not installed.
        """
        refuse(*ability_complaints(self._model.row, "export"))
        self._warn_if_untrained("to_onnx")
        write_onnx(
            self._model, self._live.for_scoring(), path, example_of(example, self._columns, self._layout)
        )

    @leaves_no_trace
    def to_openvino(self, path: str | PathLike[str], example: Any = None) -> None:
        """Write the trained model as files of OpenVINO, which `Estimator.from_openvino` reads.

        Args:
            path: The .xml file; the weights go to a .bin file of the same name.
            example: A few rows, as `predict` takes them. None takes the shapes of the last `fit`.

        Raises:
            ConfigError: The model cannot be converted, or the shapes of its inputs are not known.
            MissingExtraError: OpenVINO is not installed.
        """
        self._warn_if_untrained("to_openvino")
        write_openvino(
            self._model,
            self._live.for_scoring(),
            path,
            lambda: example_of(example, self._columns, self._layout),
        )

    load = Door()
    """`Estimator.load(path)` is `Estimator.from_file(path)`; `est.load(path)` is `est.load_weights(path)`."""

    @leaves_no_trace
    def load_weights(self, path: str | PathLike[str]) -> Estimator:
        """Load weights from a file that `save` or the framework itself wrote; the same as `est.load(path)`.

        For Keras this includes the state of the optimizer if the file has it and the optimizer is the same; a
        warning says if it is not.
        """
        self._live.load_weights(str(path))
        return self

    @classmethod
    @leaves_no_trace
    def from_file(cls, path: str | PathLike[str], *, trusted: bool = False, **options: Any) -> Estimator:
        """Create an estimator, optimizer included, from a file; the same as `Estimator.load(path)`.

        Args:
            path: An `.estimator` file that `save` wrote, of any framework, or a `.keras` file.
            trusted: An `.estimator` file contains the model's code as a pickle, which can run anything when
                it is read: pass True only for files from people whose programs you would run. A `.keras` file
                needs it only if it contains lambdas.
            options: What is not in the file, or is to be different: `workers`, `engine`, `device`,
                `model_dir`, `log_dir`, `settings`; for a `.keras` file, the arguments of `from_keras`.

        Raises:
            UntrustedError: The file contains code, and `trusted` was not passed.
            ConfigError: The file is not of either kind.
        """
        if str(path).endswith(".keras"):
            from kindler.frameworks.keras.files import read_model

            return cls.from_keras(model=read_model(str(path), trusted=trusted), **options)
        saved = estimator_file.read(path)
        if not trusted:
            raise UntrustedError(what=f"loading {path}", reason="it holds a model's code, as a pickle")
        return cls._of_saved(saved, options)

    @leaves_no_trace
    def save_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write all that training continues from: weights, optimizer, scheduler, random state, epoch."""
        state = self._live.state
        if not state:
            raise NotFittedError("nothing was trained yet; call fit() before save_checkpoint().")
        replica = self._live.replica
        header = Header(
            framework=self._model.framework, epoch=replica.epoch, step=replica.step, seed=self._seed
        )
        write_checkpoint(path, header, state)

    @leaves_no_trace
    def load_checkpoint(self, path: str | PathLike[str]) -> Estimator:
        """Continue from a file that `save_checkpoint`, a run with `model_dir` or a ModelCheckpoint wrote.

        The file of a model, such as Keras's ModelCheckpoint writes, is loaded with `load_weights`.

        The next `fit` starts a new epoch, even if the checkpoint was written in the middle of one;
        `fit(resume=True)` continues in the middle.

        Raises:
            ConfigError: The file is not a complete checkpoint, or is one of another framework.
        """
        if is_model_file(str(path)) and not _begins_as_checkpoint(path):
            return self.load_weights(path)
        checkpoint = read_checkpoint(path)
        if checkpoint.header.framework != self._model.framework:
            raise ConfigError(
                f"{path} is a checkpoint of {checkpoint.header.framework!r}, but this model is one of"
                f" {self._model.framework!r}."
            )
        self._live.load_state(checkpoint.state)
        return self

    @staticmethod
    def latest_checkpoint(model_dir: str | PathLike[str]) -> str | None:
        """The newest complete checkpoint in a folder, or None; `load_checkpoint` reads it.

        This is a checkpoint of a run whose `model_dir` the folder was, or a newer file that a callback wrote
        there: Kindler's ModelCheckpoint or that of Keras. Damaged checkpoints of a run are skipped with a
        warning that names them.
        """
        return latest(model_dir)

    def _as_saved(self) -> estimator_file.Saved:
        facts = {
            "framework": self._model.framework,
            "workers": self._workers,
            "engine": self._engine,
            "device": self._device,
            "seed": self._seed,
            "preload": list(self._model.extra_preload),
            "signature": self.signature,
            "history": list(self.history),
        }
        prepared = self._preparation.functions or self._preparation.active
        packed = pickle_for_workers(self._preparation) if prepared else b""
        return estimator_file.Saved(facts, self._model.packed, self._live.state, packed)

    @classmethod
    def _of_saved(cls, saved: estimator_file.Saved, options: dict[str, Any]) -> Estimator:
        facts = saved.facts
        allowed = {"workers", "engine", "device", "share_gpus", "model_dir", "log_dir", "settings"}
        wrong = sorted(set(options) - allowed)
        refuse(*(f"{name} is in the file and cannot be passed to load." for name in wrong))
        model = FrameworkModel.unpacked(facts["framework"], saved.recipe, tuple(facts["preload"]))
        known = {name: facts[name] for name in ("workers", "engine", "device", "seed")}
        arguments = {"model_dir": None, "settings": RunSettings(), **known, **options}
        if saved.preparation:
            arguments["preparation"] = cloudpickle.loads(saved.preparation)
        estimator = cls(model, **arguments)
        estimator.restore_columns(facts["signature"], facts["history"])
        estimator._live.state = saved.state
        return estimator

    @property
    def preparation(self) -> Preparation:
        """What is done to rows between the data and the model: the transform, collate and padding."""
        return self._preparation

    def preparer(self) -> Preparer:
        """What does to rows that are scored what `predict` does, for whoever calls the model itself."""
        columns = self._columns
        features = columns.features or [name for name in ("features", "x") if name in self._layout] or ["x"]
        return Preparer(
            self._preparation,
            Columns(features=tuple(Column(name=name, role="feature") for name in features), labels=()),
            trains=False,
            seed=self._seed,
            labels=tuple(columns.labels or ("label", "y")),
        )

    def _with_preparation(self, options: AnyOptions, *, trains: bool = False) -> AnyOptions:
        """The options, with what the estimator does to rows."""
        own = self._preparation
        columns = replace(options.columns, ragged=own.ragged, length_col=own.length_col if trains else None)
        return replace(options, columns=columns, preparation=own if own.ragged else None)

    def _warn_of_chance(self) -> None:
        """Say once that rows are augmented where they are judged."""
        if self._preparation.augments_all and not self._warned_of_chance:
            self._warned_of_chance = True
            warn_caller(
                "transform draws random numbers and there is no eval_transform: rows that are evaluated or"
                " scored are augmented as well, each in the same way every time.\n"
                "Hint: pass eval_transform=..., which does the rest of it without chance."
            )

    def _warn_if_untrained(self, call: str) -> None:
        """Say that the model's weights are those that a creator makes."""
        if self._live.is_untrained:
            warn_caller(
                f"{call}: this model was never trained, and no weights were loaded. Its weights are those"
                f" that its creator makes: random numbers, drawn with seed={self._seed}, unless the creator"
                " loads trained ones.\n"
                "Hint: call fit(), load(path) or load_checkpoint(path) first. If the creator loads trained"
                " weights, pass the model itself (model=...), or silence this with"
                ' warnings.filterwarnings("ignore", category=kindler.errors.UntrainedWarning).',
                UntrainedWarning,
            )

    def _run(
        self,
        data: Input,
        options: FitOptions | EvaluateOptions,
        *,
        validation: Input | None = None,
        model_dir: str | None = None,
        log_steps: bool = False,
        watched: bool = False,
        hear: Hear,
    ) -> RunResults:
        observers = self.observers(options)

        def heard(fields: Mapping[str, Any]) -> None:
            hear(fields)
            for observer in observers:
                observer.hear(fields)

        plan = RunPlan(
            model=self._model,
            options=options,
            data=data,
            validation=validation,
            state=self._live.state,
            workers=self._workers,
            engine=self._engine,
            device=self._device,
            seed=self._seed,
            settings=self._settings,
            share_gpus=self._share_gpus,
            model_dir=model_dir,
            log_steps=log_steps or bool(observers),
            watched=watched,
            hear=heard,
        )
        with ExitStack() as entered:
            for observer in observers:
                entered.enter_context(observer)
            results = run(plan)
            for observer in observers:
                observer.finish(results.rows)
        return results


def _recognised(data: Any) -> Input | None:
    return None if data is None else recognise(data)


def _begins_as_checkpoint(path: str | PathLike[str]) -> bool:
    folder, name = split(path)
    return is_checkpoint(folder_at(folder).read(name, 64))


def _libraries(model: Any) -> tuple[str, ...]:
    """The modules of large libraries that a model's class is in, which workers import ahead of need."""
    cls = model if isinstance(model, type) else type(model)
    large = ("transformers", "lightning", "pytorch_lightning")
    found = (base.__module__ for base in cls.__mro__ if base.__module__.partition(".")[0] in large)
    return tuple(dict.fromkeys(found))


def _flat(metrics: Any) -> list[Any]:
    if isinstance(metrics, Mapping):
        return list(metrics.values())
    return list(metrics) if isinstance(metrics, list | tuple) else [metrics]


def _kept_message(step: int, model_dir: str | None) -> str:
    text = f"training was interrupted after step {step:,}. The model keeps what it has learned by then, and"
    resume = "; fit(resume=True) finishes this run" if model_dir is not None else ""
    return f"{text} the next fit goes on from there{resume}."


def _both(first: Hear, second: Hear) -> Hear:
    def hear(fields: Mapping[str, Any]) -> None:
        first(fields)
        second(fields)

    return hear
