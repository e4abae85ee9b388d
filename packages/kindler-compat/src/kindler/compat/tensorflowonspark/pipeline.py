"""TensorFlowOnSpark's ML stages: `TFEstimator` trains on a cluster, `TFModel` scores with a SavedModel."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kindler.cluster.blocks import BatchBlock, to_arrow
from kindler.compat.tensorflowonspark import TFCluster
from kindler.errors import ConfigError

__all__ = ["Namespace", "TFEstimator", "TFModel", "TFParams"]


class Namespace:
    """Arguments as attributes: of a dict, an argparse Namespace, another one, or a list, which is `argv`."""

    argv: list[str] | None = None

    def __init__(self, d: Any) -> None:
        if isinstance(d, list):
            self.argv = d
        elif isinstance(d, Mapping):
            self.__dict__.update(d)
        elif isinstance(d, (argparse.Namespace, Namespace)):
            self.__dict__.update(vars(d))
        else:
            raise ConfigError(f"Namespace takes a dict, a list or a namespace; received {type(d).__name__}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.argv if self.argv else self.__dict__)

    def __repr__(self) -> str:
        return f"Namespace({self.argv if self.argv else self.__dict__})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Namespace):
            return NotImplemented
        return self.argv == other.argv if self.argv else self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


def _mapping(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a mapping must be a dict; received {value!r}")
    return dict(value)


_DEFAULTS: dict[str, Any] = {}  # by the name of a Param


def _mixin(suffix: str, name: str, doc: str, converter: Any, default: Any = None) -> Any:
    _DEFAULTS[name] = default

    def setter(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    def getter(self: Any) -> Any:
        return self.getOrDefault(name)

    param = Param(Params._dummy(), name, doc, typeConverter=converter)
    return type(f"Has{suffix}", (Params,), {name: param, f"set{suffix}": setter, f"get{suffix}": getter})


_INT, _TEXT, _YES = TypeConverters.toInt, TypeConverters.toString, TypeConverters.toBoolean

HasBatchSize: Any = _mixin("BatchSize", "batch_size", "rows of a batch", _INT, 100)
HasClusterSize: Any = _mixin("ClusterSize", "cluster_size", "nodes, of all roles", _INT, 1)
HasDriverPSNodes: Any = _mixin("DriverPSNodes", "driver_ps_nodes", "not needed", _YES, False)
HasEpochs: Any = _mixin("Epochs", "epochs", "how often to feed the data", _INT, 1)
HasExportDir: Any = _mixin("ExportDir", "export_dir", "where the SavedModel is", _TEXT)
HasGraceSecs: Any = _mixin("GraceSecs", "grace_secs", "not needed", _INT, 30)
HasInputMapping: Any = _mixin("InputMapping", "input_mapping", "column -> tensor", _mapping, {})
HasInputMode: Any = _mixin("InputMode", "input_mode", "InputMode.SPARK", _INT, TFCluster.InputMode.SPARK)
HasMasterNode: Any = _mixin("MasterNode", "master_node", "the role of the first node", _TEXT, "chief")
HasModelDir: Any = _mixin("ModelDir", "model_dir", "where checkpoints are", _TEXT)
HasNumPS: Any = _mixin("NumPS", "num_ps", "parameter servers", _INT, 0)
HasOutputMapping: Any = _mixin("OutputMapping", "output_mapping", "tensor -> column", _mapping, {})
HasProtocol: Any = _mixin("Protocol", "protocol", "not needed", _TEXT, "grpc")
HasReaders: Any = _mixin("Readers", "readers", "for the program", _INT, 1)
HasSignatureDefKey: Any = _mixin("SignatureDefKey", "signature_def_key", "the signature to call", _TEXT)
HasSteps: Any = _mixin("Steps", "steps", "for the program", _INT, 1000)
HasTFRecordDir: Any = _mixin("TFRecordDir", "tfrecord_dir", "for the program", _TEXT)
HasTagSet: Any = _mixin("TagSet", "tag_set", "tags of the SavedModel, with commas", _TEXT)
HasTensorboard: Any = _mixin("Tensorboard", "tensorboard", "whether to run TensorBoard", _YES, False)


class TFParams(Params):
    """What estimator and model share: the program's own arguments, and Params."""

    args: Any = None

    def _set_defaults(self) -> None:
        names = [param.name for param in self.params if param.name in _DEFAULTS]  # others are of a subclass
        self._setDefault(**{name: _DEFAULTS[name] for name in names})

    def merge_args_params(self) -> Namespace:
        """The arguments with all Params.

        A Param that was set wins over an argument of its name; the default of one that was not does not.
        """
        merged = copy.copy(self.args)
        for param in self.params:
            if self.isSet(param) or (self.hasDefault(param) and not hasattr(merged, param.name)):
                setattr(merged, param.name, self.getOrDefault(param))
        return merged  # type: ignore[no-any-return]


_TRAINING: Any = (
    *(HasInputMapping, HasClusterSize, HasNumPS, HasInputMode, HasMasterNode, HasProtocol, HasGraceSecs),
    *(HasTensorboard, HasModelDir, HasExportDir, HasTFRecordDir, HasBatchSize, HasEpochs, HasReaders),
    *(HasSteps, HasDriverPSNodes),
)
_SCORING: Any = (
    *(HasInputMapping, HasOutputMapping, HasBatchSize, HasModelDir, HasExportDir, HasSignatureDefKey),
    HasTagSet,
)


class TFEstimator(Estimator, TFParams, *_TRAINING):  # type: ignore[misc,type-arg]
    """Trains by feeding a DataFrame to `train_fn(args, ctx)` on a cluster."""

    def __init__(self, train_fn: Any, tf_args: Any, export_fn: Any = None) -> None:
        super().__init__()
        self.train_fn = train_fn
        self.args = Namespace(tf_args)
        self._set_defaults()

    def _fit(self, dataset: Any) -> TFModel:
        if self.getInputMode() != TFCluster.InputMode.SPARK:
            raise ConfigError("TFEstimator feeds the DataFrame: its input mode is InputMode.SPARK.")
        if not self.getInputMapping():
            raise ConfigError("setInputMapping({column: tensor}) sets which columns are fed.")
        merged = self.merge_args_params()
        cluster = TFCluster.run(
            dataset.sparkSession.sparkContext,
            self.train_fn,
            merged,
            self.getClusterSize(),
            self.getNumPS(),
            self.getTensorboard(),
            TFCluster.InputMode.SPARK,
            log_dir=self.getModelDir(),
            master_node=self.getMasterNode(),
        )
        with cluster.cluster:
            cluster.train(dataset.select(sorted(self.getInputMapping())), self.getEpochs())
        return self._copyValues(TFModel(self.args))


class TFModel(Model, TFParams, *_SCORING):  # type: ignore[misc]
    """Scores a DataFrame with the SavedModel at `export_dir`; all columns are kept."""

    def __init__(self, tf_args: Any) -> None:
        super().__init__()
        self.args = Namespace(tf_args)
        self._set_defaults()

    def _transform(self, dataset: Any) -> Any:
        folder = self.getExportDir() or self.getModelDir()
        if not folder or not self.getInputMapping() or not self.getOutputMapping():
            raise ConfigError("TFModel needs setExportDir, setInputMapping and setOutputMapping.")
        score = _Score(
            folder,
            (self.getTagSet() or "serve").split(","),
            self.getSignatureDefKey() or "serving_default",
            self.getInputMapping(),
            self.getOutputMapping(),
            self.getBatchSize(),
        )
        first = dataset.limit(1).mapInArrow(score.schema, "schema binary").collect()
        if not first:
            raise ConfigError("the types of the outputs cannot be inferred: the data has no rows.")
        fields = from_arrow_schema(pa.ipc.read_schema(pa.py_buffer(bytes(first[0][0]))))
        return dataset.mapInArrow(score, StructType([*dataset.schema.fields, *fields.fields]))


class _Score:
    """A SavedModel on executors, loaded once by each Python worker."""

    def __init__(
        self,
        folder: str,
        tags: list[str],
        signature: str,
        inputs: dict[str, str],
        outputs: dict[str, str],
        batch_size: int,
    ) -> None:
        self.place = (folder, tuple(tags), signature)
        self.inputs, self.outputs, self.batch_size = inputs, outputs, batch_size

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, self.batch_size):
                rows = batch.slice(start, self.batch_size)
                added = self._columns(rows)
                yield pa.RecordBatch.from_arrays(
                    [*rows.columns, *added.values()], [*rows.schema.names, *added]
                )

    def schema(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                added = self._columns(batch.slice(0, 1))
                found = pa.schema([(name, column.type) for name, column in added.items()])
                data = found.serialize().to_pybytes()
                yield pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], ["schema"])
                return

    def _columns(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        function = _loaded(self.place)
        specs = function.structured_input_signature[1]
        arrays = BatchBlock(rows).arrays(self.inputs, 0, rows.num_rows)
        results = function(**{name: _tensor(array, specs[name]) for name, array in arrays.items()})
        return {
            column: to_arrow(results[tensor].numpy(), None, flat=False)
            for tensor, column in sorted(self.outputs.items())
        }


_models: dict[Any, Any] = {}


def _loaded(place: tuple[str, tuple[str, ...], str]) -> Any:
    if place not in _models:
        import tensorflow as tf

        folder, tags, signature = place
        model = tf.saved_model.load(folder, tags=list(tags))
        _models.clear()
        _models[place] = (model, model.signatures[signature])  # a signature does not keep its model
    return _models[place][1]


def _tensor(array: Any, spec: Any) -> Any:
    import tensorflow as tf

    tensor = tf.cast(array, spec.dtype) if array.dtype != object else tf.constant(array.tolist(), spec.dtype)
    if spec.shape.rank == tensor.shape.rank + 1 and spec.shape[-1] == 1:
        return tf.expand_dims(tensor, -1)
    return tensor
