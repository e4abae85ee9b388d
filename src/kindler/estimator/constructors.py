"""How estimators are created: `Estimator.from_torch` and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from os import PathLike
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from kindler.config import Device, Optimization, RunSettings
from kindler.data.preparation import Prepare
from kindler.errors import ConfigError
from kindler.estimator.checks import device_of, group_complaints, prepare_complaints, refuse, run_complaints
from kindler.estimator.groups import names_groups
from kindler.estimator.model import FrameworkModel
from kindler.frameworks.caller_state import leaves_no_trace
from kindler.frameworks.registry import FRAMEWORKS
from kindler.train.options import Engine, from_arguments
from kindler.types import (
    CompileArguments,
    Config,
    KerasModel,
    Lora,
    TextTask,
    TorchLoss,
    TorchMetrics,
    TorchModel,
    TorchOptimizer,
    TorchScheduler,
)

if TYPE_CHECKING:
    from peft import PeftConfig
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")

_OF_COMPAT = ("from_graph", "from_model_fn", "from_mxnet")
_LARGE_LIBRARIES = ("transformers", "lightning", "pytorch_lightning")


def _constructor(function: Callable[P, T]) -> Callable[P, T]:
    function.__qualname__ = f"Estimator.{function.__name__}"
    return names_groups(leaves_no_trace(function))


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
    @_constructor
    def from_torch(
        cls,
        model: TorchModel,
        *,
        optimizer: TorchOptimizer | None = None,
        loss: TorchLoss | None = None,
        metrics: TorchMetrics | None = None,
        scheduler: TorchScheduler | None = None,
        config: Config | None = None,
        inputs: Literal["positional", "dict", "kwargs"] = "positional",
        train_step: Callable[..., Any] | None = None,
        eval_step: Callable[..., Any] | None = None,
        optimization: Optimization | None = None,
        prepare: Prepare | None = None,
        device: str | Device = "auto",
        workers: int | None = None,
        engine: Engine = "auto",
        seed: int = 0,
        settings: RunSettings | None = None,
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
            config: The argument of all creators.
            inputs: "positional" calls `model(*columns)`, "dict" calls `model({name: column})`, "kwargs" calls
                `model(name=column)`, as Hugging Face models expect.
            train_step: A function of `(run, batch)` that performs a training step; see `StepRun` for
                `run`. `batch` is a dict of tensors by column. It returns the loss, or a dict of numbers to
                log. `optimizer` may then be a dict of optimizers by name.
            eval_step: The same for `evaluate` and validation. None uses `loss` and `metrics` there.
            optimization: Gradient clipping and accumulation, when the scheduler steps, weights of losses.
            prepare: What happens to rows between the data and the model: a transform, collating, padding.
            device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"; or a `Device`, with precision,
                compiling and more.
            workers: Number of workers. None is one per slot of the Spark application; on this machine one per
                GPU, or one that uses all cores.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            seed: Decides the initial weights that creators draw, the order of rows, and dropout.
            settings: Time limits, threads, shared memory, what to do about NaN losses.
        """
        names = ("model", "optimizer", "loss", "metrics", "scheduler", "inputs", "train_step", "eval_step")
        given = locals()
        on = device_of(device)
        arguments = {
            **vars(optimization or Optimization()),
            **{name: getattr(on, name) for name in ("precision", "tf32", "compile", "process_group")},
            **{name: given[name] for name in names},
            "device_cache": on.cache,
            "config": dict(config or {}),
        }
        steps = train_step is not None or eval_step is not None
        framework = "torch_step" if steps else "torch"
        FRAMEWORKS.load(framework)
        from kindler.frameworks.torch.spec import StepSpec, TorchSpec, check

        spec = from_arguments(StepSpec if steps else TorchSpec, arguments)
        run = {"workers": workers, "engine": engine, "device": on, "seed": seed, "settings": settings}
        refuse(*check(spec), *run_complaints(run), *prepare_complaints(prepare))
        classes = {base for metric in _flat(metrics) for base in type(metric).__mro__}
        uses_torchmetrics = "torchmetrics" in {base.__module__.partition(".")[0] for base in classes}
        preload = (*(("torchmetrics",) if uses_torchmetrics else ()), *_libraries(model))
        made = FrameworkModel(framework=framework, spec=spec, extra_preload=preload)
        return cls._create(made, prepare=prepare, **run)

    @classmethod
    @_constructor
    def from_huggingface(
        cls,
        model: TorchModel | str | PathLike[str],
        tokenizer: Any = None,
        *,
        task: TextTask,
        adapter: Lora | PeftConfig | None = None,
        config: Config | None = None,
        max_length: int | None = None,
        optimizer: TorchOptimizer | None = None,
        metrics: TorchMetrics | None = None,
        scheduler: TorchScheduler | None = None,
        optimization: Optimization | None = None,
        length_col: str | None = None,
        device: str | Device = "auto",
        workers: int | None = None,
        engine: Engine = "auto",
        seed: int = 0,
        settings: RunSettings | None = None,
    ) -> Self:
        """Create an estimator from a text model of Hugging Face: a column of text in, predictions out.

        Texts are tokenised in the workers, and padded to the longest of a batch. `predict` computes rows of
        similar length together and equal texts once; results have the order of the rows.

        Args:
            model: A folder that `save_pretrained` has written, the name of a model on the hub, or the model
                itself. For "embedding" also a folder of sentence-transformers, or a `SentenceTransformer`.
            tokenizer: The same for the tokenizer. None takes the one in the model's folder.
            task: "text-classification" predicts a label and its score, "token-classification" entities,
                "regression" a number, "embedding" a vector. "text-generation" and "text2text-generation"
                continue or answer a text. All but "embedding" can be trained, with the model's own loss.
            adapter: `Lora(...)`, or a configuration of peft, trains small adapters over the model, whose own
                weights stay as they are: workers exchange, and checkpoints hold, the adapters alone. Workers
                read a model from its folder or the hub themselves, and check its hash.
            config: What to change of the configuration that is read, such as `{"num_labels": 3}`.
            max_length: Tokens after which a text is cut. None is what the model can take.
            optimizer: As in `from_torch`. None is AdamW with a learning rate of 5e-5.
            metrics: As in `from_torch`; of the logits and the labels.
            scheduler: As in `from_torch`.
            optimization: Gradient clipping and accumulation, when the scheduler steps.
            length_col: A column of text or lengths: each training step then has rows of similar length.
            device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"; or a `Device`, with precision,
                compiling and more.
            workers: Number of workers. None is one per slot of the Spark application; on this machine one per
                GPU, or one that uses all cores.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            seed: Decides the order of rows, dropout, and what `generate` draws.
            settings: Time limits, threads, shared memory, what to do about NaN losses.

        Raises:
            ConfigError: The task or the model cannot be used; the message says why.
            MissingExtraError: transformers is not installed.
        """
        FRAMEWORKS.load("torch")
        from kindler.frameworks.torch.huggingface import TextModel

        text = TextModel.read(
            model,
            tokenizer,
            task,
            config=config or {},
            max_length=max_length,
            adapter=adapter,
            seed=seed,
            device=device_of(device).name,
        )
        if adapter is not None and hasattr(optimizer, "param_groups"):
            raise ConfigError(
                "optimizer holds the model's own weights, which adapter=... leaves as they are.\n"
                "Hint: pass a class or a partial of one, such as partial(torch.optim.AdamW, lr=1e-4)."
            )
        return cls.from_torch(
            text.model,
            optimizer=text.optimizer if optimizer is None else optimizer,
            loss=text.loss,
            metrics=metrics,
            scheduler=scheduler,
            inputs="kwargs",
            optimization=optimization,
            prepare=Prepare(collate=text.tokens, length_col=length_col),
            device=device,
            workers=workers,
            engine=engine,
            seed=seed,
            settings=settings,
        )

    @classmethod
    @_constructor
    def from_lightning(
        cls,
        model: TorchModel,
        *,
        batch: Literal["tuple", "dict"] = "tuple",
        config: Config | None = None,
        inputs: Literal["positional", "dict", "kwargs"] = "positional",
        optimization: Optimization | None = None,
        prepare: Prepare | None = None,
        device: str | Device = "auto",
        workers: int | None = None,
        engine: Engine = "auto",
        seed: int = 0,
        settings: RunSettings | None = None,
    ) -> Self:
        """Create an estimator from a LightningModule, as it is.

        Its `training_step`, `validation_step`, `configure_optimizers` and hooks are called as Lightning calls
        them; what it logs is in the history. Unsupported features are rejected here, by name.

        Args:
            model: The module, or a creator: a callable that is called with `config` and returns one.
            batch: What its steps get: a "tuple" of feature and label columns (a single column is passed as
                is), or a "dict" of columns by name.
            config: The argument of the creator.
            inputs: How `predict` calls the module if it has no `predict_step`; see `from_torch`.
            optimization: Gradient clipping.
            prepare: What happens to rows between the data and the model: a transform, collating, padding.
            device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"; or a `Device` with
                `precision="bf16"`, `tf32` or `share`.
            workers: Number of workers. None is one per slot of the Spark application; on this machine one per
                GPU, or one that uses all cores.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            seed: Decides the initial weights that creators draw, the order of rows, and dropout.
            settings: Time limits, threads, shared memory, what to do about NaN losses.
        """
        on, steps = device_of(device), optimization or Optimization()
        run = {"workers": workers, "engine": engine, "device": on, "seed": seed, "settings": settings}
        refuse(
            *run_complaints(run),
            *prepare_complaints(prepare),
            *group_complaints(on, "LightningModules", "name", "share", "precision", "tf32"),
            *group_complaints(steps, "LightningModules", "clip_norm", "clip_value"),
        )
        spec = FRAMEWORKS.load("lightning").make_spec(
            model=model,
            batch=batch,
            config=config,
            inputs=inputs,
            precision=on.precision,
            tf32=on.tf32,
            clip_norm=steps.clip_norm,
            clip_value=steps.clip_value,
        )
        made = FrameworkModel(framework="lightning", spec=spec, extra_preload=_libraries(model))
        return cls._create(made, prepare=prepare, **run)

    @classmethod
    @_constructor
    def from_keras(
        cls,
        model: KerasModel,
        *,
        config: Config | None = None,
        compile_args: CompileArguments | None = None,
        keras_backend: Literal["tensorflow", "jax", "torch"] | None = None,
        inputs: Literal["auto", "positional", "dict"] = "auto",
        prepare: Prepare | None = None,
        device: str | Device = "auto",
        workers: int | None = None,
        engine: Engine = "auto",
        seed: int = 0,
        settings: RunSettings | None = None,
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
            prepare: What happens to rows between the data and the model: a transform, collating, padding.
            device: "auto" (a GPU if there is one), "cpu" or "cuda"; or a `Device` with `share`.
            workers: Number of workers. None is one per slot of the Spark application; on this machine one per
                GPU, or one that uses all cores.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            seed: Decides the initial weights that creators draw, the order of rows, and dropout.
            settings: Time limits, threads, shared memory, what to do about NaN losses.
        """
        on = device_of(device)
        run = {"workers": workers, "engine": engine, "device": on, "seed": seed, "settings": settings}
        refuse(
            *run_complaints(run),
            *prepare_complaints(prepare),
            *group_complaints(on, "Keras models", "name", "share"),
        )
        from kindler.frameworks.keras.spec import make_spec  # which loads Keras with the model

        spec = make_spec(
            model=model, config=config, compile_args=compile_args, keras_backend=keras_backend, inputs=inputs
        )
        prepare = replace(prepare or Prepare(), text=spec.backend == "tensorflow")
        return cls._create(FrameworkModel(framework="keras", spec=spec), prepare=prepare, **run)

    @classmethod
    @_constructor
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

        `predict` takes any number of rows and any `batch_size`, even if the model has a fixed number of
        rows. Every host compiles the model once. Columns go to the inputs of their names, or else in
        order.

        Args:
            model_path: The .xml file of a model, with its weights in a .bin file next to it; or a file of
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
        run = {"workers": workers, "engine": engine, "settings": settings, "device": Device("cpu")}
        refuse(*run_complaints(run))
        spec = FRAMEWORKS.load("openvino").make_spec(
            model_path=model_path, threads=threads, properties=config, device=device
        )
        return cls._create(FrameworkModel(framework="openvino", spec=spec), **run)

    @classmethod
    @leaves_no_trace
    def from_framework(
        cls,
        framework: str,
        *,
        device: str | Device = "auto",
        workers: int | None = None,
        engine: Engine = "auto",
        seed: int = 0,
        settings: RunSettings | None = None,
        **own: Any,
    ) -> Self:
        """Create an estimator for a model of any framework, including those that other packages add.

        Args:
            framework: "torch", "torch_step", "lightning", "keras", "openvino", or the name of an entry point
                of the group `kindler.frameworks`.
            device: "auto" (a GPU if there is one), "cpu" or "cuda"; or a `Device` with `share`.
            workers: Number of workers. None is one per slot of the Spark application; on this machine one per
                GPU, or one that uses all cores.
            engine: "spark", "local", or "auto": Spark if the data is in Spark.
            seed: Decides the initial weights that creators draw, the order of rows, and dropout.
            settings: Time limits, threads, shared memory, what to do about NaN losses.
            own: The framework's own arguments: the model, its optimizer and so on.
        """
        on = device_of(device)
        run = {"workers": workers, "engine": engine, "device": on, "seed": seed, "settings": settings}
        refuse(*run_complaints(run), *group_complaints(on, f"{framework!r} models", "name", "share"))
        spec = FRAMEWORKS.load(framework).make_spec(**own)
        return cls._create(FrameworkModel(framework=framework, spec=spec), **run)


def _libraries(model: Any) -> tuple[str, ...]:
    cls = model if isinstance(model, type) else type(model)
    modules = (base.__module__ for base in cls.__mro__)
    return tuple(dict.fromkeys(name for name in modules if name.partition(".")[0] in _LARGE_LIBRARIES))


def _flat(metrics: Any) -> list[Any]:
    if isinstance(metrics, Mapping):
        return list(metrics.values())
    return list(metrics) if isinstance(metrics, list | tuple) else [metrics]
