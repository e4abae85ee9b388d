"""The front door: one object that trains, evaluates and scores a model, wherever the data is.

It joins the parts and decides nothing that a part could decide: `inputs` finds the way in for the data, an
engine starts the workers, `train` runs on them, `inference` scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, overload

import numpy as np

from kindler.config import RunSettings
from kindler.data.column_options import ColumnOptions, Names
from kindler.engine import local
from kindler.errors import ConfigError, NotFittedError, UntrustedError
from kindler.estimator import predict
from kindler.estimator.checks import (
    ability_complaints,
    at_least_one,
    backend_complaints,
    callback_complaints,
    checkpoint_complaints,
    engine_complaints,
    epoch_complaints,
    ingest_complaints,
    predict_complaints,
    refuse,
    row_weight_complaints,
    seed_complaints,
    stream_complaints,
    sync_complaints,
)
from kindler.estimator.fit import Engine, Model, Plan, Results, job_of, run
from kindler.estimator.inputs import Ingest, choose_engine, fitting
from kindler.files import beside, folder_at, place, split
from kindler.frameworks.caller_state import leaves_no_trace
from kindler.frameworks.registry import FRAMEWORKS
from kindler.sync.contract import SyncConfig
from kindler.train import estimator_file
from kindler.train.checkpoint_dir import is_model_file, latest
from kindler.train.checkpoint_file import Header, is_checkpoint, read_checkpoint, write_checkpoint
from kindler.train.driver_callbacks import Watch, divided
from kindler.train.history import History
from kindler.train.run_params import run_facts
from kindler.train.summaries import Summaries
from kindler.train.task import ENDLESS
from kindler.train.tensorboard import board, log_folder
from kindler.train.triggers import Trigger
from kindler.xshards import XShards

__all__ = ["Estimator"]

Hear = Callable[[Mapping[str, Any]], None]


class Door:
    """`Estimator.load`: called on the class it makes an estimator, called on one it gives it weights."""

    @overload
    def __get__(self, est: None, cls: type[Estimator]) -> Callable[..., Estimator]: ...
    @overload
    def __get__(self, est: Estimator, cls: type[Estimator]) -> Callable[[str | PathLike[str]], Estimator]: ...
    def __get__(self, est: Estimator | None, cls: type[Estimator]) -> Callable[..., Estimator]:
        return cls.from_file if est is None else est.load_weights


class Estimator:
    """Trains, evaluates and scores one model over any number of workers.

    Make one with `Estimator.from_torch`. The same object goes on from where it is: a second `fit` continues
    training, `predict` uses what has been trained so far.
    """

    def __init__(
        self,
        model: Model,
        *,
        workers: int | None,
        engine: Engine,
        device: str,
        model_dir: str | PathLike[str] | None,
        seed: int,
        settings: RunSettings,
        log_dir: str | PathLike[str] | None = None,
    ) -> None:
        self._model = model
        self._workers = workers
        self._engine: Engine = engine
        self._device = device
        self._model_dir = None if model_dir is None else place(model_dir)
        self._seed = int(seed)
        self._settings = settings
        self._state = b""
        self._options: ColumnOptions | None = None
        self._layout: dict[str, Any] = {}
        self._live: Any = None
        self._log_dir = None if log_dir is None else log_folder(log_dir)
        self._summaries = Summaries()
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
        model_dir: str | PathLike[str] | None = None,
        seed: int = 0,
        precision: Literal["bf16"] | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulation_steps: int = 1,
        inputs: Literal["positional", "dict"] = "positional",
        settings: RunSettings | None = None,
        backend: str | None = None,
        log_dir: str | PathLike[str] | None = None,
    ) -> Estimator:
        """An estimator of a PyTorch model.

        Args:
            model: An `nn.Module`, or a creator: any callable that returns one, called with `config`.
            optimizer: An `Optimizer` over the model's parameters; a class of one or a partial of it; or a
                creator called with `(model, config)`. Not needed to evaluate or predict.
            loss: A loss module, a function `(outputs, targets)`, or a creator called with `config`.
            metrics: One, a list, or a dict of name to metric: torchmetrics objects, functions
                `(outputs, targets)` that are means over rows, or "accuracy", "mse", "mae".
            scheduler_creator: Called with `(optimizer, config)`; returns a learning-rate scheduler.
            scheduler_step: Whether the scheduler moves after each "epoch" or each "step".
            config: What creators are given.
            workers: How many; None is one for each slot of the Spark application, or each core.
            engine: "spark", "local", or "auto": Spark when the data is Spark's.
            device: "auto", "cpu", "cuda" or "cuda:N".
            model_dir: The folder of checkpoints, or a URL that fsspec knows; see `fit`. Workers on several
                machines must share it.
            seed: Decides initial weights of creators, the order of rows, and dropout.
            precision: "bf16" computes forward passes in bfloat16 where torch finds it safe.
            clip_norm: The largest norm of the whole gradient.
            clip_value: The largest absolute value of any element of it.
            accumulation_steps: Forward and backward passes per step; less memory, same result.
            inputs: "positional" calls `model(*columns)`, "dict" calls `model({name: column})`.
            settings: Time limits, threads, shared memory.
            backend: Accepted for programs written for Orca ("bigdl", "torch_distributed", "horovod",
                "spark", "ray"); all of them mean what Kindler does anyway.
            log_dir: Where event files for TensorBoard are written, by the driver.
        """
        FRAMEWORKS.load("torch")
        from kindler.frameworks.torch.spec import TorchSpec, check

        spec = TorchSpec(
            model=model,
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            scheduler_creator=scheduler_creator,
            scheduler_step=scheduler_step,
            config=dict(config or {}),
            precision=precision,
            clip_norm=clip_norm,
            clip_value=clip_value,
            accumulation_steps=accumulation_steps,
            inputs=inputs,
        )
        refuse(
            *check(spec),
            *engine_complaints(workers, engine),
            *seed_complaints(seed),
            *backend_complaints(backend),
        )
        uses_torchmetrics = "torchmetrics" in {type(m).__module__.partition(".")[0] for m in _flat(metrics)}
        return cls(
            Model(
                framework="torch",
                spec=spec,
                extra_preload=("torchmetrics",) if uses_torchmetrics else (),
            ),
            workers=workers,
            engine=engine,
            device=device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or RunSettings(),
            log_dir=log_dir,
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
        inputs: Literal["auto", "positional", "dict"] = "auto",
        log_dir: str | PathLike[str] | None = None,
        settings: RunSettings | None = None,
    ) -> Estimator:
        """An estimator of a Keras model: Keras 3 on TensorFlow, JAX or PyTorch, or Keras 2 as `tf_keras`.

        Args:
            model: A compiled model: functional, sequential or subclassed.
            model_creator: Instead of a model: a callable that returns a compiled one, called with `config`.
            config: What creators are given.
            compile_args_creator: Called with `config`; returns the arguments of `compile` for a model that
                is not compiled yet.
            workers: How many; None is one for each slot of the Spark application, or each core.
            engine: "spark", "local", or "auto": Spark when the data is Spark's.
            model_dir: The folder of checkpoints; see `fit`.
            seed: Decides initial weights of creators, the order of rows, and dropout.
            keras_backend: What workers compute with; None is what the model was made with, or what
                `import keras` would choose here.
            device: "auto", "cpu" or "cuda".
            inputs: How several feature columns reach the model: in order ("positional"), by name ("dict"),
                or by name where its inputs are named as the columns are ("auto").
            log_dir: Where event files for TensorBoard are written.
            settings: Time limits, threads, shared memory.
        """
        from kindler.frameworks.keras import backends
        from kindler.frameworks.keras.spec import KerasSpec, check

        given = KerasSpec(
            model=model,
            model_creator=model_creator,
            compile_args_creator=compile_args_creator,
            config=dict(config or {}),
            inputs=inputs,
        )
        refuse(*check(given), *engine_complaints(workers, engine), *seed_complaints(seed))
        chosen = backends.backend_of(model, keras_backend)
        backends.require(chosen)
        return cls(
            Model(framework="keras", spec=replace(given, backend=chosen)),
            workers=workers,
            engine=engine,
            device=device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or RunSettings(),
            log_dir=log_dir,
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
        model_dir: str | PathLike[str] | None = None,
        seed: int = 0,
        log_dir: str | PathLike[str] | None = None,
        settings: RunSettings | None = None,
        **options: Any,
    ) -> Estimator:
        """An estimator of a model of any framework, those that other packages add included.

        Args:
            framework: Its name: "torch", "keras", or that of an entry point of "kindler.frameworks".
            workers: How many; None is one for each slot of the Spark application, or each core.
            engine: "spark", "local", or "auto": Spark when the data is Spark's.
            device: Where workers compute.
            model_dir: The folder of checkpoints; see `fit`.
            seed: Decides initial weights of creators, the order of rows, and dropout.
            log_dir: Where event files for TensorBoard are written.
            settings: Time limits, threads, shared memory.
            options: The framework's own: the model, its optimizer and so on.
        """
        refuse(*engine_complaints(workers, engine), *seed_complaints(seed))
        return cls(
            Model(framework=framework, spec=FRAMEWORKS.load(framework).make_spec(**options)),
            workers=workers,
            engine=engine,
            device=device,
            model_dir=model_dir,
            seed=seed,
            settings=settings or RunSettings(),
            log_dir=log_dir,
        )

    @leaves_no_trace
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
        sync: str = "allreduce",
        sync_options: Mapping[str, Any] | None = None,
    ) -> History:
        """Train on every row of `data` once per epoch.

        Args:
            data: A Spark DataFrame, an `XShards` (of `{"x": ..., "y": ...}` or of DataFrames), a Parquet path
                or list of paths, a dict or tuple of numpy arrays, a pandas DataFrame, a pyarrow Table, or a
                Hugging Face or ray dataset. Or batches that your own code makes: a torch `DataLoader`, a
                `tf.data.Dataset`, or a function of `(config, batch_size)` that returns one of these, a keras
                `PyDataset`, or an iterable of batches.
            epochs: How many more epochs; None is one, or as many as `max_steps` takes, or until `end_trigger`
                fires.
            batch_size: Rows per step over all workers.
            feature_cols: The model's input columns, in its order; None finds "features" or "x".
            label_cols: The target columns; None finds "label" or "y".
            validation_data: Evaluated after each epoch; may be of another kind than `data`.
            callbacks: `kindler.Callback` objects, or for a Keras model those of Keras; and for either
                `kindler.MLflowLogger`.
            max_steps: Optimizer steps after which to end, also in the middle of an epoch; with `epochs`, what
                comes first.
            verbose: 0 shows neither progress nor what workers print.
            shapes: The shape of one row, by column: `{"image": (28, 28, 1)}`.
            dtypes: numpy dtypes, by column; binary columns need theirs.
            stack_features: Join all feature columns to one float32 matrix.
            allow_nan: Whether NaN is a value, for all columns or those named.
            shuffle: Take rows in a new order each epoch, fixed by the seed.
            ingest: How a DataFrame comes in: "direct" (workers read its Parquet files), "inline" (through
                Spark), or "auto": direct where the frame is provably a plain scan.
            steps_per_epoch: Steps of an epoch, each going on with the rows where the last one ended; None is
                one pass over all rows.
            end_trigger: Ends the run when it fires, or when `epochs` are over; what comes first.
            checkpoint_trigger: When a checkpoint is written to `model_dir`; None is after every epoch.
            keep_checkpoints: How many of the newest checkpoints are kept, whichever run wrote them; None
                keeps all. The newest one of an epoch's end is kept besides.
            best_metric: A figure of the history ("val_loss", "max:val_gain"); the checkpoint of the epoch
                where it was best is kept too.
            resume: Go on from the newest whole checkpoint in `model_dir`, with any number of workers, to
                where the run that wrote it would have ended. Begins anew where there is none.
            initial_epoch: As in Keras: count epochs from here, and `epochs` is the number of the last one.
            validation_freq: Validate after every so many epochs, or after those of these numbers.
            class_weight: For Keras: weights of rows by their label.
            sample_weight_col: For Keras: a column with a weight per row.
            sync: How workers agree: "allreduce", or the name of a sync that another package adds.
            sync_options: Options of that sync.

        Returns:
            A row per epoch; after `resume` also those of the run's earlier part.

        Raises:
            ConfigError: An argument cannot work (before any worker starts).
            DataError: A value in the data cannot be used.
            WorkerError: The model's own code raised; it is also an instance of what was raised.
            WorkerLost: A worker went away. With `model_dir` the run has then gone on from its newest
                checkpoint as often as `RunSettings.max_failures` allows.
        """
        watchers, callbacks = divided(callbacks)
        options = ColumnOptions(
            feature_cols=feature_cols,
            label_cols=label_cols,
            weight_col=sample_weight_col,
            shapes=shapes,
            dtypes=dtypes,
            stack_features=stack_features,
            allow_nan=allow_nan,
        )
        refuse(
            *ability_complaints(self._model.row, "train"),
            *self._model.replica.lacking(self._model.spec, "optimizer", "loss"),
            *row_weight_complaints(
                self._model.row, class_weight=class_weight, sample_weight_col=sample_weight_col
            ),
            *sync_complaints(sync),
            *epoch_complaints(_epochs(epochs, max_steps, end_trigger), initial_epoch, validation_freq),
            *at_least_one(
                epochs=epochs,
                batch_size=batch_size,
                max_steps=max_steps,
                steps_per_epoch=steps_per_epoch,
                keep_checkpoints=keep_checkpoints,
            ),
            *checkpoint_complaints(
                model_dir=self._model_dir,
                resume=resume,
                best_metric=best_metric,
                validated=validation_data is not None,
                checkpoint_trigger=checkpoint_trigger,
                end_trigger=end_trigger,
            ),
            *ingest_complaints(ingest),
            *stream_complaints(
                data,
                validation_data,
                feature_cols=feature_cols,
                label_cols=label_cols,
                sample_weight_col=sample_weight_col,
                shapes=shapes,
                dtypes=dtypes,
                stack_features=stack_features,
            ),
            *callback_complaints(callbacks, row=self._model.row, validated=validation_data is not None),
        )
        facts = run_facts(
            self._model.spec,
            framework=self._model.framework,
            engine=choose_engine(self._engine, data, validation_data),
            workers=self._workers,
            device=self._device,
            seed=self._seed,
            batch_size=batch_size,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            max_steps=max_steps,
            shuffle=shuffle,
            sync=sync,
        )
        with Watch(watchers).over(self, facts) as watch:
            results = self._run(
                data,
                validation_data,
                options=options,
                ingest=ingest,
                verbose=verbose,
                what="epoch",
                resume=resume,
                batch_size=batch_size,
                epochs=_epochs(epochs, max_steps, end_trigger) - (initial_epoch or 0),
                initial_epoch=initial_epoch,
                validation_freq=validation_freq
                if isinstance(validation_freq, int)
                else tuple(validation_freq),
                class_weight=None if class_weight is None else dict(class_weight),
                weighted=sample_weight_col is not None,
                max_steps=max_steps,
                steps_per_epoch=steps_per_epoch,
                end_trigger=end_trigger,
                checkpoint_trigger=checkpoint_trigger,
                keep_checkpoints=keep_checkpoints,
                best_metric=best_metric,
                shuffle=shuffle,
                callbacks=tuple(callbacks or ()),
                model_dir=self._model_dir,
                sync=SyncConfig(name=sync, options=dict(sync_options or {})),
                watch=watch,
            )
            self._layout, self._options = results.layout, replace(options, weight_col=None)
            self._set_state(results.state)
            began = results.rows[0]["epoch"] if resume and results.rows else math.inf
            before = [row for row in self.history if row["epoch"] < began]
            self.history = History([*before, *results.rows])
        return History(results.rows)

    @leaves_no_trace
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
        """Judge the model on every row of `data`, once.

        `data` is of any kind that `fit` takes, an `XShards` among them. Columns that are not named are those
        of the last `fit`. Returns loss, each metric by its name, and num_samples, as a single process would
        have computed them.
        """
        options = self._column_options(
            data, feature_cols, label_cols, shapes, dtypes, stack_features, allow_nan
        )
        refuse(
            *self._model.replica.lacking(self._model.spec, "loss"),
            *at_least_one(batch_size=batch_size),
            *ingest_complaints(ingest),
            *stream_complaints(
                data,
                feature_cols=feature_cols,
                label_cols=label_cols,
                shapes=shapes,
                dtypes=dtypes,
                stack_features=stack_features,
            ),
        )
        results = self._run(
            data,
            None,
            options=options,
            ingest=ingest,
            verbose=verbose,
            what="evaluate",
            batch_size=batch_size,
        )
        return results.rows[0]

    @leaves_no_trace
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
    ) -> Any:
        """Score every row of `data`.

        A Spark DataFrame gives a lazy DataFrame with the outputs appended, batch or streaming. Arrays, a
        pandas DataFrame and a pyarrow Table give their own kind back. An `XShards` gives another in the same
        home: a dict gets `prediction` beside `x`, a DataFrame a column. A Parquet path writes Parquet files.

        Args:
            data: What to score.
            batch_size: Rows per call of the model.
            feature_cols: The model's input columns; None takes those of the last `fit`.
            output_cols: What to call the outputs; None is "prediction" ("prediction_0", ... for several), or
                the names that the model itself gives them by returning a dict.
            output_path: Where a Parquet path's scored rows are written; returned.
            verbose: 0 shows no progress.
            shapes: The shape of one row, by column.
            dtypes: numpy dtypes, by column.
            stack_features: As in `fit`.
            ingest: "direct" reads a plain Parquet scan's files in Python, "inline" sends rows through Spark.
        """
        refuse(*predict_complaints(data), *at_least_one(batch_size=batch_size), *ingest_complaints(ingest))
        options = self._column_options(data, feature_cols, None, shapes, dtypes, stack_features, True)
        request = predict.Request(
            framework=self._model.framework,
            spec=self._model.pack(),
            state=self._current_state(),
            options=options,
            layout=self._layout,
            batch_size=batch_size,
            output_cols=(output_cols,) if isinstance(output_cols, str) else tuple(output_cols or ()) or None,
            device=self._device,
            seed=self._seed,
            ingest=ingest,
        )
        job = job_of(
            self._model,
            self._settings,
            target="kindler.inference.files:run",
            buffers=(),
            workers=self._workers or local.slots(),
        )
        if output_path is not None:
            return predict.predict_files(
                data,
                request,
                output_path,
                run=lambda job, show: local.run(job, listener=show),
                job=job,
                verbose=verbose,
            )
        if isinstance(data, XShards):
            return predict.predict_shards(data, request, job=job, verbose=verbose)
        return predict.predict(data, request)

    def get_train_summary(self, tag: str = "loss") -> np.ndarray[Any, np.dtype[np.float64]]:
        """A training figure over all fits so far, as rows of (step, value, wall time).

        Args:
            tag: "loss" (of epochs), a metric's name, "rows_per_s", "lr"; with `log_dir` also "batch_loss", of
                every step. Orca's "Loss", "LearningRate" and "Throughput" are understood.

        Raises:
            ConfigError: There is no such figure; the message lists those there are.
        """
        return self._summaries.series("train", tag)

    def get_validation_summary(self, tag: str = "loss") -> np.ndarray[Any, np.dtype[np.float64]]:
        """The same of a validation figure: "loss", or a metric's name."""
        return self._summaries.series("validation", tag)

    @leaves_no_trace
    def get_model(self) -> Any:
        """The model with its trained weights, ready to predict: the user's own instance if one was given."""
        return self._live_replica().trained_model()

    @property
    def signature(self) -> dict[str, Any]:
        """What the last `fit` read, as JSON has it: the columns' names, and dtype and row shape of each."""
        known = self._options or ColumnOptions()
        shapes = {name: np.atleast_1d(shape).tolist() for name, shape in (known.shapes or {}).items()}
        dtypes = {name: np.dtype(dtype).name for name, dtype in (known.dtypes or {}).items()}
        return {
            "feature_cols": known.feature_cols,
            "label_cols": known.label_cols,
            "shapes": shapes or None,
            "dtypes": dtypes or None,
            "stack_features": known.stack_features,
            "allow_nan": known.allow_nan,
            "layout": self._layout,
        }

    def recall(self, signature: Mapping[str, Any], history: Sequence[dict[str, Any]] = ()) -> Estimator:
        """Take the columns and the history of another estimator of the same model; see `signature`."""
        self._layout = dict(signature["layout"])
        self._options = ColumnOptions(**{key: value for key, value in signature.items() if key != "layout"})
        self.history = History(history)
        return self

    @leaves_no_trace
    def save(self, path: str | PathLike[str]) -> None:
        """Write the model in its framework's own format, whole or not at all.

        For torch a state dict that `torch.load` reads. For Keras what the name says: `.keras` is the model,
        `.weights.h5` its weights, a name without suffix a SavedModel for serving (on TensorFlow). For either,
        a name that ends in `.estimator` is all of this estimator, which `Estimator.load` makes again.
        """
        with beside(path) as unfinished:
            if str(path).endswith(estimator_file.SUFFIX):
                estimator_file.write(unfinished, self._as_saved())
            else:
                self._live_replica().save(str(unfinished))

    load = Door()
    """`Estimator.load(path)` makes an estimator of a file; `est.load(path)` gives one its weights.

    See `Estimator.from_file` and `Estimator.load_weights`, which these are.
    """

    @leaves_no_trace
    def load_weights(self, path: str | PathLike[str]) -> Estimator:
        """Take weights from a file that `save`, or the framework itself, wrote; `est.load(path)`.

        For Keras the optimizer's state too, where the file has it and is of the same optimizer; where it is
        not, a warning says so.
        """
        replica = self._live_replica()
        replica.load(str(path))
        self._state = replica.state()
        return self

    @classmethod
    @leaves_no_trace
    def from_file(cls, path: str | PathLike[str], *, trusted: bool = False, **options: Any) -> Estimator:
        """An estimator out of a file, its optimizer included; `Estimator.load(path)`.

        Args:
            path: An `.estimator` file that `save` wrote, of any framework; or a `.keras` file.
            trusted: An `.estimator` file holds the code of the model, pickled: reading it may run anything.
                Give True only for files of people whose programs you would run. A `.keras` file needs it only
                where it has lambdas.
            options: What is not in the file, or is to be otherwise: `workers`, `engine`, `device`,
                `model_dir`, `log_dir`, `settings`; for a `.keras` file those of `from_keras`.

        Raises:
            UntrustedError: It holds code, and `trusted` was not given.
            ConfigError: It is no such file.
        """
        if str(path).endswith(".keras"):
            from kindler.frameworks.keras.files import read_model

            return cls.from_keras(model=read_model(str(path), trusted=trusted), **options)
        found = estimator_file.read(path)
        if not trusted:
            raise UntrustedError(what=f"loading {path}", reason="it holds a model's code, as a pickle")
        return cls._of_saved(found, options)

    @leaves_no_trace
    def save_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write everything that training goes on from: weights, optimizer, scheduler, randomness, epoch."""
        if not self._state:
            raise NotFittedError("nothing was trained yet; save_checkpoint() comes after fit().")
        replica = self._live_replica()
        header = Header(
            framework=self._model.framework, epoch=replica.epoch, step=replica.step, seed=self._seed
        )
        write_checkpoint(path, header, self._state)

    @leaves_no_trace
    def load_checkpoint(self, path: str | PathLike[str]) -> Estimator:
        """Go on from a file that `save_checkpoint`, a run with `model_dir` or a ModelCheckpoint wrote.

        A model's file, as a ModelCheckpoint of Keras writes it, is loaded as `est.load(path)` does.

        The next `fit` begins a new epoch, also where the file is of the middle of one; `fit(resume=True)`
        goes on in the middle.

        Raises:
            ConfigError: The file is not a whole checkpoint, or one of another framework.
        """
        if is_model_file(str(path)) and not _begins_as_checkpoint(path):
            return self.load_weights(path)
        found = read_checkpoint(path)
        if found.header.framework != self._model.framework:
            raise ConfigError(
                f"{path} is a checkpoint of {found.header.framework!r}, and this model is one of"
                f" {self._model.framework!r}."
            )
        self._live_replica().load_state(found.state)
        self._state = found.state
        return self

    @staticmethod
    @leaves_no_trace
    def latest_checkpoint(model_dir: str | PathLike[str]) -> str | None:
        """The newest whole checkpoint in a folder, or None; `load_checkpoint` reads it.

        It is a run's own, where the folder was its `model_dir`, or a file that a callback wrote there later:
        Kindler's ModelCheckpoint, or that of Keras. A run's checkpoints that are damaged are passed over with
        a warning that names them.
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
        return estimator_file.Saved(facts, self._model.pack(), self._current_state())

    @classmethod
    def _of_saved(cls, found: estimator_file.Saved, options: dict[str, Any]) -> Estimator:
        facts = found.facts
        wrong = sorted(set(options) - {"workers", "engine", "device", "model_dir", "log_dir", "settings"})
        refuse(*(f"{name} is in the file already; it is not given to load." for name in wrong))
        framework = facts["framework"]
        model = Model(
            framework=framework,
            spec=FRAMEWORKS.load(framework).loads(found.recipe),
            extra_preload=tuple(facts["preload"]),
        )
        known = {name: facts[name] for name in ("workers", "engine", "device", "seed")}
        given = {"model_dir": None, "settings": RunSettings(), **known, **options}
        made = cls(model, **given)
        made.recall(facts["signature"], facts["history"])
        made._state = found.state
        if found.state:
            made._set_state(found.state)
        return made

    def _run(
        self,
        data: Any,
        validation: Any,
        *,
        options: ColumnOptions,
        ingest: Ingest,
        verbose: int,
        what: str,
        resume: bool = False,
        watch: Watch | None = None,
        **task: Any,
    ) -> Results:
        watch = watch or Watch(())
        plan = Plan(
            model=self._model,
            data=data,
            validation=validation,
            options=options,
            ingest=ingest,
            state=self._current_state(),
            workers=self._workers,
            engine=self._engine,
            device=self._device,
            seed=self._seed,
            settings=self._settings,
            verbose=verbose,
            what=what,
            resume=resume,
            hear=_both(self._summaries.report, watch.report),
            task=task,
        )
        if not task.get("epochs"):
            return run(plan)
        with board(self._log_dir) as sink, self._summaries.writing(sink):
            results = run(replace(plan, task={**task, "log_steps": sink is not None}))
            self._summaries.finish(results.rows)
            watch.finish(results.rows)
        return results

    def _column_options(
        self,
        data: Any,
        feature_cols: Names,
        label_cols: Names,
        shapes: Mapping[str, Any] | None,
        dtypes: Mapping[str, Any] | None,
        stack_features: bool | None,
        allow_nan: bool | Sequence[str] | None,
    ) -> ColumnOptions:
        """What was given, and for the rest what the last fit had."""
        known = fitting(self._options or ColumnOptions(), data)
        return ColumnOptions(
            feature_cols=feature_cols if feature_cols is not None else known.feature_cols,
            label_cols=label_cols if label_cols is not None else known.label_cols,
            shapes=shapes if shapes is not None else known.shapes,
            dtypes=dtypes if dtypes is not None else known.dtypes,
            stack_features=known.stack_features if stack_features is None else stack_features,
            allow_nan=known.allow_nan if allow_nan is None else allow_nan,
        )

    def _current_state(self) -> bytes:
        """What training goes on from; a live model may have been compiled anew, or given other weights."""
        if self._model.row.live and self._state and self._live is not None:
            self._state = self._live.state()
        return self._state

    def _set_state(self, state: bytes) -> None:
        self._state = state
        if self._live is not None or self._model.replica.has_instance(self._model.spec):
            self._live_replica().load_state(state)

    def _live_replica(self) -> Any:
        """The model in this process; the user's own instance where one was given."""
        if self._live is None:
            self._live = self._model.replica(self._model.spec, device="cpu", seed=self._seed)
            if self._state:
                self._live.load_state(self._state)
        return self._live


def _epochs(epochs: int | None, max_steps: int | None, end_trigger: Trigger | None) -> int:
    """How many at most; without a number of them, steps or the trigger end the run, or one is enough."""
    return epochs or (1 if max_steps is None and end_trigger is None else ENDLESS)


def _begins_as_checkpoint(path: str | PathLike[str]) -> bool:
    folder, name = split(path)
    return is_checkpoint(folder_at(folder).read(name, 64))


def _flat(metrics: Any) -> list[Any]:
    if isinstance(metrics, Mapping):
        return list(metrics.values())
    return list(metrics) if isinstance(metrics, list | tuple) else [metrics]


def _both(first: Hear, second: Hear) -> Hear:
    def hear(fields: Mapping[str, Any]) -> None:
        first(fields)
        second(fields)

    return hear
