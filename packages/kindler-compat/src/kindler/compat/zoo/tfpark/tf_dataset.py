"""`TFDataset`: rows of an RDD, a DataFrame, arrays or files as tensors of a TensorFlow graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.compat.zoo.tfpark import placeholders
from kindler.compat.zoo.tfpark.rows import (
    ArrayRows,
    Columns,
    FrameRows,
    LoaderRows,
    RddRows,
    Rows,
    TextRows,
    record_rdd,
    refuse_batched,
    require_rdd,
)
from kindler.compat.zoo.tfpark.structures import TensorMeta, Unpack, describe, flatten, metas_of, pack
from kindler.data.arrays import is_spark_frame
from kindler.engine import local
from kindler.errors import ConfigError
from kindler.spark.session import running

__all__ = ["TFDataset", "TensorMeta", "total_cores"]

_FRAME_DTYPES = {"float": tf.float32, "double": tf.float64, "int": tf.int32, "bigint": tf.int64}
_OTHER_SCALARS = {"smallint": tf.int16, "tinyint": tf.int8, "boolean": tf.bool}
_TEXT = TensorMeta(tf.string, "input", ()), None


def total_cores() -> int:
    """The tasks that the Spark application runs at a time; without Spark, the cores of this machine."""
    session = running()
    if session is None:
        return local.slots()
    from kindler.spark.executors import slots

    return slots(session)


class TFDataset:
    """A collection of elements, each of one or more tensors, to feed to a TensorFlow graph.

    Create one with one of the factories. `batch_size` is for training: the rows of a step over all workers, a
    multiple of the cores. `batch_per_thread` is for evaluation and prediction: the rows of one call of the
    model. With neither, tensors are single elements, without a dimension for rows.

    In all factories, validation rows are evaluated after each epoch, each epoch has a new order of rows
    unless `sequential_order` or `shuffle=False`, and `memory_type` is without effect: rows are in
    memory-mapped files.

    Attributes:
        tensor_structure: (features, labels), each a structure of `TensorMeta`; labels may be None.
        batch_size: For training; -1 if not set.
        batch_per_thread: For evaluation and prediction; -1 if not set.
        has_batch: Whether either was given.
        hard_code_batch_size: Whether the tensors' first dimension is fixed to the rows of one core.
    """

    def __init__(
        self,
        tensor_structure: Any,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        *,
        rows: Rows | None = None,
        validation: Rows | None = None,
        shuffle: bool = True,
    ) -> None:
        self.tensor_structure = tensor_structure
        self.hard_code_batch_size = hard_code_batch_size
        self.rows, self.validation_rows, self.shuffle = rows, validation, shuffle
        self.total_core_num = total_cores()
        self.batch_size, self.batch_per_thread, self.has_batch = _batches(
            batch_size, batch_per_thread, self.total_core_num
        )
        self.source: Any = None
        self._tensors: Any = None
        self._fed: list[Any] = []

    @property
    def features(self) -> list[TensorMeta]:
        return flatten(self._pair[0])

    @property
    def labels(self) -> list[TensorMeta]:
        return flatten(self._pair[1])

    @property
    def output_shapes(self) -> Any:
        """The shapes of the tensors, rows first."""
        metas = flatten(self.tensor_structure)
        return pack(self.tensor_structure, [[self._rows_of_tensor, *meta.shape] for meta in metas])

    @property
    def input_names(self) -> Any:
        return pack(self.tensor_structure, [meta.name for meta in flatten(self.tensor_structure)])

    @property
    def tensors(self) -> Any:
        """The tensors that elements are fed to, made in the default graph on first use."""
        if self._tensors is None:
            placeholders.enter_graph_mode()
            made = [placeholders.make(meta) for meta in flatten(self.tensor_structure)]
            self._fed = [fed for fed, _ in made]
            placeholders.remember(self, self._fed)
            shown = [self._shown(tensor) for _, tensor in made]
            self._tensors = pack(self.tensor_structure, shown)
        return self._tensors

    def renew(self) -> None:
        """Make tensors anew in the default graph, if there are some in another one."""
        if self._fed and self._fed[0].graph is not tf.get_default_graph():
            self._tensors, self._fed = None, []

    @property
    def feature_tensors(self) -> Any:
        return self._paired("feature_tensors", isinstance(self.tensors, tuple))[0]

    @property
    def label_tensors(self) -> Any:
        """The tensors of the labels; None where there are none."""
        pair = isinstance(self.tensors, tuple) and len(self.tensors) == 2
        return self._paired("label_tensors", pair)[1]

    def _paired(self, attribute: str, pair: bool) -> Any:
        if not pair:
            raise ConfigError(
                f"{attribute}: the elements of this dataset are not pairs of features and labels.\n"
                "Hint: TFDataset.from_rdd(rdd, features=..., labels=...)."
            )
        return self.tensors

    @property
    def fed_features(self) -> list[Any]:
        _ = self.tensors
        return self._fed[: len(self.features)]

    @property
    def fed_labels(self) -> list[Any]:
        _ = self.tensors
        return self._fed[len(self.features) :]

    def columns(self) -> Columns:
        """The rows, as data of an `Estimator`."""
        assert self.rows is not None
        return self.rows.columns(self.features, self.labels)

    def validation_columns(self) -> Columns | None:
        rows = self.validation_rows
        return None if rows is None else rows.columns(self.features, self.labels)

    def label_arrays(self) -> np.ndarray[Any, Any]:
        """The labels of all rows, on the driver."""
        if len(self.labels) != 1:
            raise ConfigError("validation methods need a dataset with one label.")
        columns = self.columns()
        name = columns.labels[0]
        if isinstance(columns.data, dict):
            return np.asarray(columns.data[name])
        values = [row[0] for row in columns.data.select(name).collect()]
        if values and isinstance(values[0], bytes | bytearray):
            shape, dtype = columns.shapes.get(name, ()), columns.dtypes[name]
            return np.stack([np.frombuffer(value, dtype).reshape(shape) for value in values])
        return np.asarray(values)

    @property
    def rows_per_call(self) -> int:
        """Rows of one call of the model where it is not trained."""
        per_thread = self.batch_per_thread
        return per_thread if per_thread > 0 else max(1, self.batch_size // self.total_core_num)

    def require_training(self, where: str = "used for training") -> None:
        if not self.has_batch or self.batch_size <= 0:
            raise ConfigError(f"The batch_size of TFDataset must be specified when {where}.")

    def require_batch(self, where: str) -> None:
        if not self.has_batch:
            raise ConfigError(f"The batch_per_thread of TFDataset must be specified when {where}.")

    def get_num_partitions(self) -> int:
        """How many tasks can work on it at a time."""
        return self.total_core_num

    def _shown(self, tensor: Any) -> Any:
        """The tensor that programs see: all rows, or a single element."""
        if not self.has_batch:
            return tensor[0]
        if self.hard_code_batch_size:
            tensor = tf.identity(tensor)
            tensor.set_shape([self.rows_per_call, *tensor.shape[1:]])
        return tensor

    @property
    def _pair(self) -> tuple[Any, Any]:
        structure = self.tensor_structure
        if isinstance(structure, list):  # flat lists, whose last tensor is the label
            return structure[:-1], structure[-1]
        return structure if isinstance(structure, tuple) and len(structure) == 2 else (structure, None)

    @property
    def _rows_of_tensor(self) -> int | None:
        return self.rows_per_call if self.hard_code_batch_size and self.has_batch else None

    @staticmethod
    def from_rdd(
        rdd: Any,
        names: Sequence[str] | None = None,
        shapes: Sequence[Any] | None = None,
        types: Sequence[Any] | None = None,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        val_rdd: Any = None,
        features: Any = None,
        labels: Any = None,
        memory_type: str = "DRAM",
        sequential_order: bool = False,
        shuffle: bool = True,
    ) -> TFDataset:
        """Make a dataset of an RDD of numpy arrays.

        Args:
            rdd: Elements are (features, labels), or features alone if `labels` is not given.
            features: (dtype, shape), or a list or dict of such pairs.
            labels: The same for labels.
            names, shapes, types: The older form: elements are flat lists of arrays.
            val_rdd: Rows to validate with.
        """
        require_rdd(rdd)
        structure, flat = _declared(features, labels, names, shapes, types)
        unpack = _unpack(structure, flat)
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        ordered = sequential_order or not shuffle
        return _dataset(structure, sizes, lambda one: RddRows(one, unpack), rdd, val_rdd, ordered)

    @staticmethod
    def from_ndarrays(
        tensors: Any,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        val_tensors: Any = None,
        memory_type: str = "DRAM",
        sequential_order: bool = False,
        shuffle: bool = True,
    ) -> TFDataset:
        """Make a dataset of arrays, such as (features, labels). float64 becomes float32."""
        structure, arrays = _arrays(tensors, "tensors")
        checked = None
        if val_tensors is not None:
            _, checked = _arrays(val_tensors, "val_tensors")
            if len(checked) != len(arrays):
                raise ConfigError(f"val_tensors has {len(checked)} arrays, tensors {len(arrays)}.")
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        return _dataset(structure, sizes, ArrayRows, arrays, checked, sequential_order or not shuffle)

    @staticmethod
    def from_dataframe(
        df: Any,
        feature_cols: str | Sequence[str],
        labels_cols: str | Sequence[str] | None = None,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_df: Any = None,
        memory_type: str = "DRAM",
        sequential_order: bool = False,
        shuffle: bool = True,
    ) -> TFDataset:
        """Make a dataset of columns of a Spark DataFrame: numbers, arrays of numbers, ML vectors.

        Arrays and vectors become float32 tensors of one dimension. Works with Spark Connect, too.
        """
        if not is_spark_frame(df):
            raise ConfigError(f"from_dataframe takes a Spark DataFrame; received {type(df).__qualname__}.")
        features, labels = _listed(feature_cols), _listed(labels_cols)
        if not features:
            raise ConfigError("from_dataframe: feature_cols names no column.")
        metas = {name: _frame_meta(df, name) for name in [*features, *labels]}
        dtypes = {name: metas[name].dtype.as_numpy_dtype().dtype.name for name in metas}

        def part(names: list[str]) -> Any:
            return metas[names[0]] if len(names) == 1 else [metas[name] for name in names] or None

        return _dataset(
            (part(features), part(labels)),
            (batch_size, batch_per_thread, hard_code_batch_size),
            lambda frame: FrameRows(frame, features, labels, dtypes),
            df,
            validation_df,
            sequential_order or not shuffle,
        )

    @staticmethod
    def from_string_rdd(
        string_rdd: Any,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_string_rdd: Any = None,
    ) -> TFDataset:
        """Make a dataset of an RDD of strings: one tensor of `tf.string`."""
        require_rdd(string_rdd)
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        return _dataset(_TEXT, sizes, TextRows, string_rdd, validation_string_rdd)

    @staticmethod
    def from_bytes_rdd(
        bytes_rdd: Any,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_bytes_rdd: Any = None,
    ) -> TFDataset:
        """Make a dataset of an RDD of bytes: one tensor of `tf.string`."""
        require_rdd(bytes_rdd)
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        return _dataset(_TEXT, sizes, TextRows, bytes_rdd, validation_bytes_rdd)

    @staticmethod
    def from_tfrecord_file(
        sc: Any,
        file_path: str,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_file_path: str | None = None,
        sequential_order: bool = False,
        shuffle: bool = True,
    ) -> TFDataset:
        """Make a dataset of TFRecord files: one tensor of `tf.string`, a record each, to parse in the graph.

        Args:
            sc: The Spark context; each of its tasks reads some of the files.
            file_path: A file, a folder or a glob pattern, under the same path on all machines.
            validation_file_path: Files to validate with.
        """
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        ordered = sequential_order or not shuffle

        def rows(path: str) -> Rows:
            return TextRows(record_rdd(sc, path))

        return _dataset(_TEXT, sizes, rows, file_path, validation_file_path, ordered)

    @staticmethod
    def from_tf_data_dataset(
        dataset: Any,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_dataset: Any = None,
        sequential_order: bool = False,
        shuffle: bool = True,
        remove_checking: bool = False,
        batch_outside: bool = False,
        inter_threads: int | None = None,
        intra_threads: int | None = None,
        auto_shard_files: bool = False,
    ) -> TFDataset:
        """Make a dataset of a `tf.data.Dataset`, whose elements are single rows: (features, labels).

        It can be trained on and evaluated, not predicted. Its own `shuffle` decides the order of rows.

        Args:
            dataset: Neither batched nor repeated, and without Python functions.
            validation_dataset: Rows to validate with.
            remove_checking: Whether to take a dataset that looks batched.
            batch_outside: Must be False: elements are single rows.
            sequential_order, shuffle, inter_threads, intra_threads, auto_shard_files: Without effect.
        """
        if batch_outside:
            raise ConfigError(
                "from_tf_data_dataset: batch_outside=True is not supported.\nHint: pass the dataset before"
                " its batch(), with batch_size."
            )
        structure = _element_structure(dataset)
        cores = total_cores()
        size, per_thread, _ = _batches(batch_size, batch_per_thread, cores)

        def rows(one: Any) -> Rows:
            if not remove_checking:
                refuse_batched(one)
            return LoaderRows(one, size if size > 0 else per_thread * cores)

        sizes = batch_size, batch_per_thread, hard_code_batch_size
        return _dataset(structure, sizes, rows, dataset, validation_dataset)

    @staticmethod
    def from_image_set(
        image_set: Any,
        image: Any,
        label: Any = None,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_image_set: Any = None,
        memory_type: str = "DRAM",
        sequential_order: bool = False,
        shuffle: bool = True,
    ) -> TFDataset:
        """Make a dataset of an `ImageSet`; `image` and `label` are (dtype, shape)."""
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        ordered = sequential_order or not shuffle
        return _of_feature_rows(image_set, validation_image_set, image, label, sizes, ordered)

    @staticmethod
    def from_text_set(
        text_set: Any,
        text: Any,
        label: Any = None,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_image_set: Any = None,
        memory_type: str = "DRAM",
        sequential_order: bool = False,
        shuffle: bool = True,
        *,
        validation_text_set: Any = None,
    ) -> TFDataset:
        """Make a dataset of a `TextSet` whose texts are indices; `text` and `label` are (dtype, shape)."""
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        validation, ordered = validation_text_set or validation_image_set, sequential_order or not shuffle
        return _of_feature_rows(text_set, validation, text, label, sizes, ordered)

    @staticmethod
    def from_feature_set(
        dataset: Any,
        features: Any,
        labels: Any = None,
        batch_size: int = -1,
        batch_per_thread: int = -1,
        hard_code_batch_size: bool = False,
        validation_dataset: Any = None,
    ) -> TFDataset:
        """Make a dataset of a `FeatureSet`; `features` and `labels` are (dtype, shape)."""
        sizes = batch_size, batch_per_thread, hard_code_batch_size
        ordered = not getattr(dataset, "shuffled", True)
        return _of_feature_rows(dataset, validation_dataset, features, labels, sizes, ordered)


def _dataset(
    structure: Any,
    sizes: tuple[int, int, bool],
    rows: Callable[[Any], Rows],
    data: Any,
    validation: Any,
    ordered: bool = False,
) -> TFDataset:
    return TFDataset(
        structure,
        *sizes,
        rows=rows(data),
        validation=None if validation is None else rows(validation),
        shuffle=not ordered,
    )


def _batches(batch_size: int, batch_per_thread: int, cores: int) -> tuple[int, int, bool]:
    for name, value in (("batch_size", batch_size), ("batch_per_thread", batch_per_thread)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ConfigError(f"{name} must be a whole number; received {value!r}.")
    if batch_size > 0 and batch_per_thread > 0:
        raise ConfigError("batch_size and batch_per_thread should not be set simultaneously.")
    if batch_size > 0 and batch_size % cores:
        near = max(cores, batch_size // cores * cores)
        raise ConfigError(
            f"batch_size should be a multiple of total core number, but got batch_size: {batch_size} where"
            f" total core number is {cores}.\nHint: batch_size={near} works here."
        )
    if batch_size <= 0 and batch_per_thread <= 0:
        return cores, 1, False
    return int(batch_size), int(batch_per_thread), True


def _declared(features: Any, labels: Any, names: Any, shapes: Any, types: Any) -> tuple[Any, bool]:
    if features is not None:
        return (
            describe(tf, features, "features"),
            None if labels is None else describe(tf, labels, "labels"),
        ), False
    if names is None or shapes is None or types is None:
        raise ConfigError("from_rdd needs features=(dtype, shape) and, to train, labels=(dtype, shape).")
    if not len(names) == len(shapes) == len(types):
        raise ConfigError(
            f"names, shapes and types differ in length: {len(names)}, {len(shapes)}, {len(types)}."
        )
    metas = [
        TensorMeta(tf.as_dtype(dtype), name, tuple(shape))
        for name, shape, dtype in zip(names, shapes, types, strict=True)
    ]
    return (metas[0], None) if len(metas) == 1 else tuple(metas) if len(metas) == 2 else metas, True


def _unpack(structure: Any, flat: bool) -> Unpack:
    def leaf(meta: TensorMeta) -> tuple[str, tuple[int | None, ...], str]:
        if meta.dtype == tf.string:
            raise ConfigError(
                "from_rdd takes numbers.\nHint: from_string_rdd and from_bytes_rdd take strings."
            )
        return np.dtype(meta.dtype.as_numpy_dtype).name, meta.shape, meta.name

    leaves = [leaf(meta) for meta in flatten(structure)]
    # Without TensorFlow's objects, which executors need not import.
    names = pack(structure, [meta.name for meta in flatten(structure)])
    return Unpack(structure=names, leaves=tuple(leaves), flat=flat)


def _arrays(tensors: Any, argument: str) -> tuple[tuple[Any, Any], list[np.ndarray[Any, Any]]]:
    pair = tensors if isinstance(tensors, tuple) and len(tensors) == 2 else (tensors, None)
    if isinstance(tensors, tuple) and len(tensors) == 1:
        pair = (tensors[0], None)
    arrays = [np.asarray(array) for array in flatten(pair)]
    arrays = [array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays]
    if not arrays:
        raise ConfigError(f"{argument} has no arrays.")
    if any(array.ndim == 0 for array in arrays) or len({len(array) for array in arrays}) != 1:
        lengths = [array.shape[:1] for array in arrays]
        raise ConfigError(f"{argument}: arrays must have the same number of rows; received {lengths}.")
    return pack(pair, metas_of(tf, arrays)), arrays


def _of_feature_rows(
    source: Any, validation: Any, features: Any, labels: Any, sizes: tuple[int, int, bool], ordered: bool
) -> TFDataset:
    structure, flat = _declared(features, labels, None, None, None)
    unpack = _unpack(structure, flat)

    def rows(one: Any) -> Rows:
        if not hasattr(one, "sample_rows"):
            raise ConfigError(
                f"expected an ImageSet, a TextSet or a FeatureSet; received {type(one).__qualname__}."
            )
        made: Rows = one.sample_rows(unpack, labelled=labels is not None)
        return made

    made = _dataset(structure, sizes, rows, source, validation, ordered)
    made.source = source
    return made


def _element_structure(dataset: Any) -> tuple[Any, Any]:
    if not hasattr(dataset, "element_spec"):
        raise ConfigError(
            f"from_tf_data_dataset takes a tf.data.Dataset; received {type(dataset).__qualname__}."
        )
    spec = dataset.element_spec
    pair = spec
    if not isinstance(spec, tuple) or len(spec) != 2:
        pair = (spec[0] if isinstance(spec, tuple) else spec, None)
    metas = [
        TensorMeta(part.dtype, f"input_{number}", tuple(part.shape.as_list()))
        for number, part in enumerate(flatten(pair))
    ]
    features, labels = pack(pair, metas)
    return features, labels


def _frame_meta(df: Any, name: str) -> TensorMeta:
    kinds = {field.name: field.dataType.simpleString() for field in df.schema.fields}
    if name not in kinds:
        raise ConfigError(f"from_dataframe: there is no column {name!r}; the DataFrame has {list(kinds)}.")
    kind = kinds[name]
    scalar = (_FRAME_DTYPES | _OTHER_SCALARS).get(kind)
    if scalar is not None:
        return TensorMeta(scalar, name, ())
    if kind.startswith("array<") or kind == "vector":
        return TensorMeta(tf.float32, name, (None,))
    raise ConfigError(
        f"from_dataframe: column {name!r} is of type {kind}; numbers, arrays and vectors can be used."
    )


def _listed(names: str | Sequence[str] | None) -> list[str]:
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)
