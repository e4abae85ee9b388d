"""How estimators are created: `Estimator.from_torch` and the others.

Arguments they share are typed and documented once, in `EstimatorArguments`; `help()` and signatures show them
in each constructor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from os import PathLike
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar

from kindler.config import RunSettings
from kindler.data.preparation import Preparation
from kindler.data.ragged import Pad, PadValue
from kindler.errors import did_you_mean
from kindler.estimator.checks import refuse, run_complaints
from kindler.estimator.model import FrameworkModel
from kindler.frameworks.caller_state import leaves_no_trace
from kindler.frameworks.registry import FRAMEWORKS
from kindler.train.options import Engine, from_arguments
from kindler.types import (
    CompileArguments,
    Config,
    KerasModel,
    TorchLoss,
    TorchMetrics,
    TorchModel,
    TorchOptimizer,
    TorchScheduler,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

P = ParamSpec("P")
T = TypeVar("T")

_OF_COMPAT = ("from_graph", "from_model_fn", "from_mxnet")
_LARGE_LIBRARIES = ("transformers", "lightning", "pytorch_lightning")


class RunArguments(TypedDict, total=False):
    """Where an estimator runs, and what it writes.

    Attributes:
        workers: Number of workers. None is one per slot of the Spark application; on this machine one per
            GPU, or one per core without any.
        engine: "spark", "local", or "auto": Spark if the data is in Spark.
        device: "auto", "cpu", "cuda" or, for PyTorch, "cuda:N".
        share_gpus: Whether several workers may compute on one GPU; otherwise each needs its own.
        model_dir: The folder for checkpoints, as a path or a URL that fsspec understands. Workers on several
            machines must share it.
        seed: Decides the initial weights that creators draw, the order of rows, and dropout.
        log_dir: The folder that the driver writes event files for TensorBoard to.
        settings: Time limits, threads, shared memory.
    """

    workers: int | None
    engine: Engine
    device: str
    share_gpus: bool
    model_dir: str | PathLike[str] | None
    seed: int
    log_dir: str | PathLike[str] | None
    settings: RunSettings | None


class PreparationArguments(TypedDict, total=False):
    """What happens to rows between the data and the model.

    Attributes:
        transform: A function of a row, given as a dict of its feature and label columns and, if it has a
            parameter `rng`, a random generator for that row and epoch. It returns a dict of columns for the
            model, and runs in the workers, in parallel with the steps. With `kindler.batched`, a function of
            a batch of columns.
        eval_transform: The same for `evaluate`, validation and `predict`. None uses `transform` there.
        collate: A function of a list of rows that returns a dict of arrays: the batch.
        pad: "batch" pads rows of different lengths to the longest in the batch, a number to that length; or a
            dict of these by column. The model gets a mask for each padded column, after all columns.
        pad_value: The value to pad with, or a dict of values by column. None is 0, and -100 for labels.
        masks: Whether the model gets masks.
        length_col: A column whose values have, or are, the lengths of rows: each step then trains on rows of
            similar length.
    """

    transform: Callable[..., Any] | None
    eval_transform: Callable[..., Any] | None
    collate: Callable[..., Any] | None
    pad: Pad | Mapping[str, Pad] | None
    pad_value: PadValue | Mapping[str, PadValue] | None
    masks: bool
    length_col: str | None


class EstimatorArguments(RunArguments, PreparationArguments, total=False):
    """`RunArguments` and `PreparationArguments`."""


_DEFAULTS = {"engine": "auto", "device": "auto", "share_gpus": False, "seed": 0, "masks": True}


def _constructor(*shared: type, more: str | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for constructors whose last argument is `**options`, as declared by these typed dicts.

    They appear in its signature and docstring. Others are rejected, unless `more` names what they are.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        function.__qualname__ = f"Estimator.{function.__name__}"
        signature = inspect.signature(function)
        own = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        fields = {name: type_ for each in shared for name, type_ in each.__annotations__.items()}
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_DEFAULTS.get(name),
                annotation=getattr(type_, "__forward_arg__", type_),
            )
            for name, type_ in fields.items()
            if name not in signature.parameters
        ]
        names = [item.name for item in (*own, *options)]
        rest = [] if more is None else [signature.parameters[more]]
        guarded = leaves_no_trace(function)

        @functools.wraps(function)
        def create(*args: P.args, **kwargs: P.kwargs) -> T:
            wrong = [] if more is not None else sorted(kwargs.keys() - set(names))
            if wrong:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {wrong[0]!r}."
                    f"{did_you_mean(wrong[0], names)}"
                )
            return guarded(*args, **kwargs)

        described = "".join(_described(each) for each in shared)
        lines = (inspect.getdoc(function) or "").splitlines(keepends=True)
        create.__doc__ = "".join(described if "options: See" in line else line for line in lines)
        create.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *options, *rest]
        )
        return create

    return decorate


def _described(shared: type) -> str:
    return (inspect.getdoc(shared) or "").partition("Attributes:\n")[2].rstrip("\n") + "\n"


class _ConstructorsOfOthers(type):
    """Class methods of other distributions, such as `Estimator.from_graph`: the functions that entry
    points of the group `kindler.estimators` name, called with the class.
    """

    if not TYPE_CHECKING:  # a name that nobody has stays an error of type checkers

        def __getattr__(cls, name: str) -> Any:
            for entry in entry_points(group="kindler.estimators", name=name):
                return MethodType(entry.load(), cls)
            hint = "\nHint: pip install 'kindler[compat]'" if name in _OF_COMPAT else ""
            raise AttributeError(f"Estimator has no attribute {name!r}.{hint}", name=name, obj=cls)


class Constructors(metaclass=_ConstructorsOfOthers):
    """The constructors of `Estimator`."""

    @classmethod
    def _create(cls, model: FrameworkModel, /, **arguments: Any) -> Self:
        return cls(model, **arguments)  # type: ignore[call-arg]

    @classmethod
    @_constructor(RunArguments, PreparationArguments)
    def from_torch(
        cls,
        model: TorchModel,
        *,
        optimizer: TorchOptimizer | None = None,
        loss: TorchLoss | None = None,
        metrics: TorchMetrics | None = None,
        scheduler: TorchScheduler | None = None,
        scheduler_step: Literal["epoch", "step"] = "epoch",
        config: Config | None = None,
        precision: Literal["bf16", "fp16"] | None = None,
        tf32: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulation_steps: int = 1,
        inputs: Literal["positional", "dict", "kwargs"] = "positional",
        compile: Literal["auto", "default", "graphs", "reduce-overhead"] | None = None,  # noqa: A002
        device_cache: Literal["auto"] | bool = "auto",
        process_group: bool = False,
        loss_weights: Sequence[float] | Mapping[str, float] | None = None,
        train_step: Callable[..., Any] | None = None,
        eval_step: Callable[..., Any] | None = None,
        **options: Unpack[EstimatorArguments],
    ) -> Self:
        """Create an estimator from a PyTorch model.

        Args:
            model: An `nn.Module`, or a creator: a callable that is called with `config` and returns one.
            optimizer: An `Optimizer` over the model's parameters; an optimizer class or a partial of one; or
                a creator that is called with `(model, config)`. Not needed to evaluate or predict.
            loss: A loss module, a function of `(outputs, targets)`, or a creator that is called with
                `config`. "model" is the loss that the model computes itself from its inputs and labels. A
                list has one loss per output and label, a dict the same by output name.
            metrics: A metric, a list, or a dict from names to metrics: torchmetrics objects, functions of
                `(outputs, targets)` that return a mean over rows, or names: "accuracy", "top_5" (or another
                number), "auc", "f1", "precision", "recall", "log_loss", "mse", "rmse", "mae", "r2".
            scheduler: A class of learning-rate schedulers, a partial of one, or a creator that is called with
                `(optimizer, config)`.
            scheduler_step: Whether the scheduler steps after each "epoch" or each "step".
            config: The argument of all creators.
            precision: "bf16" and "fp16" run forward passes in half precision where torch considers it safe;
                with "fp16", losses are scaled so that small gradients are not lost.
            tf32: Whether a GPU may multiply float32 matrices with TF32's ten bits; faster, less exact.
            clip_norm: Clip the gradient to this norm.
            clip_value: Clip each element of the gradient to this absolute value.
            accumulation_steps: Split each step into this many forward and backward passes: less memory, same
                result.
            inputs: "positional" calls `model(*columns)`, "dict" calls `model({name: column})`, "kwargs" calls
                `model(name=column)`, as Hugging Face models expect.
            compile: "default" or "reduce-overhead" compile the model with `torch.compile`. "graphs" runs each
                training step as one CUDA graph, "auto" does so where it is possible; both need a GPU.
            device_cache: Whether features stay on the GPU between epochs. "auto": if they take no more than a
                third of its free memory. Results are the same.
            process_group: Whether the model may call `torch.distributed`, as SyncBatchNorm does: the default
                process group joins all workers before the model is created.
            loss_weights: The weight of each loss in their sum, as a list or dict. None is 1 for each.
            train_step: A function of `(run, batch)` that performs a training step; see `StepRun` for
                `run`. `batch` is a dict of tensors by column. It returns the loss, or a dict of numbers to
                log. `optimizer` may then be a dict of optimizers by name.
            eval_step: The same for `evaluate` and validation. None uses `loss` and `metrics` there.
            options: See `RunArguments` and `PreparationArguments`.
        """
        arguments = dict(locals()) | {"config": dict(config or {})}
        steps = train_step is not None or eval_step is not None
        framework = "torch_step" if steps else "torch"
        FRAMEWORKS.load(framework)
        from kindler.frameworks.torch.spec import StepSpec, TorchSpec, check

        spec = from_arguments(StepSpec if steps else TorchSpec, arguments)
        run, preparation = _split(options)
        refuse(*check(spec), *run_complaints(run), *preparation.complaints())
        classes = {base for metric in _flat(metrics) for base in type(metric).__mro__}
        uses_torchmetrics = "torchmetrics" in {base.__module__.partition(".")[0] for base in classes}
        preload = (*(("torchmetrics",) if uses_torchmetrics else ()), *_libraries(model))
        return cls._create(
            FrameworkModel(framework=framework, spec=spec, extra_preload=preload),
            preparation=preparation,
            **run,
        )

    @classmethod
    @_constructor(RunArguments, PreparationArguments)
    def from_lightning(
        cls,
        model: TorchModel,
        *,
        batch: Literal["tuple", "dict"] = "tuple",
        config: Config | None = None,
        precision: Literal["bf16"] | None = None,
        tf32: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        inputs: Literal["positional", "dict", "kwargs"] = "positional",
        **options: Unpack[EstimatorArguments],
    ) -> Self:
        """Create an estimator from a LightningModule, as it is.

        Its `training_step`, `validation_step`, `configure_optimizers` and hooks are called as Lightning calls
        them; what it logs is in the history. Unsupported features are rejected here, by name.

        Args:
            model: The module, or a creator: a callable that is called with `config` and returns one.
            batch: What its steps get: a "tuple" of feature and label columns (a single column is passed as
                is), or a "dict" of columns by name.
            config: The argument of the creator.
            precision: "bf16" runs steps in half precision where torch considers it safe.
            tf32: Whether a GPU may multiply float32 matrices with TF32's ten bits; faster, less exact.
            clip_norm: Clip the gradient to this norm.
            clip_value: Clip each element of the gradient to this absolute value.
            inputs: How `predict` calls the module if it has no `predict_step`; see `from_torch`.
            options: See `RunArguments` and `PreparationArguments`.
        """
        own = {name: value for name, value in locals().items() if name not in ("cls", "options")}
        run, preparation = _split(options)
        refuse(*run_complaints(run), *preparation.complaints())
        spec = FRAMEWORKS.load("lightning").make_spec(**own)
        return cls._create(
            FrameworkModel(framework="lightning", spec=spec, extra_preload=_libraries(model)),
            preparation=preparation,
            **run,
        )

    @classmethod
    @_constructor(RunArguments, PreparationArguments)
    def from_keras(
        cls,
        model: KerasModel,
        *,
        config: Config | None = None,
        compile_args: CompileArguments | None = None,
        keras_backend: Literal["tensorflow", "jax", "torch"] | None = None,
        inputs: Literal["auto", "positional", "dict"] = "auto",
        **options: Unpack[EstimatorArguments],
    ) -> Self:
        """Create an estimator from a Keras model: Keras 3 on any backend, or Keras 2 as `tf_keras`.

        Args:
            model: A compiled model: functional, sequential or subclassed; or a creator: a callable that is
                called with `config` and returns one.
            config: The argument of all creators.
            compile_args: The arguments of `compile`, for a model that is not compiled yet: a dict, or a
                creator that is called with `config` and returns one.
            keras_backend: The backend of the workers. None is the backend of the model, or the one that
                `import keras` would choose here.
            inputs: How several feature columns are passed to the model: in order ("positional"), by name
                ("dict"), or by name if the model's inputs have the names of the columns ("auto").
            options: See `RunArguments` and `PreparationArguments`.
        """
        own = {name: value for name, value in locals().items() if name not in ("cls", "options")}
        run, preparation = _split(options)
        refuse(*run_complaints(run), *preparation.complaints())
        from kindler.frameworks.keras.spec import make_spec  # which loads Keras with the model

        spec = make_spec(**own)
        return cls._create(
            FrameworkModel(framework="keras", spec=spec),
            preparation=replace(preparation, text=spec.backend == "tensorflow"),
            **run,
        )

    @classmethod
    @leaves_no_trace
    def from_openvino(
        cls,
        model_path: str | PathLike[str],
        *,
        threads: int | None = None,
        config: Config | None = None,
        device: str = "CPU",
        workers: int | None = None,
        engine: Engine = "auto",
        settings: RunSettings | None = None,
    ) -> Self:
        """Create an estimator that predicts with an OpenVINO model; it cannot be trained.

        `predict` takes any number of rows and any `batch_size`, even if the model was made for a fixed number
        of rows. Every host compiles the model once. Columns go to the inputs of their names, or else in
        order.

        Args:
            model_path: The .xml file of a model, with its weights in a .bin file beside it; or a file of
                another format that OpenVINO reads, such as ONNX.
            threads: Compute threads of each process. None is one in Spark's tasks, and otherwise the cores
                that the process may use.
            config: OpenVINO properties for compiling, such as `{"PERFORMANCE_HINT": "THROUGHPUT"}`.
            device: The OpenVINO device to compute on.
            workers: Number of processes that score local shards and Parquet files. None is one per core.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            settings: Time limits, threads.

        Raises:
            ConfigError: There is no such file, or OpenVINO cannot read it.
            MissingExtraError: OpenVINO is not installed.
        """
        run = {"workers": workers, "engine": engine, "settings": settings, "device": "cpu"}
        refuse(*run_complaints(run))
        spec = FRAMEWORKS.load("openvino").make_spec(
            model_path=model_path, threads=threads, properties=config, device=device
        )
        return cls._create(FrameworkModel(framework="openvino", spec=spec), **run)

    @classmethod
    @_constructor(RunArguments, more="own")
    def from_framework(cls, framework: str, **own: Any) -> Self:
        """Create an estimator for a model of any framework, including those that other packages add.

        Args:
            framework: "torch", "torch_step", "lightning", "keras", "openvino", or the name of an entry point
                of the group `kindler.frameworks`.
            options: See `RunArguments`.
            own: The framework's own arguments: the model, its optimizer and so on.
        """
        run = {name: own.pop(name) for name in RunArguments.__annotations__ if name in own}
        refuse(*run_complaints(run))
        spec = FRAMEWORKS.load(framework).make_spec(**own)
        return cls._create(FrameworkModel(framework=framework, spec=spec), **run)


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], Preparation]:
    names = PreparationArguments.__annotations__.keys()
    preparation = {name: value for name, value in options.items() if name in names}
    return {k: v for k, v in options.items() if k not in names}, Preparation(**preparation)


def _libraries(model: Any) -> tuple[str, ...]:
    cls = model if isinstance(model, type) else type(model)
    modules = (base.__module__ for base in cls.__mro__)
    return tuple(dict.fromkeys(name for name in modules if name.partition(".")[0] in _LARGE_LIBRARIES))


def _flat(metrics: Any) -> list[Any]:
    if isinstance(metrics, Mapping):
        return list(metrics.values())
    return list(metrics) if isinstance(metrics, list | tuple) else [metrics]
