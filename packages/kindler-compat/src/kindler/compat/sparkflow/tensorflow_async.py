"""`SparkAsyncDL`: a graph of TensorFlow 1, trained asynchronously, as a stage of Spark ML."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.ml.base import Estimator as SparkEstimator
from pyspark.ml.base import Model
from pyspark.ml.param import Param, TypeConverters
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
from kindler.compat.sparkflow.optimizers import build_optimizer, options_of
from kindler.compat.sparkflow.training import Job, train
from kindler.errors import ConfigError, NotFittedError
from kindler.estimator.estimator import Estimator
from kindler.ml.model import KindlerModel
from kindler.ml.params import declared
from kindler.ml.persistence import SavedStage
from kindler.ml.trust import is_trusted

__all__ = ["SparkAsyncDL", "SparkAsyncDLModel", "build_optimizer", "handle_data", "predict_func"]

_GRAPH, _WEIGHTS = "graph.json", "weights.npz"


class _Graphs(HasInputCol, HasPredictionCol):
    """What the estimator and the model have in common."""

    tfInput: Param[str] = declared(
        "tfInput", "The tensor that features are fed to, such as 'x:0'.", TypeConverters.toString
    )
    tfOutput: Param[str] = declared(
        "tfOutput", "The tensor that transform evaluates, such as 'out:0'.", TypeConverters.toString
    )
    tfDropout: Param[str] = declared(
        "tfDropout",
        "The tensor of the dropout, which has a value of its own in training; transform drops nothing.",
        TypeConverters.toString,
    )
    toKeepDropout: Param[bool] = declared(
        "toKeepDropout",
        "Whether tfDropout is the share that is kept, not the one that is dropped.",
        TypeConverters.toBoolean,
    )

    def getTfInput(self) -> Any:
        """The tensor that features are fed to."""
        return self.getOrDefault(self.tfInput)

    def getTfOutput(self) -> Any:
        """The tensor that transform evaluates."""
        return self.getOrDefault(self.tfOutput)

    def getTfDropout(self) -> Any:
        """The tensor of the dropout."""
        return self.getOrDefault(self.tfDropout)

    def getToKeepDropout(self) -> Any:
        """Whether it is the share that is kept."""
        return self.getOrDefault(self.toKeepDropout)

    def _set_given(self, params: Mapping[str, Any]) -> Any:
        return self._set(**{name: value for name, value in params.items() if value is not None})


class SparkAsyncDLModel(Model, _Graphs, SavedStage):
    """A trained graph; `transform` adds what `tfOutput` is: a number as a double, several as a vector."""

    _public = "kindler.compat.sparkflow.tensorflow_async.SparkAsyncDLModel"
    _in_files = ("modelJson", "modelWeights")

    modelJson: Param[str] = declared(
        "modelJson", "The graph, as build_graph returns it.", TypeConverters.toString
    )
    modelWeights: Param[str] = declared(
        "modelWeights", "The trained weights, as JSON.", TypeConverters.toString
    )

    def __init__(
        self,
        *,
        inputCol: str | None = None,
        modelJson: str | None = None,
        modelWeights: str | None = None,
        tfInput: str | None = None,
        tfOutput: str | None = None,
        tfDropout: str | None = None,
        toKeepDropout: bool | None = None,
        predictionCol: str | None = None,
    ) -> None:
        super().__init__()
        self._values: dict[str, Array] | None = None
        self._opened: tuple[Any, Estimator] | None = None
        self._setDefault(
            inputCol="encoded",
            modelJson=None,
            modelWeights=None,
            tfInput=None,
            tfOutput=None,
            tfDropout=None,
            toKeepDropout=False,
            predictionCol="predicted",
        )
        self.setParams(
            inputCol=inputCol,
            modelJson=modelJson,
            modelWeights=modelWeights,
            tfInput=tfInput,
            tfOutput=tfOutput,
            tfDropout=tfDropout,
            toKeepDropout=toKeepDropout,
            predictionCol=predictionCol,
        )

    def setParams(self, **params: Any) -> SparkAsyncDLModel:
        """Set parameters by name; None leaves one as it is."""
        set_: SparkAsyncDLModel = self._set_given(params)
        return set_

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

    tensorflowGraph: Param[str] = declared(
        "tensorflowGraph", "The graph, as build_graph returns it.", TypeConverters.toString
    )
    tfLabel: Param[str] = declared(
        "tfLabel",
        "The tensor that labels are fed to; none for a loss without labels.",
        TypeConverters.toString,
    )
    tfOptimizer: Param[str] = declared("tfOptimizer", "The optimizer's name.", TypeConverters.toString)
    tfLearningRate: Param[float] = declared(
        "tfLearningRate", "The learning rate, unless optimizerOptions has one.", TypeConverters.toFloat
    )
    iters: Param[int] = declared("iters", "Passes over the data.", TypeConverters.toInt)
    partitions: Param[int] = declared(
        "partitions", "The most workers; the DataFrame's partitions are not increased.", TypeConverters.toInt
    )
    miniBatchSize: Param[int] = declared(
        "miniBatchSize", "Rows of a worker's batch; -1 is all that it has.", TypeConverters.toInt
    )
    miniStochasticIters: Param[int] = declared(
        "miniStochasticIters", "Batches of a pass; -1 is as many as it takes.", TypeConverters.toInt
    )
    verbose: Param[int] = declared("verbose", "0 shows no progress.", TypeConverters.toInt)
    acquireLock: Param[bool] = declared(
        "acquireLock",
        "Whether updates are applied one at a time; False is Hogwild.",
        TypeConverters.toBoolean,
    )
    shufflePerIter: Param[bool] = declared(
        "shufflePerIter", "Whether each pass takes the rows in a new order.", TypeConverters.toBoolean
    )
    partitionShuffles: Param[int] = declared(
        "partitionShuffles", "How often all is repeated with rows dealt anew.", TypeConverters.toInt
    )
    optimizerOptions: Param[str] = declared(
        "optimizerOptions", "Arguments of the optimizer, as JSON; see graph_utils.", TypeConverters.toString
    )
    port: Param[int] = declared("port", "Accepted without effect: no port is fixed.", TypeConverters.toInt)
    sync: Param[str] = declared(
        "sync", "How workers agree: 'async', 'rounds' or 'allreduce'.", TypeConverters.toString
    )
    seed: Param[int] = declared(
        "seed", "Decides first weights that the graph draws, and the order of rows.", TypeConverters.toInt
    )

    def __init__(
        self,
        *,
        inputCol: str | None = None,
        tensorflowGraph: str | None = None,
        tfInput: str | None = None,
        tfLabel: str | None = None,
        tfOutput: str | None = None,
        tfOptimizer: str | None = None,
        tfLearningRate: float | None = None,
        iters: int | None = None,
        predictionCol: str | None = None,
        partitions: int | None = None,
        miniBatchSize: int | None = None,
        miniStochasticIters: int | None = None,
        acquireLock: bool | None = None,
        shufflePerIter: bool | None = None,
        tfDropout: str | None = None,
        toKeepDropout: bool | None = None,
        verbose: int | None = None,
        labelCol: str | None = None,
        partitionShuffles: int | None = None,
        optimizerOptions: str | None = None,
        port: int | None = None,
        sync: str | None = None,
        seed: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self._setDefault(
            inputCol="transformed",
            tensorflowGraph="",
            tfInput="x:0",
            tfLabel=None,
            tfOutput="out/Sigmoid:0",
            tfOptimizer="adam",
            tfLearningRate=0.01,
            iters=1000,
            predictionCol="predicted",
            partitions=5,
            miniBatchSize=128,
            miniStochasticIters=-1,
            acquireLock=False,
            shufflePerIter=True,
            tfDropout=None,
            toKeepDropout=False,
            verbose=0,
            labelCol=None,
            partitionShuffles=1,
            optimizerOptions=None,
            port=5000,
            sync="async",
            seed=0,
        )
        self.setParams(**given)

    def setParams(self, **params: Any) -> SparkAsyncDL:
        """Set parameters by name; None leaves one as it is."""
        set_: SparkAsyncDL = self._set_given(params)
        return set_

    def getTensorflowGraph(self) -> str:
        """The graph."""
        return str(self.getOrDefault(self.tensorflowGraph))

    def getIters(self) -> int:
        """Passes over the data."""
        return int(self.getOrDefault(self.iters))

    def getTfLabel(self) -> Any:
        """The tensor that labels are fed to."""
        return self.getOrDefault(self.tfLabel)

    def getTfOptimizer(self) -> str:
        """The optimizer's name."""
        return str(self.getOrDefault(self.tfOptimizer))

    def getTfLearningRate(self) -> float:
        """The learning rate."""
        return float(self.getOrDefault(self.tfLearningRate))

    def getPartitions(self) -> int:
        """The most workers."""
        return int(self.getOrDefault(self.partitions))

    def getMiniBatchSize(self) -> int:
        """Rows of a worker's batch."""
        return int(self.getOrDefault(self.miniBatchSize))

    def getMiniStochasticIters(self) -> int:
        """Batches of a pass."""
        return int(self.getOrDefault(self.miniStochasticIters))

    def getVerbose(self) -> int:
        """0 shows no progress."""
        return int(self.getOrDefault(self.verbose))

    def getAcquireLock(self) -> bool:
        """Whether updates are applied one at a time."""
        return bool(self.getOrDefault(self.acquireLock))

    getAqcuireLock = getAcquireLock  # as SparkFlow spells it

    def getShufflePerIter(self) -> bool:
        """Whether each pass takes the rows in a new order."""
        return bool(self.getOrDefault(self.shufflePerIter))

    def getPartitionShuffles(self) -> int:
        """How often all is repeated."""
        return int(self.getOrDefault(self.partitionShuffles))

    def getOptimizerOptions(self) -> Any:
        """Arguments of the optimizer."""
        return self.getOrDefault(self.optimizerOptions)

    def getPort(self) -> int:
        """The port, which is not used."""
        return int(self.getOrDefault(self.port))

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
            sync=str(self.getOrDefault(self.sync)),
            seed=int(self.getOrDefault(self.seed)),
        )
        opened = train(job, dataset, self.getInputCol(), self.getOrDefault(self.labelCol))
        own = OpenGraph.of(job.graph).values()  # without the optimizer's, which training added to the graph
        trained = opened.values()
        model = SparkAsyncDLModel(
            inputCol=self.getInputCol(),
            modelJson=job.graph,
            tfInput=self.getTfInput(),
            tfOutput=self.getTfOutput(),
            tfDropout=self.getTfDropout(),
            toKeepDropout=self.getToKeepDropout(),
            predictionCol=self.getPredictionCol(),
        ).with_values({name: trained[name] for name in own})
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
