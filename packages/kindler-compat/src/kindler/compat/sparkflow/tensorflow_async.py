"""`SparkAsyncDL`: a graph of TensorFlow 1, trained asynchronously, as a stage; `HogwildSparkModel`."""

from __future__ import annotations

import inspect
import io
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pyspark.ml.base import Estimator as SparkEstimator
from pyspark.ml.base import Model
from pyspark.ml.linalg import Vectors
from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasLabelCol, HasPredictionCol
from pyspark.sql import DataFrame, SparkSession, is_remote

from kindler import Estimator
from kindler.callbacks import Callback
from kindler.compat.estimators import from_graph
from kindler.compat.flat import FlatEstimator
from kindler.compat.sparkflow.graphs import Array, OpenGraph, check_graph, tf
from kindler.compat.sparkflow.ml_util import (
    convert_json_to_weights,
    convert_weights_to_json,
    handle_data,
    handle_features,
    predict_func,
)
from kindler.errors import ConfigError, NotFittedError
from kindler.ml.model import KindlerModel
from kindler.ml.params import declared
from kindler.ml.persistence import SavedStage, is_trusted
from kindler.spark.executors import slots
from kindler.strategies import Async

__all__ = [
    "HogwildSparkModel",
    "SparkAsyncDL",
    "SparkAsyncDLModel",
    "build_optimizer",
    "handle_data",
    "predict_func",
]

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
_GRAPH, _WEIGHTS = "graph.json", "weights.npz"
_TEXT, _INT, _FLAG = TypeConverters.toString, TypeConverters.toInt, TypeConverters.toBoolean

LossCallback = Callable[[float, int, int], None]


class _Graphs(HasInputCol, HasPredictionCol):
    """What the estimator and the model have in common: arguments are the params, by keyword."""

    # name -> default, and what it is with its converter, unless it is a param of Spark's own
    _table: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tfInput": ("x:0", "The tensor that features are fed to, such as 'x:0'.", _TEXT),
        "tfOutput": ("out/Sigmoid:0", "The tensor that transform evaluates, such as 'out:0'.", _TEXT),
        "tfDropout": (
            None,
            "The tensor of the dropout, which has its own value in training; transform drops nothing.",
            _TEXT,
        ),
        "toKeepDropout": (
            False,
            "Whether tfDropout is the share that is kept, not the one that is dropped.",
            _FLAG,
        ),
        "predictionCol": ("predicted",),
    }

    if TYPE_CHECKING:  # params and their getters, which are made of the table

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, (_, *described) in cls._table.items():
            if described:
                setattr(cls, name, declared(name, *described))
                setattr(cls, f"get{name[0].upper()}{name[1:]}", lambda stage, n=name: stage.getOrDefault(n))
        takes = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in cls._table]
        cls.__signature__ = Signature(takes)  # type: ignore[attr-defined]  # what `help` shows

    def setParams(self, **params: Any) -> Any:
        """Set parameters by name; None leaves one as it is."""
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def _start(self, params: Mapping[str, Any]) -> None:
        unknown = sorted(set(params) - set(self._table))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no argument {unknown[0]}; it has {[*self._table]}.")
        self._setDefault(**{name: default for name, (default, *_) in self._table.items()})
        self.setParams(**params)


class SparkAsyncDLModel(Model, _Graphs, SavedStage):
    """A trained graph; `transform` adds what `tfOutput` is: a number as a double, several as a vector."""

    _public = "kindler.compat.sparkflow.tensorflow_async.SparkAsyncDLModel"
    _in_files = ("modelJson", "modelWeights")
    _table: ClassVar = {
        "inputCol": ("encoded",),
        "modelJson": (None, "The graph, as build_graph returns it.", _TEXT),
        "modelWeights": (None, "The trained weights, as JSON.", _TEXT),
        **_Graphs._table,
        "tfInput": (None, *_Graphs._table["tfInput"][1:]),
        "tfOutput": (None, *_Graphs._table["tfOutput"][1:]),
    }

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._values: dict[str, Array] | None = None
        self._opened: tuple[Any, Estimator] | None = None
        self._start(params)

    def with_values(self, values: Mapping[str, Array]) -> SparkAsyncDLModel:
        """Set the values of the graph's variables, by their names; returns this model."""
        self._values, self._opened = dict(values), None
        return self

    def getOrDefault(self, param: Any) -> Any:
        """As of any stage; `modelWeights` is made of the model's values when it is asked for."""
        found = super().getOrDefault(param)
        name = param if isinstance(param, str) else param.name
        if name != "modelWeights" or found is not None or self._values is None:
            return found
        opened = self._graph()
        return convert_weights_to_json(opened.sess.run(opened.trained))

    def _graph(self) -> OpenGraph:
        text = self.getOrDefault("modelJson")
        if not text:
            raise NotFittedError("this model has no graph; pass modelJson=, or fit a SparkAsyncDL.")
        opened = OpenGraph.of(text, seed=0)
        if self._values is not None:
            opened.assign(self._values)
        if self.isSet("modelWeights"):
            opened.assign_trained(convert_json_to_weights(self.getOrDefault("modelWeights")))
        return opened

    def _estimator(self) -> Estimator:
        names = ("modelJson", "modelWeights", "tfInput", "tfOutput", "tfDropout", "toKeepDropout")
        key = tuple(super(SparkAsyncDLModel, self).getOrDefault(name) for name in names)
        if self._opened is not None and self._opened[0] == key:
            return self._opened[1]
        for name in ("tfInput", "tfOutput"):
            if not self.getOrDefault(name):
                raise ConfigError(f"{name} is not set; it names a tensor of the graph, such as 'x:0'.")
        opened, dropout = self._graph(), self.getTfDropout()
        no_dropout = 1.0 if self.getToKeepDropout() else 0.0
        with opened.graph.as_default():
            made = from_graph(
                FlatEstimator,
                inputs=opened.tensor(self.getTfInput(), "tfInput"),
                outputs=opened.tensor(self.getTfOutput(), "tfOutput"),
                tensor_with_value={opened.tensor(dropout, "tfDropout"): no_dropout} if dropout else {},
                sess=opened.sess,
            )
        self._opened = key, made
        return made

    def _transform(self, dataset: DataFrame) -> DataFrame:
        stage = KindlerModel(
            self._estimator(), inputCol=self.getInputCol(), predictionCol=self.getPredictionCol()
        )
        return stage.transform(dataset)

    def _write_files(self, folder: Path) -> dict[str, Any]:
        values = self._graph().values()
        (folder / _GRAPH).write_text(self.getOrDefault("modelJson"), encoding="utf-8")
        file = io.BytesIO()
        np.savez(file, *values.values(), allow_pickle=False)
        (folder / _WEIGHTS).write_bytes(file.getvalue())
        return {"variables": list(values)}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> SparkAsyncDLModel:
        text = _read_graph(folder)
        with np.load(folder / _WEIGHTS, allow_pickle=False) as file:
            arrays = [file[f"arr_{number}"] for number in range(len(file.files))]
        names = [str(name) for name in facts["variables"]]
        if len(names) != len(arrays):
            raise ConfigError(f"the stage has {len(arrays)} values for {len(names)} variables.")
        return cls(modelJson=text).with_values(dict(zip(names, arrays, strict=True)))


class SparkAsyncDL(SparkEstimator[SparkAsyncDLModel], _Graphs, HasLabelCol, SavedStage):
    """Trains a graph of TensorFlow 1 on a DataFrame, asynchronously; see `graph_utils.build_graph`.

    Each worker takes the rows of about one partition, pulls weights from a parameter server, and pushes the
    gradient of each batch. `strategy`, which SparkFlow does not have, chooses another way to train.
    """

    _public = "kindler.compat.sparkflow.tensorflow_async.SparkAsyncDL"
    _in_files = ("tensorflowGraph",)
    _table: ClassVar = {
        "inputCol": ("transformed",),
        "tensorflowGraph": ("", "The graph, as build_graph returns it.", _TEXT),
        "tfLabel": (None, "The tensor that labels are fed to; none for a loss without labels.", _TEXT),
        "tfOptimizer": ("adam", "The optimizer's name.", _TEXT),
        "tfLearningRate": (
            0.01,
            "The learning rate, unless optimizerOptions has one.",
            TypeConverters.toFloat,
        ),
        "iters": (1000, "Passes over the data.", _INT),
        "partitions": (
            5,
            "The most workers; the DataFrame's partitions are not increased.",
            _INT,
        ),
        "miniBatchSize": (128, "Rows per batch of a worker; -1 is all of its rows.", _INT),
        "miniStochasticIters": (-1, "Batches per pass; -1 is as many as needed.", _INT),
        "acquireLock": (False, "Whether updates are applied one at a time; False is Hogwild.", _FLAG),
        "shufflePerIter": (True, "Whether to shuffle the rows in every pass.", _FLAG),
        **_Graphs._table,
        "verbose": (0, "0 shows no progress.", _INT),
        "labelCol": (None,),
        "partitionShuffles": (1, "How often to repeat everything with reassigned rows.", _INT),
        "optimizerOptions": (None, "Arguments of the optimizer, as JSON; see graph_utils.", _TEXT),
        "port": (5000, "Accepted without effect: no port is fixed.", _INT),
        "strategy": ("async", "How workers stay in sync: 'async', 'local_sgd' or 'allreduce'.", _TEXT),
        "seed": (0, "Decides the initial weights that the graph draws, and the order of rows.", _INT),
    }

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._start(params)

    def getAqcuireLock(self) -> bool:  # as SparkFlow spells it
        return bool(self.getAcquireLock())

    def _fit(self, dataset: DataFrame) -> SparkAsyncDLModel:
        name, rate, options = self.getTfOptimizer(), self.getTfLearningRate(), self.getOptimizerOptions()
        _options_of(options)
        trained = self.train(dataset, lambda: build_optimizer(name, rate, options)).values()
        graph = self.getTensorflowGraph()
        own = OpenGraph.of(graph).values()  # without the optimizer's, which training added to the graph
        shared = ("inputCol", "tfInput", "tfOutput", "tfDropout", "toKeepDropout", "predictionCol")
        model = SparkAsyncDLModel(modelJson=graph, **{name: self.getOrDefault(name) for name in shared})
        model.with_values({name: trained[name] for name in own})
        model._resetUid(self.uid)
        return model

    def train(
        self, frame: DataFrame, make_optimizer: Callable[[], Any], loss_callback: LossCallback | None = None
    ) -> OpenGraph:
        tf_label, labels = self.getTfLabel(), self.getOrDefault("labelCol")
        if (tf_label is None) != (labels is None):
            raise ConfigError(
                f"tfLabel={tf_label!r} and labelCol={labels!r}: a loss with labels needs both, one without"
                " needs neither."
            )
        for name in ("iters", "partitions", "partitionShuffles"):
            if self.getOrDefault(name) < 1:
                raise ConfigError(f"{name} must be at least 1; received {self.getOrDefault(name)}.")
        opened = OpenGraph.of(self.getTensorflowGraph(), seed=self.getSeed())
        partitions = self.getPartitions()
        if not is_remote():  # with Spark Connect the number of partitions is unknown
            partitions = max(1, min(partitions, frame.rdd.getNumPartitions()))
        workers = max(1, min(partitions, slots(frame.sparkSession)))
        with opened.graph.as_default():
            estimator = from_graph(
                FlatEstimator,
                inputs=opened.tensor(self.getTfInput(), "tfInput"),
                labels=None if tf_label is None else opened.tensor(tf_label, "tfLabel"),
                loss=opened.loss(),
                optimizer=make_optimizer(),
                tensor_with_value=self._dropout(opened),
                sess=opened.sess,
                workers=workers,
                seed=self.getSeed(),
            )
        rows, batches, strategy = self.getMiniBatchSize(), self.getMiniStochasticIters(), self.getStrategy()
        options: dict[str, Any] = {
            "epochs": self.getIters(),
            "batch_size": max(1, frame.count()) if rows < 1 else rows * workers,
            "feature_cols": self.getInputCol(),
            "label_cols": [] if labels is None else labels,
            "steps_per_epoch": batches if batches > 0 and rows > 0 else None,
            "shuffle": self.getShufflePerIter(),
            "verbose": self.getVerbose(),
            "strategy": Async(lock=self.getAcquireLock()) if strategy == "async" else strategy,
            "callbacks": [] if loss_callback is None else [_LossReport(loss_callback)],
        }
        for number in range(self.getPartitionShuffles()):
            estimator.fit(frame if number == 0 else frame.repartition(partitions), **options)
        return opened

    def _dropout(self, opened: OpenGraph) -> dict[Any, Any]:
        """What the tensor of the dropout is fed with: its own value in training, no dropout otherwise."""
        name = self.getTfDropout()
        if not name:
            return {}
        tensor = opened.tensor(name, "tfDropout")
        if tensor.op.type == "Placeholder":
            raise ConfigError(
                f"tfDropout={name!r} is a placeholder without a value for training.\n"
                f"Hint: tf.placeholder_with_default(0.5, shape=[], name={tensor.op.name!r}) has one."
            )
        return {tensor: (opened.sess.run(tensor), 1.0 if self.getToKeepDropout() else 0.0)}

    def _write_files(self, folder: Path) -> dict[str, Any]:
        (folder / _GRAPH).write_text(self.getTensorflowGraph(), encoding="utf-8")
        return {}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> SparkAsyncDL:
        return cls(tensorflowGraph=_read_graph(folder))


def _read_graph(folder: Path) -> str:
    text = (folder / _GRAPH).read_text(encoding="utf-8")
    if text:
        check_graph(text, trusted=is_trusted())
    return text


class _LossReport(Callback):
    """Calls a function on each worker after each pass."""

    def __init__(self, function: LossCallback) -> None:
        self._function = function

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        self._function(float(logs["loss"]), int(logs["epoch"]), int(run.rank))


def build_optimizer(optimizer_name: str, learning_rate: float, optimizer_options: Any = None) -> Any:
    if optimizer_name not in OPTIMIZERS:
        raise ConfigError(f"tfOptimizer={optimizer_name!r}: must be one of {', '.join(OPTIMIZERS)}.")
    made = getattr(tf.train, OPTIMIZERS[optimizer_name])
    options = {"learning_rate": learning_rate, "use_locking": False, **_options_of(optimizer_options)}
    if "initial_accumulator" in options:  # SparkFlow's name
        options["initial_accumulator_value"] = options.pop("initial_accumulator")
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


def _options_of(given: Any) -> dict[str, Any]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    try:
        options = json.loads(given)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"optimizerOptions must be a JSON object; received {given!r}: {exc}") from exc
    if not isinstance(options, dict):
        raise ConfigError(f"optimizerOptions must be a JSON object; received {given!r}.")
    return options


@dataclass(eq=False)
class HogwildSparkModel:
    """Trains a graph on an RDD without stages, asynchronously.

    The parameter server is part of `train`: nothing is started before, no port is fixed, and nothing has to
    be stopped. `master_url`, `serverStartup` and `port` are accepted without effect.
    """

    tensorflowGraph: str | None = None
    iters: int = 1000
    tfInput: str | None = None
    tfLabel: str | None = None
    optimizer: Any = None
    master_url: str | None = None
    serverStartup: int = 8
    acquire_lock: bool = False
    mini_batch: int = -1
    mini_stochastic_iters: int = -1
    shuffle: bool = True
    verbose: int = 0
    partition_shuffles: int = 1
    loss_callback: LossCallback | None = None
    port: int = 5000

    @staticmethod
    def determine_master(port: int = 5000) -> str:
        try:
            return f"{socket.gethostbyname(socket.gethostname())}:{port}"
        except OSError:
            return f"localhost:{port}"

    def start_server(self, *args: Any, **kwargs: Any) -> None:
        """Without effect."""

    def stop_server(self) -> None:
        """Without effect."""

    def train(self, rdd: Any) -> list[np.ndarray[Any, Any]]:
        """The trained weights, in the order of `tf.trainable_variables()`. Each partition is one worker's."""
        supervised = self.tfLabel is not None

        def row(item: Any) -> tuple[Any, ...]:
            parts = handle_features([item], supervised)
            return tuple(Vectors.dense(part[0].ravel()) for part in parts if part is not None)

        names = ["features", "label"] if supervised else ["features"]
        frame = SparkSession.builder.getOrCreate().createDataFrame(rdd.map(row), names)
        stage = SparkAsyncDL(
            inputCol="features",
            labelCol="label" if supervised else None,
            tensorflowGraph=self.tensorflowGraph,
            tfInput=self.tfInput,
            tfLabel=self.tfLabel,
            iters=self.iters,
            partitions=rdd.getNumPartitions(),
            miniBatchSize=self.mini_batch,
            miniStochasticIters=self.mini_stochastic_iters,
            acquireLock=self.acquire_lock,
            shufflePerIter=self.shuffle,
            verbose=self.verbose,
            partitionShuffles=self.partition_shuffles,
        )
        optimizer = self.optimizer
        opened = stage.train(
            frame,
            lambda: build_optimizer("adam", 0.01) if optimizer is None else optimizer,
            self.loss_callback,
        )
        return [np.asarray(value) for value in opened.sess.run(opened.trained)]
