"""The front door: one object that trains, evaluates and scores a model, wherever the data is.

It connects the parts and decides nothing that a part could decide: `inputs` recognises the data, an engine
starts the workers, `train` runs on them, `inference` scores.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kindler.config import Checkpoints, Columns, Device, Epochs, RunSettings
from kindler.data.column_options import ColumnOptions, Names
from kindler.data.columns import Column, ColumnPlan
from kindler.data.drift import DriftRule, drift_of
from kindler.data.preparation import Prepare, Preparer
from kindler.data.statistics import Statistics
from kindler.engine import local
from kindler.engine.notices import sigterm_interrupts
from kindler.errors import NotFittedError, RowErrorsWarning
from kindler.estimator.checks import (
    ability_complaints,
    accelerator_complaints,
    device_of,
    evaluate_complaints,
    fit_complaints,
    precision_complaints,
    refuse,
    split_complaints,
    warn_caller,
    weight_complaints,
)
from kindler.estimator.exporting import Example, in_openvino
from kindler.estimator.groups import names_groups
from kindler.estimator.inputs.contract import Input, ScoreRequest
from kindler.estimator.inputs.recognise import choose_engine, recognise
from kindler.estimator.inputs.spark import SqlFunctionInput
from kindler.estimator.lineage import Lineage, scoring_record, utc_now
from kindler.estimator.model import FrameworkModel, LiveModel
from kindler.estimator.run import Listener, RunObserver, RunResults, job_of, run
from kindler.estimator.text import TextScoring
from kindler.files import place
from kindler.frameworks.caller_state import bare_interrupts, leaves_no_trace, untouched
from kindler.frameworks.creators import title
from kindler.frameworks.state_format import ScoringModel
from kindler.html import card
from kindler.strategies import Strategy
from kindler.train.callbacks import DriverCallbackList, run_params, split_callbacks
from kindler.train.goodput import RunClock
from kindler.train.history import History
from kindler.train.lightning_callbacks import translated
from kindler.train.metric_names import BOOKKEEPING
from kindler.train.options import (
    Accelerator,
    Engine,
    EvaluateOptions,
    FitOptions,
    OnError,
    PredictOptions,
    RunConfig,
)
from kindler.train.progress import show_line
from kindler.train.summaries import EventFiles, Summaries
from kindler.types import Callbacks, Data, ScoringData

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.ml.estimator import KindlerEstimator

AnyOptions = TypeVar("AnyOptions", FitOptions, EvaluateOptions, PredictOptions)


class Estimator(TextScoring):
    """Trains, evaluates and scores a model on any number of workers.

    Create one with `Estimator.from_torch`, `from_keras` or another class method whose name begins with
    `from_`, or read one with `Estimator.load`. An estimator keeps what it has learned: a second
    `fit` continues training, and `predict` uses the weights trained so far.
    """

    def __init__(
        self,
        model: FrameworkModel,
        *,
        workers: int | None = None,
        engine: Engine = "auto",
        device: str | Device = "auto",
        seed: int = 0,
        settings: RunSettings | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        self._model, on = model, device_of(device)
        self._run_config = RunConfig(
            workers=workers,
            engine=engine,
            device=on.name,
            share_gpus=on.share,
            seed=int(seed),
            settings=settings or RunSettings(),
        )
        self._prepare = prepare or Prepare()
        self._warned_random_eval = False
        self._live = LiveModel(model, int(seed))
        self._columns = ColumnOptions()
        self._layout: dict[str, Any] = {}
        self._statistics: dict[str, Any] | None = None
        self._summaries = Summaries()
        self._converted: tuple[str, FrameworkModel] | None = None
        self.history = History()
        self._lineage = Lineage()

    @bare_interrupts
    @names_groups
    def fit(
        self,
        data: Data,
        epochs: int | Epochs | None = None,
        batch_size: int = 32,
        feature_cols: Names = None,
        label_cols: Names = None,
        validation_data: Data | None = None,
        callbacks: Callbacks | None = None,
        max_steps: int | None = None,
        verbose: int = 1,
        *,
        validation_split: float | None = None,
        columns: Columns | None = None,
        shuffle: bool = True,
        strategy: str | Strategy = "allreduce",
        checkpoint: str | PathLike[str] | Checkpoints | None = None,
        resume: bool = False,
    ) -> History:
        """Train the model: every epoch uses each row of `data` once.

        Args:
            data: A Spark DataFrame, an `XShards` (of `{"x": ..., "y": ...}` or of DataFrames), a Parquet path
                or list of paths, a dict or tuple of numpy arrays, a pandas DataFrame, a pyarrow Table, or a
                Hugging Face or ray dataset. Or batches that your own code creates: a torch `DataLoader`, a
                `tf.data.Dataset`, or a function of `(config, batch_size)` that returns one of these, a Keras
                `PyDataset`, or an iterable of batches.
            epochs: Number of epochs to train, or an `Epochs`, with the steps of an epoch and more. None
                trains one, or as many as it takes until `max_steps` ends the run.
            batch_size: Rows per step, over all workers together.
            feature_cols: The model's input columns, in its order. None looks for "features" or "x".
            label_cols: The target columns. None looks for "label" or "y".
            validation_data: Data to evaluate after each epoch; may be of another kind than `data`.
            callbacks: Objects of `kindler.callbacks`, of your own subclasses, or Keras callbacks for a Keras
                model.
            max_steps: Optimizer steps after which training ends, even in the middle of an epoch.
            verbose: 0 shows neither progress nor the output of the workers.
            validation_split: The share of the rows to evaluate after each epoch instead of training on them:
                the last rows, as in Keras; of a Spark DataFrame, what `randomSplit` draws with the
                estimator's seed.
            columns: How columns are read, and the weights of rows; see `Columns`.
            shuffle: Whether to shuffle the rows in every epoch; the seed determines their order.
            strategy: How workers stay in sync: "allreduce", "zero1" (the same result, each worker updating a
                slice of the parameters; PyTorch only), "fsdp" (the parameters are divided, too; PyTorch
                only), "async" (a parameter server applies each worker's gradients), "local_sgd" (workers
                train on their own and average their weights), or the name of a strategy that another package
                adds. A value of `kindler.strategies` also has options: `strategies.Async(max_staleness=4)`.
            checkpoint: The folder that a checkpoint is written to after every epoch, as a path or a URL; or a
                `Checkpoints`, which also says how often, and how many are kept. A run that loses a worker
                continues from the newest one.
            resume: Continue from the newest complete checkpoint in that folder, with any number of workers,
                to where the run that wrote it would have ended. Starts from the beginning if there is none.

        Returns:
            One row per epoch; after `resume`, also those of the earlier part of the run.

        Raises:
            ConfigError: An argument cannot work. Raised before any worker starts.
            DataError: A value in the data cannot be used.
            NonFiniteLossError: A training loss is NaN or infinite.
            WorkerError: The model's own code raised an error; this is also an instance of that error's class.
            WorkerLostError: A worker died. With `checkpoint`, the run has by then been restarted as often as
                `RunSettings.max_failures` allows.
        """
        clock = RunClock()
        driver_callbacks, on_workers = split_callbacks(translated(callbacks))
        length = epochs if isinstance(epochs, Epochs) else Epochs(epochs)
        read, freq = columns or Columns(), length.validation_freq
        options = FitOptions(
            **{**vars(length), "validation_freq": freq if isinstance(freq, int) else tuple(freq)},
            batch_size=batch_size,
            max_steps=max_steps,
            verbose=verbose,
            shuffle=shuffle,
            resume=resume,
            columns=ColumnOptions(
                feature_cols=feature_cols,
                label_cols=label_cols,
                shapes=read.shapes,
                dtypes=read.dtypes,
                stack_features=bool(read.stack_features),
                allow_nan=read.allow_nan or False,
                weight_col=read.weight_col,
                need_labels=self._labels_needed(label_cols),
            ),
            ingest=read.ingest,
            class_weight=read.class_weight,
            callbacks=tuple(on_workers),
            strategy=Strategy(strategy) if isinstance(strategy, str) else strategy,
            checkpoint=_placed(checkpoint),
            nan_loss=self._run_config.settings.nan_loss,
        )
        adapt = self._model.facts.adapt
        rows = recognise(adapt(data))
        held_out = None if validation_data is None else recognise(adapt(validation_data))
        if validation_split is not None:
            refuse(*split_complaints(validation_split, held_out))
            rows, held_out = rows.split(validation_split, self._run_config.seed)
            rows.held_out = validation_split
        with sigterm_interrupts():
            return self._fit(rows, held_out, options, DriverCallbackList(driver_callbacks), clock)

    def _fit(
        self,
        data: Input,
        validation: Input | None,
        options: FitOptions,
        on_driver: DriverCallbackList,
        clock: RunClock,
    ) -> History:
        model, config, began = self._model, self._run_config, utc_now()
        refuse(*fit_complaints(model, self._prepare, options, data, validation))
        options = self._with_preparation(options, trains=True)
        if validation is not None:
            refuse(*model.complaints("judge"))
            self._warn_random_eval()
        engine = choose_engine(config.engine, *filter(None, (data, validation)))
        facts = {"engine": engine, "workers": config.workers, "device": config.device, "seed": config.seed}
        params = run_params(model.spec, options, framework=model.framework, **facts)
        with (
            on_driver.running(self, params),
            nullcontext() if (folder := on_driver.log_folder) is None else EventFiles(folder) as sink,
            self._summaries.writing(sink),
        ):
            results = self._run(
                data,
                options,
                self._summaries.report,
                on_driver.report,
                validation=validation,
                config=config,
                log_steps=sink is not None,
                watched=on_driver.wants_progress,
                clock=clock,
            )
            self._summaries.finish(results.rows)
            on_driver.finish(results.rows)
            self._layout = results.layout
            self._statistics = results.statistics
            self._columns = replace(options.columns, weight_col=None, ragged=None, length_col=None)
            self._live.state = results.state
            first = results.rows[0]["epoch"] if options.resume and results.rows else math.inf
            earlier = [row for row in self.history if row["epoch"] < first]
            goodput = clock.goodput(results.spent)
            self.history = History([*earlier, *results.rows], results.mode, goodput)
            self._keep_lineage(options, results, began)
            show_line(str(goodput), verbose=options.verbose)
            if results.halted:
                resume = "; fit(resume=True) finishes this run" if options.checkpoint is not None else ""
                raise KeyboardInterrupt(
                    f"training was interrupted after step {results.step:,}. The model keeps what it has "
                    f"learned so far, and the next fit continues from there{resume}."
                )
        return History(results.rows, results.mode, goodput)

    @bare_interrupts
    @names_groups
    def evaluate(
        self,
        data: Data,
        batch_size: int = 256,
        feature_cols: Names = None,
        label_cols: Names = None,
        verbose: int = 1,
        *,
        columns: Columns | None = None,
    ) -> dict[str, Any]:
        """Evaluate the model on every row of `data`.

        An untrained model from a creator is evaluated with an `UntrainedWarning`.

        Args:
            data: Data of any kind that `fit` takes.
            batch_size: Rows per step, over all workers together.
            feature_cols: The model's input columns. None, here and below, takes what the last `fit` used.
            label_cols: The target columns.
            verbose: 0 shows neither progress nor the output of the workers.
            columns: How columns are read.

        Returns:
            The loss, each metric by its name, and `num_samples`: the values that a single process computes.
        """
        facts, read = self._model.facts, columns or Columns()
        rows = recognise(facts.adapt(data))
        asked = ColumnOptions(
            feature_cols=feature_cols,
            label_cols=label_cols,
            shapes=read.shapes,
            dtypes=read.dtypes,
            stack_features=read.stack_features,
            allow_nan=read.allow_nan,
            need_labels=self._labels_needed(label_cols),
        )
        options = EvaluateOptions(batch_size=batch_size, columns=asked, ingest=read.ingest, verbose=verbose)
        refuse(
            *weight_complaints(read, "evaluate"),
            *evaluate_complaints(self._model, self._prepare, options, rows),
        )
        self._warn_random_eval()
        self._warn_if_untrained("evaluate")
        options = replace(options, columns=rows.complete(asked, self._columns))
        prepared = self._with_preparation(options)
        return self._run(rows, prepared, self._summaries.report, config=self._run_config).rows[0]

    @bare_interrupts
    @names_groups
    def predict(
        self,
        data: ScoringData,
        batch_size: int = 1024,
        feature_cols: Names = None,
        output_cols: Names = None,
        output_path: str | PathLike[str] | None = None,
        verbose: int = 1,
        *,
        columns: Columns | None = None,
        accelerator: Accelerator | None = None,
        precision: str | None = None,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        overwrite: bool = False,
    ) -> Any:
        """Score every row of `data`.

        The result is of the same kind as the data. A Spark DataFrame, batch or streaming, gives a lazy
        DataFrame with the outputs as new columns. Arrays, a pandas DataFrame and a pyarrow Table give the
        same kind. An `XShards` gives an `XShards`: its dicts get a `prediction` next to `x`, its DataFrames a
        column. For a Parquet path the scored rows are written to Parquet files.

        An untrained model from a creator is scored with an `UntrainedWarning`.

        Args:
            data: The rows to score.
            batch_size: Rows per call of the model.
            feature_cols: The model's input columns. None takes those of the last `fit`.
            output_cols: Names of the output columns. None is "prediction" ("prediction_0", ... for several
                outputs), or the keys if the model returns a dict.
            output_path: The folder to write the scored rows of Parquet files to.
            verbose: 0 shows no progress.
            columns: How columns are read. None takes what the last `fit` used.
            accelerator: "openvino" converts the model and computes it with OpenVINO, which is often faster on
                CPUs. None computes it with its own framework.
            precision: "bf16" or "fp16" computes a PyTorch model in half precision where PyTorch considers it
                safe, "fp32" in full; outputs are float32. None keeps the precision of the model.
            on_error: What becomes of a row that cannot be read, prepared or scored. "raise" ends the call.
                "null" makes its outputs null, and issues a `RowErrorsWarning`. "column" also adds a column of
                errors, named after the first output with "_error" appended. NaN in a feature is an error of
                its row then, unless `Columns(allow_nan=True)`.
            max_errors: How many rows may fail before the call ends with a `RowsFailedError`: of all rows; for
                a Spark DataFrame or an `XShards`, of each partition or shard. None is any number.
            overwrite: Whether to replace what an earlier call wrote to `output_path`. Otherwise a call with
                the same model, rows and options completes what is there, and any other is an error.

        Returns:
            The scored data; for a Parquet path, `output_path`.
        """
        read = columns or Columns()
        refuse(*weight_complaints(read, "predict"))
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(
                feature_cols=feature_cols,
                shapes=read.shapes,
                dtypes=read.dtypes,
                stack_features=read.stack_features,
                allow_nan=True if on_error == "raise" else read.allow_nan,
            ),
            ingest=read.ingest,
            verbose=verbose,
            output_cols=_output_names(output_cols),
            output_path=output_path,
            accelerator=accelerator,
            precision=precision,
            on_error=on_error,
            max_errors=max_errors,
            overwrite=overwrite,
        )
        return self._predict(recognise(data), options)

    def _predict(self, data: Input, options: PredictOptions) -> Any:
        refuse(
            *data.score_complaints(options),
            *options.complaints(),
            *precision_complaints(self._model.row, options),
        )
        self._warn_random_eval()
        self._warn_if_untrained("predict")
        options = self._with_outputs_of_task(options)
        known = self._columns.without_labels()
        columns = replace(data.complete(options.columns, known), label_cols=None, need_labels=False)
        options = self._with_preparation(replace(options, columns=columns))
        described = partial(self._scoring_record, options)
        model, weights = self._model, self._live.for_scoring()
        if options.accelerator is not None and options.accelerator != model.row.form:
            refuse(*ability_complaints(model.row, "export"), *accelerator_complaints(options))
            example = Example(*data.sample(columns, self._layout))
            key = example.key(model, weights)
            if self._converted is None or self._converted[0] != key:  # the last conversion is kept
                with untouched():
                    self._converted = (key, in_openvino(model, weights, example))
            model = self._converted[1]
            weights = ScoringModel.of(model.packed, b"", None)
            options = replace(options, columns=columns, preparation=None)  # which is for text
        request = ScoreRequest(
            framework=model.framework,
            model=weights,
            options=options,
            layout=self._layout,
            device=self._run_config.device,
            seed=self._run_config.seed,
            labels=tuple(self._columns.labels or ("label", "y")),
            described=described,
            warn=partial(warn_caller, category=RowErrorsWarning),
            job=job_of(
                model,
                self._run_config.settings,
                target="kindler.inference.files:run",
                buffers=(),
                workers=self._run_config.workers or local.slots(),
            ),
        )
        return data.score(request)

    def _scoring_record(self, options: PredictOptions) -> dict[str, Any]:
        with untouched():
            weights = self._live.replica.digests() if "train" in self._model.row.can else {}
        if not weights:
            weights = {"content": self._live.for_scoring().content}
        return scoring_record(self._model, weights, options)

    @bare_interrupts
    def _predict_with(self, data: Any, options: PredictOptions) -> Any:
        """Score with the options of `predict` as one value, which has `finish` as well."""
        return self._predict(recognise(data), options)

    @bare_interrupts
    def drift(self, data: Data, *, psi: float = 0.2, ks: float = 0.1) -> dict[str, Any]:
        """Compare rows with those of the last `fit`: each feature, label and prediction that they have.

        Args:
            data: Rows of any kind that `predict` takes, scored or not. All of them are read once.
            psi: The population stability index above which a column is an alarm.
            ks: The Kolmogorov-Smirnov distance above which a column of numbers is an alarm.

        Returns:
            A report as JSON: `alarm`, its `reasons`, and the figures of each of the `columns` and
            `predictions`. An alarm needs 200 rows, and a difference that is no chance.

        Raises:
            NotFittedError: The estimator has no statistics.
        """
        if self._statistics is None:
            raise NotFittedError(
                "drift: this estimator has no statistics of its training data; fit() makes them, unless your"
                " own code creates the batches."
            )
        known = Statistics.from_json(self._statistics)
        found = recognise(data).summaries({*known.columns, *known.predictions}, self._columns)
        outputs = {name: one for name, one in found.items() if name in known.predictions}
        columns = {name: one for name, one in found.items() if name in known.columns}
        return drift_of(known, columns, outputs, rule=DriftRule(psi=psi, ks=ks))

    @bare_interrupts
    @names_groups
    def register_udf(
        self,
        spark: SparkSession,
        name: str,
        *,
        feature_cols: Names = None,
        output_cols: Names = None,
        batch_size: int = 1024,
        columns: Columns | None = None,
    ) -> Callable[..., Any]:
        """Register this model as a Spark SQL function: `spark.sql("SELECT score(features) FROM t")`.

        The function has the current weights; register it again after another `fit`. It lives as long as the
        session.

        Args:
            spark: The session.
            name: The function's name. An existing function of this name is replaced.
            feature_cols: The function's arguments, in order. None takes the columns of the last `fit`.
            output_cols: If the model has several outputs, the function returns a struct with these fields.
            batch_size: Rows per call of the model.
            columns: Shapes and dtypes of columns.

        Returns:
            The function for DataFrames: `frame.select(score("features"))`.
        """
        read = columns or Columns()
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(
                feature_cols=feature_cols, shapes=read.shapes, dtypes=read.dtypes, allow_nan=True
            ),
            output_cols=_output_names(output_cols),
        )
        function: Callable[..., Any] = self._predict(SqlFunctionInput(spark, name), options)
        return function

    def as_stage(
        self,
        *,
        inputCol: str | None = None,
        labelCol: str | None = None,
        predictionCol: str | None = None,
        **params: Any,
    ) -> KindlerEstimator:
        """Return this estimator as a stage of a Spark ML pipeline.

        The stage's `fit` trains a copy: each fit starts from this estimator, which stays as it is.

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
        """Return a training metric over all fits so far, as rows of (step, value, wall time).

        Args:
            tag: "loss" (per epoch), a metric's name, "rows_per_s" or "lr"; with `callbacks.TensorBoard`, also
                "batch_loss" (per step). Orca's names "Loss", "LearningRate" and "Throughput" work too.

        Raises:
            ConfigError: There is no such metric; the message lists the available ones.
        """
        return self._summaries.series("train", tag)

    def get_validation_summary(self, tag: str = "loss") -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a validation metric over all fits so far; see `get_train_summary`."""
        return self._summaries.series("validation", tag)

    @leaves_no_trace
    def get_model(self) -> Any:
        """Return the model with its trained weights, ready to predict: your own instance if passed."""
        return self._live.replica.trained_model()

    def _storable(self) -> Any:
        """What a kind of models can store: the model, or everything that belongs to it."""
        return self._live.replica.stored_model()

    def _facts(self) -> dict[str, Any]:
        last = self.history[-1] if len(self.history) else {}
        spec = self._model.spec
        model = getattr(spec, "model", None) or getattr(spec, "model_creator", None)
        return {
            "framework": self._model.framework,
            "model": None if model is None else title(model).removesuffix("()"),
            "workers": "auto" if self.workers is None else self.workers,
            **{name: getattr(self._run_config, name) for name in ("engine", "device", "seed")},
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
        """The argument of creators."""
        spec = self._model.spec
        config = spec.get("config") if isinstance(spec, Mapping) else getattr(spec, "config", None)
        return dict(config or {})

    @property
    def _inputs(self) -> str | None:
        """How a PyTorch model is called: "positional", "dict" or "kwargs"; None for other frameworks."""
        return getattr(self._model.spec, "inputs", None) if self._model.row.package == "torch" else None

    @property
    def workers(self) -> int | None:
        """Number of workers; None is one per slot of the Spark application, or per GPU, or one here."""
        return self._run_config.workers

    @property
    def settings(self) -> RunSettings:
        """Time limits, threads, shared memory."""
        return self._run_config.settings

    @property
    def _replica(self) -> Any:
        """The model in this process as its framework holds it: the model, optimizer, epoch and step."""
        return self._live.replica

    def _observers(self, options: FitOptions | EvaluateOptions) -> Sequence[RunObserver]:
        """Observers of a run; for subclasses that need more than callbacks see."""
        return ()

    def _preparer(self) -> Preparer:
        """Return what prepares rows as `predict` does, for code that calls the model itself."""
        columns = self._columns
        features = columns.features or [name for name in ("features", "x") if name in self._layout] or ["x"]
        return Preparer(
            self._prepare,
            ColumnPlan(features=tuple(Column(name=name, role="feature") for name in features), labels=()),
            trains=False,
            seed=self._run_config.seed,
            labels=tuple(columns.labels or ("label", "y")),
        )

    def _with_preparation(self, options: AnyOptions, *, trains: bool = False) -> AnyOptions:
        own = self._prepare
        columns = replace(options.columns, ragged=own.ragged, length_col=own.length_col if trains else None)
        return replace(options, columns=columns, preparation=own if own.ragged else None)

    def _warn_random_eval(self) -> None:
        """Warn once that rows are augmented where they are evaluated."""
        if self._prepare.augments_all and not self._warned_random_eval:
            self._warned_random_eval = True
            warn_caller(
                "transform draws random numbers and there is no eval_transform: rows are augmented in "
                "evaluation and prediction as well, each in the same way every time.\n"
                "Hint: pass eval_transform=..., which does the same without random numbers."
            )

    def _run(
        self,
        data: Input,
        options: FitOptions | EvaluateOptions,
        *listeners: Listener,
        config: RunConfig,
        validation: Input | None = None,
        log_steps: bool = False,
        watched: bool = False,
        clock: RunClock | None = None,
    ) -> RunResults:
        observers = self._observers(options)
        with ExitStack() as entered:
            for observer in observers:
                entered.enter_context(observer)
            results = run(
                self._model,
                options,
                config,
                data,
                validation,
                state=self._live.state,
                log_steps=log_steps or bool(observers),
                watched=watched,
                listeners=[*listeners, *(observer.hear for observer in observers)],
                clock=clock or RunClock(),
            )
            for observer in observers:
                observer.finish(results.rows)
        return results


def _output_names(names: Names) -> tuple[str, ...] | None:
    return (names,) if isinstance(names, str) else tuple(names or ()) or None


def _placed(checkpoint: str | PathLike[str] | Checkpoints | None) -> Checkpoints | None:
    if checkpoint is None:
        return None
    asked = checkpoint if isinstance(checkpoint, Checkpoints) else Checkpoints(checkpoint)
    return replace(asked, folder=place(asked.folder))
