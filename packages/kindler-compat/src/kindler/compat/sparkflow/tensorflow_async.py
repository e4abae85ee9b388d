"""`SparkAsyncDL`: a graph of TensorFlow 1, trained asynchronously, as a stage of Spark ML."""

from __future__ import annotations

import io
from collections.abc import Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pyspark.ml.base import Estimator as SparkEstimator
from pyspark.ml.base import Model
from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasLabelCol, HasPredictionCol
from pyspark.sql import DataFrame

from kindler.compat.estimators import from_graph
from kindler.compat.sparkflow.graphs import Array, OpenGraph, check_graph
from kindler.compat.sparkflow.ml_util import (
    convert_json_to_weights,
    convert_weights_to_json,
    handle_data,
    predict_func,
)
from kindler.compat.sparkflow.training import Job, build_optimizer, options_of, train
from kindler.errors import ConfigError, NotFittedError
from kindler.estimator.estimator import Estimator
from kindler.ml.model import KindlerModel
from kindler.ml.params import declared
from kindler.ml.persistence import SavedStage
from kindler.ml.trust import is_trusted

__all__ = ["SparkAsyncDL", "SparkAsyncDLModel", "build_optimizer", "handle_data", "predict_func"]

_GRAPH, _WEIGHTS = "graph.json", "weights.npz"
_TEXT, _INT, _FLAG = TypeConverters.toString, TypeConverters.toInt, TypeConverters.toBoolean


def _getter(name: str) -> Any:
    return lambda stage: stage.getOrDefault(name)


class _Graphs(HasInputCol, HasPredictionCol):
    """What the estimator and the model have in common. Arguments are the params, by keyword."""

    _defaults: ClassVar[dict[str, Any]]

    tfInput = declared("tfInput", "The tensor that features are fed to, such as 'x:0'.", _TEXT)
    tfOutput = declared("tfOutput", "The tensor that transform evaluates, such as 'out:0'.", _TEXT)
    tfDropout = declared(
        "tfDropout",
        "The tensor of the dropout, which has a value of its own in training; transform drops nothing.",
        _TEXT,
    )
    toKeepDropout = declared(
        "toKeepDropout", "Whether tfDropout is the share that is kept, not the one that is dropped.", _FLAG
    )
    getTfInput = _getter("tfInput")
    getTfOutput = _getter("tfOutput")
    getTfDropout = _getter("tfDropout")
    getToKeepDropout = _getter("toKeepDropout")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_defaults" in vars(cls):
            takes = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in cls._defaults]
            cls.__signature__ = Signature(takes)  # type: ignore[attr-defined]  # what `help` shows

    def setParams(self, **params: Any) -> Any:
        """Set parameters by name; None leaves one as it is."""
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def _start(self, params: Mapping[str, Any]) -> None:
        unknown = sorted(set(params) - set(self._defaults))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} has no argument {unknown[0]}; it has {[*self._defaults]}."
            )
        self._setDefault(**self._defaults)
        self.setParams(**params)


class SparkAsyncDLModel(Model, _Graphs, SavedStage):
    """A trained graph; `transform` adds what `tfOutput` is: a number as a double, several as a vector."""

    _public = "kindler.compat.sparkflow.tensorflow_async.SparkAsyncDLModel"
    _in_files = ("modelJson", "modelWeights")
    _defaults: ClassVar = {
        "inputCol": "encoded",
        "modelJson": None,
        "modelWeights": None,
        "tfInput": None,
        "tfOutput": None,
        "tfDropout": None,
        "toKeepDropout": False,
        "predictionCol": "predicted",
    }

    modelJson = declared("modelJson", "The graph, as build_graph returns it.", _TEXT)
    modelWeights = declared("modelWeights", "The trained weights, as JSON.", _TEXT)

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
        text = self.getOrDefault(self.modelJson)
        if not text:
            raise NotFittedError("this model has no graph; pass modelJson=, or fit a SparkAsyncDL.")
        opened = OpenGraph.of(text, seed=0)
        if self._values is not None:
            opened.assign(self._values)
        if self.isSet("modelWeights"):
            opened.assign_trained(convert_json_to_weights(self.getOrDefault(self.modelWeights)))
        return opened

    def _estimator(self) -> Estimator:
        names = ("modelJson", "modelWeights", "tfInput", "tfOutput", "tfDropout", "toKeepDropout")
        key = tuple(super(SparkAsyncDLModel, self).getOrDefault(name) for name in names)
        if self._opened is None or self._opened[0] != key:
            self._opened = key, self._made()
        return self._opened[1]

    def _made(self) -> Estimator:
        for name in ("tfInput", "tfOutput"):
            if not self.getOrDefault(name):
                raise ConfigError(f"{name} is not set; it names a tensor of the graph, such as 'x:0'.")
        opened, dropout = self._graph(), self.getTfDropout()
        no_dropout = 1.0 if self.getToKeepDropout() else 0.0
        with opened.graph.as_default():
            return from_graph(
                Estimator,
                inputs=opened.tensor(self.getTfInput(), "tfInput"),
                outputs=opened.tensor(self.getTfOutput(), "tfOutput"),
                tensor_with_value={opened.tensor(dropout, "tfDropout"): no_dropout} if dropout else {},
                sess=opened.sess,
            )

    def _transform(self, dataset: DataFrame) -> DataFrame:
        stage = KindlerModel(
            self._estimator(), inputCol=self.getInputCol(), predictionCol=self.getPredictionCol()
        )
        return stage.transform(dataset)

    def _write_files(self, folder: Path) -> dict[str, Any]:
        values = self._graph().values()
        (folder / _GRAPH).write_text(self.getOrDefault(self.modelJson), encoding="utf-8")
        file = io.BytesIO()
        np.savez(file, *values.values(), allow_pickle=False)
        (folder / _WEIGHTS).write_bytes(file.getvalue())
        return {"variables": list(values)}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> SparkAsyncDLModel:
        text = (folder / _GRAPH).read_text(encoding="utf-8")
        check_graph(text, trusted=is_trusted())
        with np.load(folder / _WEIGHTS, allow_pickle=False) as file:
            arrays = [file[f"arr_{number}"] for number in range(len(file.files))]
        names = [str(name) for name in facts["variables"]]
        if len(names) != len(arrays):
            raise ConfigError(f"the stage has {len(arrays)} values for {len(names)} variables.")
        return cls(modelJson=text).with_values(dict(zip(names, arrays, strict=True)))


class SparkAsyncDL(SparkEstimator[SparkAsyncDLModel], _Graphs, HasLabelCol, SavedStage):
    """Trains a graph of TensorFlow 1 on a DataFrame, asynchronously; see `graph_utils.build_graph`.

    Each worker takes the rows of about one partition, pulls weights from a parameter server, and pushes the
    gradient of each batch. `sync`, which SparkFlow does not have, chooses another way to train.
    """

    _public = "kindler.compat.sparkflow.tensorflow_async.SparkAsyncDL"
    _in_files = ("tensorflowGraph",)

    _defaults: ClassVar = {
        "inputCol": "transformed",
        "tensorflowGraph": "",
        "tfInput": "x:0",
        "tfLabel": None,
        "tfOutput": "out/Sigmoid:0",
        "tfOptimizer": "adam",
        "tfLearningRate": 0.01,
        "iters": 1000,
        "predictionCol": "predicted",
        "partitions": 5,
        "miniBatchSize": 128,
        "miniStochasticIters": -1,
        "acquireLock": False,
        "shufflePerIter": True,
        "tfDropout": None,
        "toKeepDropout": False,
        "verbose": 0,
        "labelCol": None,
        "partitionShuffles": 1,
        "optimizerOptions": None,
        "port": 5000,
        "sync": "async",
        "seed": 0,
    }

    tensorflowGraph = declared("tensorflowGraph", "The graph, as build_graph returns it.", _TEXT)
    tfLabel = declared("tfLabel", "The tensor that labels are fed to; none for a loss without labels.", _TEXT)
    tfOptimizer = declared("tfOptimizer", "The optimizer's name.", _TEXT)
    tfLearningRate = declared(
        "tfLearningRate", "The learning rate, unless optimizerOptions has one.", TypeConverters.toFloat
    )
    iters = declared("iters", "Passes over the data.", _INT)
    partitions = declared(
        "partitions", "The most workers; the DataFrame's partitions are not increased.", _INT
    )
    miniBatchSize = declared("miniBatchSize", "Rows of a worker's batch; -1 is all that it has.", _INT)
    miniStochasticIters = declared(
        "miniStochasticIters", "Batches of a pass; -1 is as many as it takes.", _INT
    )
    verbose = declared("verbose", "0 shows no progress.", _INT)
    acquireLock = declared(
        "acquireLock", "Whether updates are applied one at a time; False is Hogwild.", _FLAG
    )
    shufflePerIter = declared("shufflePerIter", "Whether each pass takes the rows in a new order.", _FLAG)
    partitionShuffles = declared("partitionShuffles", "How often all is repeated with rows dealt anew.", _INT)
    optimizerOptions = declared(
        "optimizerOptions", "Arguments of the optimizer, as JSON; see graph_utils.", _TEXT
    )
    port = declared("port", "Accepted without effect: no port is fixed.", _INT)
    sync = declared("sync", "How workers agree: 'async', 'rounds' or 'allreduce'.", _TEXT)
    seed = declared("seed", "Decides first weights that the graph draws, and the order of rows.", _INT)

    getTensorflowGraph = _getter("tensorflowGraph")
    getIters = _getter("iters")
    getTfLabel = _getter("tfLabel")
    getTfOptimizer = _getter("tfOptimizer")
    getTfLearningRate = _getter("tfLearningRate")
    getPartitions = _getter("partitions")
    getMiniBatchSize = _getter("miniBatchSize")
    getMiniStochasticIters = _getter("miniStochasticIters")
    getVerbose = _getter("verbose")
    getAcquireLock = getAqcuireLock = _getter("acquireLock")  # the second as SparkFlow spells it
    getShufflePerIter = _getter("shufflePerIter")
    getPartitionShuffles = _getter("partitionShuffles")
    getOptimizerOptions = _getter("optimizerOptions")
    getPort = _getter("port")

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._start(params)

    def _fit(self, dataset: DataFrame) -> SparkAsyncDLModel:
        name, rate, options = self.getTfOptimizer(), self.getTfLearningRate(), self.getOptimizerOptions()
        options_of(options)
        job = Job(
            graph=self.getTensorflowGraph(),
            tf_input=self.getTfInput(),
            tf_label=self.getTfLabel(),
            make_optimizer=lambda: build_optimizer(name, rate, options),
            iters=self.getIters(),
            partitions=self.getPartitions(),
            mini_batch=self.getMiniBatchSize(),
            mini_stochastic_iters=self.getMiniStochasticIters(),
            lock=self.getAcquireLock(),
            shuffle=self.getShufflePerIter(),
            dropout=self.getTfDropout(),
            to_keep=self.getToKeepDropout(),
            verbose=self.getVerbose(),
            partition_shuffles=self.getPartitionShuffles(),
            sync=self.getOrDefault(self.sync),
            seed=self.getOrDefault(self.seed),
        )
        opened = train(job, dataset, self.getInputCol(), self.getOrDefault(self.labelCol))
        own = OpenGraph.of(job.graph).values()  # without the optimizer's, which training added to the graph
        trained = opened.values()
        shared = ("inputCol", "tfInput", "tfOutput", "tfDropout", "toKeepDropout", "predictionCol")
        model = SparkAsyncDLModel(modelJson=job.graph, **{name: self.getOrDefault(name) for name in shared})
        model.with_values({name: trained[name] for name in own})
        model._resetUid(self.uid)
        return model

    def _write_files(self, folder: Path) -> dict[str, Any]:
        (folder / _GRAPH).write_text(self.getTensorflowGraph(), encoding="utf-8")
        return {}

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> SparkAsyncDL:
        text = (folder / _GRAPH).read_text(encoding="utf-8")
        if text:
            check_graph(text, trusted=is_trusted())
        return cls(tensorflowGraph=text)
