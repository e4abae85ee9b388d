"""`TFDataset`: rows of an RDD, a DataFrame, arrays or files as tensors of a TensorFlow graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from kindler.compat.frameworks.tf_graph.ends import needed
from kindler.compat.zoo.tfpark.rows import (
    LENGTH_BYTES,
    ArrayRows,
    Columns,
    FrameRows,
    LoaderRows,
    RddRows,
    Rows,
    TensorMeta,
    TextRows,
    Unpack,
    flatten,
    pack,
    record_rdd,
    refuse_batched,
    require_rdd,
)
from kindler.data.arrays import is_spark_frame
from kindler.engine import local
from kindler.errors import ConfigError
from kindler.spark.session import running

__all__ = ["TFDataset", "TensorMeta", "total_cores"]

_KNOWN = "_kindler_datasets"  # an attribute of graphs, so that datasets live as long as the graph
_SCALARS = {
    "float": tf.float32,
    "double": tf.float64,
    "int": tf.int32,
    "bigint": tf.int64,
    "smallint": tf.int16,
    "tinyint": tf.int8,
    "boolean": tf.bool,
}
_TEXT = TensorMeta(tf.string, "input", ()), None
_SIZES = {"batch_size": -1, "batch_per_thread": -1, "hard_code_batch_size": False}
_SHARED = {**_SIZES, "memory_type": "DRAM", "sequential_order": False, "shuffle": True}


def total_cores() -> int:
    """The tasks that the Spark application runs at a time; without Spark, the cores of this machine."""
    session = running()
    if session is None:
        return local.slots()
    from kindler.spark.executors import slots

    return slots(session)


def _factory(*after: str) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., TFDataset]]:
    """Make a factory of a function that returns `structure`, `data`, and `rows`, a function of such data.

    Behind its positional arguments the factory has the sizes of batches and those named `after`; the function
    gets those that it declares as keyword-only. What begins with "val" has validation data.
    """

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., TFDataset]:
        own = signature(function).parameters
        first = [part for part in own.values() if part.kind is part.POSITIONAL_OR_KEYWORD]
        defaults = {name: part.default for name, part in own.items() if part.default is not part.empty}
        shared = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default={**_SHARED, **defaults}.get(name))
            for name in (*_SIZES, *after)
        ]
        whole = Signature([*first, *shared], return_annotation="TFDataset")

        @functools.wraps(function)
        def create(*args: Any, **kwargs: Any) -> TFDataset:
            bound = whole.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            parts = function(**{name: given[name] for name in own})
            ordered = given.get("sequential_order", False) or not given.get("shuffle", True)
            checked = [given[name] for name in after if name.startswith("val") and given[name] is not None]
            made = TFDataset(
                parts["structure"],
                *(given[name] for name in _SIZES),
                rows=parts["rows"](parts["data"]),
                validation=parts["rows"](checked[-1]) if checked else None,
                shuffle=parts.get("shuffle", not ordered),
            )
            made.source = parts.get("source")
            return made

        create.__signature__ = whole  # type: ignore[attr-defined]
        return staticmethod(create)

    return decorate


class TFDataset:
    """A collection of elements, each of one or more tensors, to feed to a TensorFlow graph.

    `batch_size` is for training: the rows of a step over all workers, a multiple of the cores.
    `batch_per_thread` is for evaluation and prediction: the rows of one call of the model. With neither,
    tensors are single elements, without a dimension for rows.

    In all factories `memory_type` is without effect: rows are in memory-mapped files. Validation rows are
    evaluated after each epoch, and each epoch has a new order of rows unless `sequential_order` or
    `shuffle=False`.
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
        rows = self.rows_per_call if self.hard_code_batch_size and self.has_batch else None
        metas = flatten(self.tensor_structure)
        return pack(self.tensor_structure, [[rows, *meta.shape] for meta in metas])

    @property
    def input_names(self) -> Any:
        return pack(self.tensor_structure, [meta.name for meta in flatten(self.tensor_structure)])

    @property
    def tensors(self) -> Any:
        """The tensors that elements are fed to, made in the default graph on first use."""
        if self._tensors is None:
            enter_graph_mode()
            made = [_placeholder(meta) for meta in flatten(self.tensor_structure)]
            self._fed = [fed for fed, _ in made]
            for fed in self._fed:
                setattr(fed.graph, _KNOWN, {**getattr(fed.graph, _KNOWN, {}), fed.op.name: self})
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
        assert self.rows is not None
        return self.rows.columns(self.features, self.labels)

    def validation_columns(self) -> Columns | None:
        rows = self.validation_rows
        return None if rows is None else rows.columns(self.features, self.labels)

    def label_arrays(self) -> np.ndarray[Any, Any]:
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

    @_factory("val_rdd", "features", "labels", "memory_type", "sequential_order", "shuffle")
    def from_rdd(
        rdd: Any,
        names: Any = None,
        shapes: Any = None,
        types: Any = None,
        *,
        features: Any = None,
        labels: Any = None,
    ) -> dict[str, Any]:
        """Elements are arrays: (features, labels), or features alone if `labels` is not given.

        With `names`, `shapes` and `types`, the older form, elements are flat lists of arrays.
        """
        require_rdd(rdd)
        structure, flat = _declared(features, labels, names, shapes, types)
        unpack = _unpack(structure, flat)
        return {"structure": structure, "data": rdd, "rows": lambda one: RddRows(one, unpack)}

    @_factory("val_tensors", "memory_type", "sequential_order", "shuffle")
    def from_ndarrays(tensors: Any) -> dict[str, Any]:
        """float64 becomes float32."""
        structure, arrays = _arrays(tensors, "tensors")

        def rows(one: Any) -> Rows:
            found = arrays if one is tensors else _arrays(one, "val_tensors")[1]
            if len(found) != len(arrays):
                raise ConfigError(f"val_tensors has {len(found)} arrays, tensors {len(arrays)}.")
            return ArrayRows(found)

        return {"structure": structure, "data": tensors, "rows": rows}

    @_factory("validation_df", "memory_type", "sequential_order", "shuffle")
    def from_dataframe(df: Any, feature_cols: Any, labels_cols: Any = None) -> dict[str, Any]:
        """Arrays and vectors become float32 tensors of one dimension. Works with Spark Connect, too."""
        if not is_spark_frame(df):
            raise ConfigError(f"from_dataframe takes a Spark DataFrame; received {type(df).__qualname__}.")
        features, labels = _listed(feature_cols), _listed(labels_cols)
        if not features:
            raise ConfigError("from_dataframe: feature_cols names no column.")
        metas = {name: _frame_meta(df, name) for name in [*features, *labels]}
        dtypes = {name: metas[name].dtype.as_numpy_dtype().dtype.name for name in metas}

        def part(names: list[str]) -> Any:
            return metas[names[0]] if len(names) == 1 else [metas[name] for name in names] or None

        return {
            "structure": (part(features), part(labels)),
            "data": df,
            "rows": lambda frame: FrameRows(frame, features, labels, dtypes),
        }

    @_factory("validation_string_rdd")
    def from_string_rdd(string_rdd: Any) -> dict[str, Any]:
        require_rdd(string_rdd)
        return {"structure": _TEXT, "data": string_rdd, "rows": TextRows}

    @_factory("validation_bytes_rdd")
    def from_bytes_rdd(bytes_rdd: Any) -> dict[str, Any]:
        require_rdd(bytes_rdd)
        return {"structure": _TEXT, "data": bytes_rdd, "rows": TextRows}

    @_factory("validation_file_path", "sequential_order", "shuffle")
    def from_tfrecord_file(sc: Any, file_path: str) -> dict[str, Any]:
        """One tensor of `tf.string`, a record each, to parse in the graph. The path, which may be a folder or
        a glob pattern, is the same on all machines.
        """
        return {"structure": _TEXT, "data": file_path, "rows": lambda path: TextRows(record_rdd(sc, path))}

    @_factory(
        "validation_dataset",
        *("sequential_order", "shuffle", "remove_checking", "batch_outside"),
        *("inter_threads", "intra_threads", "auto_shard_files"),
    )
    def from_tf_data_dataset(
        dataset: Any, *, batch_size: Any, batch_per_thread: Any, remove_checking: Any, batch_outside: Any
    ) -> dict[str, Any]:
        """Elements are single rows, (features, labels), neither batched nor repeated, which the dataset's own
        `shuffle` orders. Can be trained on and evaluated, not predicted.

        `remove_checking` takes a dataset that looks batched; `batch_outside` must be False. Others are
        without effect.
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

        return {"structure": structure, "data": dataset, "rows": rows, "shuffle": True}

    @_factory("validation_image_set", "memory_type", "sequential_order", "shuffle")
    def from_image_set(image_set: Any, image: Any, label: Any = None) -> dict[str, Any]:
        return _of_samples(image_set, image, label)

    @_factory("validation_image_set", "memory_type", "sequential_order", "shuffle", "validation_text_set")
    def from_text_set(text_set: Any, text: Any, label: Any = None) -> dict[str, Any]:
        return _of_samples(text_set, text, label)

    @_factory("validation_dataset")
    def from_feature_set(dataset: Any, features: Any, labels: Any = None) -> dict[str, Any]:
        return {**_of_samples(dataset, features, labels), "shuffle": getattr(dataset, "shuffled", True)}


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
        targets = None if labels is None else _described(labels, "labels")
        return (_described(features, "features"), targets), False
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


def _described(given: Any, argument: str) -> Any:
    """A structure of `TensorMeta` for (dtype, shape), or a list or dict of such pairs."""

    def meta(pair: Any, name: str) -> TensorMeta:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(
                f"{argument}: expected (dtype, shape), such as (tf.float32, [28, 28, 1]); received {pair!r}."
            )
        dtype, shape = pair
        sizes = [shape] if isinstance(shape, int) else shape
        open_sizes = (None if size is None or size == -1 else int(size) for size in sizes)
        return TensorMeta(tf.as_dtype(dtype), name, tuple(open_sizes))

    if isinstance(given, tuple):
        return meta(given, "input0")
    if isinstance(given, list):
        return [meta(pair, f"list_input_{number}") for number, pair in enumerate(given)]
    if isinstance(given, Mapping):
        return {key: meta(pair, str(key)) for key, pair in given.items()}
    raise ConfigError(
        f"{argument} must be a tuple (dtype, shape), or a list or a dict of such tuples; received {given!r}."
    )


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
    metas = [
        TensorMeta(tf.as_dtype(array.dtype), f"input_{number}", tuple(array.shape[1:]))
        for number, array in enumerate(arrays)
    ]
    return pack(pair, metas), arrays


def _of_samples(source: Any, features: Any, labels: Any) -> dict[str, Any]:
    structure, flat = _declared(features, labels, None, None, None)
    unpack = _unpack(structure, flat)

    def rows(one: Any) -> Rows:
        if not hasattr(one, "sample_rows"):
            raise ConfigError(
                f"expected an ImageSet, a TextSet or a FeatureSet; received {type(one).__qualname__}."
            )
        made: Rows = one.sample_rows(unpack, labelled=labels is not None)
        return made

    return {"structure": structure, "data": source, "rows": rows, "source": source}


def _element_structure(dataset: Any) -> tuple[Any, Any]:
    if not hasattr(dataset, "element_spec"):
        raise ConfigError(
            f"from_tf_data_dataset takes a tf.data.Dataset; received {type(dataset).__qualname__}."
        )
    pair = dataset.element_spec
    if not isinstance(pair, tuple) or len(pair) != 2:
        pair = (pair[0] if isinstance(pair, tuple) else pair, None)
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
    if kind in _SCALARS:
        return TensorMeta(_SCALARS[kind], name, ())
    if kind.startswith("array<") or kind == "vector":
        return TensorMeta(tf.float32, name, (None,))
    raise ConfigError(
        f"from_dataframe: column {name!r} is of type {kind}; numbers, arrays and vectors can be used."
    )


def _listed(names: str | Sequence[str] | None) -> list[str]:
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


def enter_graph_mode() -> None:
    """Turn eager execution off, as the programs of TensorFlow 1 expect it, unless a graph is being built."""
    if tf.executing_eagerly():
        warnings.warn(
            "TensorFlow executes eagerly, but TFDataset.tensors belong to a graph: eager execution is"
            " turned off for the rest of this program.\n"
            "Hint: call tf.disable_v2_behavior() at the start, or build the graph in `with"
            " tf.Graph().as_default():`.",
            stacklevel=4,
        )
        tf.disable_eager_execution()


def _placeholder(meta: TensorMeta) -> tuple[Any, Any]:
    """A placeholder for a tensor of a dataset, and the tensor itself, which differs for strings."""
    if meta.dtype == tf.string:
        fed = tf.placeholder(tf.uint8, [None, None], name=f"{meta.name}_bytes")
        return fed, decoded(fed, meta.name)
    fed = tf.placeholder(meta.dtype, [None, *meta.shape], name=meta.name)
    return fed, fed


def decoded(rows: Any, name: str | None = None) -> Any:
    """Strings from rows of bytes, each with its length in front (see `rows.TextRows`)."""
    rows_shape = tf.shape(rows, out_type=tf.int64)
    count, width = rows_shape[0], rows_shape[1]
    lengths = tf.cast(tf.bitcast(rows[:, :LENGTH_BYTES], tf.int32), tf.int64)
    # The bytes of the whole batch are the end of its serialized form.
    starts = tf.range(count) * width - count * width + LENGTH_BYTES
    return tf.strings.substr(tf.fill([count], tf.io.serialize_tensor(rows)), starts, lengths, name=name)


def dataset_of(*targets: Any) -> Any:
    """The dataset that these tensors depend on."""
    known = getattr(targets[0].graph, _KNOWN, {})
    found = {id(known[op.name]): known[op.name] for op in _placeholders(targets) if op.name in known}
    if len(found) == 1:
        return next(iter(found.values()))
    names = ", ".join(target.name for target in targets)
    if found:
        raise ConfigError(f"{names} depends on {len(found)} datasets; it must depend on one.")
    raise ConfigError(
        f"{names} depends on no dataset, so there is nothing to feed.\n"
        "Hint: build it from dataset.tensors, or pass dataset=... and inputs=...."
    )


def refuse_unfed(targets: Iterable[Any], fed: Iterable[Any], values: Mapping[Any, Any] | None = None) -> None:
    """Raise for placeholders without a default that these tensors need and nothing feeds."""
    known = {tensor.op.name for tensor in [*fed, *(values or {})]}
    left = sorted(op.name for op in _placeholders(targets) if op.name not in known)
    if left:
        raise ConfigError(
            f"no value is fed to the placeholder {', '.join(map(repr, left))}.\n"
            "Hint: tensor_with_value={placeholder: (value in training, value otherwise)} gives it"
            " constants, or create it with tf.placeholder_with_default."
        )


def _placeholders(targets: Iterable[Any]) -> list[Any]:
    return [op for op in needed(targets).values() if op.type in ("Placeholder", "PlaceholderV2")]
