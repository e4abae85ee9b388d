"""Images, arrays and numbers in Parquet files, in folders `chunk=N` beside their schema, as Orca has it.

Folders that Orca wrote are read, and Orca and Spark read those that are written here.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from kindler.compat.zoo.orca.data.image.utils import (
    DType,
    FeatureType,
    SchemaField,
    decode_schema,
    encode_schema,
    ndarray_dtype_to_dtype,
)
from kindler.compat.zoo.orca.data.image.voc_dataset import VOCDatasets
from kindler.compat.zoo.orca.errors import InvalidInput, as_orca, refuse_given
from kindler.data.paths import file_system
from kindler.files import folder_at, place
from kindler.spark.session import running
from kindler.xshards import XShards

__all__ = [
    "ParquetDataset",
    "read_parquet",
    "write_from_directory",
    "write_mnist",
    "write_ndarrays",
    "write_parquet",
    "write_voc",
]

Schema = Mapping[str, SchemaField]
_METADATA = "_orca_metadata"
_CHUNK = re.compile(r"chunk=(\d+)")
_TEXT = SchemaField(FeatureType.SCALAR, DType.STRING, ())
_IMAGE = SchemaField(FeatureType.IMAGE, DType.FLOAT32, ())


class ParquetDataset:
    """Writes and reads such folders."""

    @staticmethod
    @as_orca
    def write(
        path: str,
        generator: Iterable[Mapping[str, Any]],
        schema: Schema,
        block_size: int = 1000,
        write_mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Write records, each a dict from the names of columns to values.

        Args:
            path: The folder.
            generator: The records. A value of type IMAGE is the path of a file, whose bytes are stored.
            schema: What the columns are.
            block_size: Records of a file.
            write_mode: "overwrite", or "error" if there must not be such a folder yet.
            kwargs: Must be empty.
        """
        refuse_given("ParquetDataset.write", **kwargs)
        if write_mode not in ("overwrite", "error", "errorifexists"):
            raise InvalidInput(f"write_mode must be 'overwrite' or 'error'; received {write_mode!r}.")
        old = _chunks(path)
        if old and write_mode != "overwrite":
            raise InvalidInput(f"{path} exists.\nHint: write_mode='overwrite' replaces it.")
        for chunk in old:  # those of a longer set would stay among the new ones
            files, inside = file_system(chunk)
            files.delete_dir(inside)
        records = iter(generator)
        number = 0
        while rows := list(islice(records, block_size)):
            _write_chunk(f"{_root(path)}/chunk={number}", rows, schema)
            number += 1
        folder_at(path).write(_METADATA, [encode_schema(schema).encode()])

    @staticmethod
    @as_orca
    def read_as_tf(path: str) -> Any:
        """All records as a `tf.data.Dataset` of dicts."""
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(
            _stacked(list(_Records(path, _chunks(path))), _schema(path))
        )

    @staticmethod
    def _read_as_dict_rdd(path: str) -> tuple[Any, dict[str, SchemaField]]:
        chunks, session = _chunks(path), running()
        if session is None:
            raise InvalidInput("an RDD needs a Spark session.\nHint: init_orca_context().")
        rdd = session.sparkContext.parallelize(chunks, len(chunks))
        return rdd.flatMap(lambda chunk: list(_Records(path, [chunk]))), _schema(path)

    @staticmethod
    def _read_as_xshards(path: str) -> XShards:
        schema = _schema(path)
        return XShards.from_shards(_chunks(path)).transform_shard(
            lambda chunk: _stacked(list(_Records(path, [chunk])), schema)
        )


class _Records:
    """The records of some chunks, one after the other."""

    def __init__(
        self, path: str, chunks: Sequence[str], transforms: Callable[[Any], Any] | None = None
    ) -> None:
        self.schema, self.chunks, self.transforms = _schema(path), list(chunks), transforms

    def __iter__(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        arrays = [name for name, field in self.schema.items() if field.feature_type is FeatureType.NDARRAY]
        for chunk in self.chunks:
            folder = folder_at(chunk)
            for file in (name for name in folder.names() if name.endswith(".parquet")):
                table = pq.read_table(io.BytesIO(folder.read(file)), columns=list(self.schema))
                for row in table.to_pylist():
                    record = {**row, **{name: _array(row[name]) for name in arrays}}
                    yield record if self.transforms is None else self.transforms(record)


@as_orca
def read_parquet(
    format: str,  # noqa: A002 - Orca's name
    path: str,
    transforms: Callable[[Any], Any] | None = None,
    config: Mapping[str, int] | None = None,
    batch_size: int = 1,
    *,
    output_types: Any = None,
    output_shapes: Any = None,
) -> Any:
    """The records of a folder, as a `tf.data.Dataset` or a `DataLoader`.

    Args:
        format: "tf_dataset" or "dataloader".
        path: The folder that `write_parquet` or `ParquetDataset.write` wrote.
        transforms: For a DataLoader: a function of a record.
        config: "num_shards" and "rank" give every num_shards-th chunk; "num_workers" is the DataLoader's.
        batch_size: Records of a batch of the DataLoader.
        output_types: For TensorFlow: the type of each column.
        output_shapes: For TensorFlow: the shape of each column.
    """
    options = dict(config or {})
    chunks = _shard(_chunks(path), options.get("num_shards"), options.get("rank"))
    if format == "dataloader":
        refuse_given("read_parquet('dataloader')", output_types=output_types, output_shapes=output_shapes)
        from torch.utils.data import DataLoader

        from kindler.compat.zoo.orca.data.image.torch_records import TorchRecords

        rows = TorchRecords(_Records(path, chunks, transforms))
        return DataLoader(rows, batch_size=batch_size, num_workers=options.get("num_workers", 0))
    if format != "tf_dataset":
        raise InvalidInput(f"{format} is not supported, should be 'tf_dataset' or 'dataloader'.")
    refuse_given(
        "read_parquet('tf_dataset')",
        transforms=transforms,
        batch_size=None if batch_size == 1 else batch_size,
    )
    if output_types is None:
        raise InvalidInput("output_types is not specified for format tf_dataset.")
    import tensorflow as tf

    records = _Records(path, chunks)
    return tf.data.Dataset.from_generator(
        lambda: iter(records), output_types=output_types, output_shapes=output_shapes
    )


@as_orca
def write_parquet(format: str, output_path: str, **arguments: Any) -> None:  # noqa: A002 - Orca's name
    """Write a set of images.

    Args:
        format: "mnist", "image_folder" or "voc".
        output_path: The folder.
        arguments: Those of `write_mnist`, `write_from_directory` or `write_voc`.
    """
    if format not in _WRITERS:
        raise InvalidInput(f"{format} is not supported, should be one of 'mnist','image_folder' and 'voc'.")
    write, required = _WRITERS[format]
    for name in required:
        if name not in arguments:
            raise InvalidInput(f"{name} is not specified for format {format}.")
    write(output_path=output_path, **arguments)


@as_orca
def write_ndarrays(images: Any, labels: Any, output_path: str, **options: Any) -> None:
    """Write arrays: "image" and "label", a record a row."""
    if len(images) != len(labels):
        raise InvalidInput(f"there are {len(images)} images and {len(labels)} labels.")
    schema = {
        name: SchemaField(FeatureType.NDARRAY, ndarray_dtype_to_dtype(array.dtype), list(array.shape[1:]))
        for name, array in (("image", images), ("label", labels))
    }
    records = ({"image": image, "label": label} for image, label in zip(images, labels, strict=True))
    ParquetDataset.write(output_path, records, schema, **options)


_write_ndarrays = write_ndarrays


@as_orca
def write_mnist(image_file: str, label_file: str, output_path: str, **options: Any) -> None:
    """Write images and labels of MNIST's files, packed with gzip or not."""
    images, labels = _idx(image_file, 2051, "image"), _idx(label_file, 2049, "label")
    write_ndarrays(images[..., None], labels, output_path, **options)


@as_orca
def write_from_directory(
    directory: str, label_map: Mapping[str, int], output_path: str, shuffle: bool = True, **options: Any
) -> None:
    """Write images of a folder with a folder for each class: "image", "label", "image_id", "label_str".

    Args:
        directory: The folder.
        label_map: The label of each folder in it; others are left out.
        output_path: Where to.
        shuffle: Whether records are in random order.
        options: Those of `ParquetDataset.write`.
    """
    records = [
        {"image": file.path, "label": label_map[folder], "image_id": file.path, "label_str": folder}
        for folder in sorted(os.listdir(directory))
        if folder in label_map
        for file in sorted(os.scandir(os.path.join(directory, folder)), key=lambda entry: entry.name)
    ]
    if shuffle:
        random.shuffle(records)
    label = SchemaField(FeatureType.SCALAR, DType.INT32, ())
    schema = {"image": _IMAGE, "label": label, "image_id": _TEXT, "label_str": _TEXT}
    ParquetDataset.write(output_path, records, schema, **options)


@as_orca
def write_voc(
    voc_root_path: str, splits_names: Any, output_path: str, classes: Any = None, **options: Any
) -> None:
    """Write images of Pascal VOC with their boxes: "image", "label", "image_id"; see `VOCDatasets`."""
    images = VOCDatasets(voc_root_path, splits_names, classes=classes)
    boxes = SchemaField(FeatureType.NDARRAY, DType.FLOAT32, [-1, 5])
    records = ({"image": path, "label": label, "image_id": path} for path, label in images)
    ParquetDataset.write(
        output_path, records, {"image": _IMAGE, "label": boxes, "image_id": _TEXT}, **options
    )


_WRITERS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "mnist": (write_mnist, ("image_file", "label_file")),
    "image_folder": (write_from_directory, ("directory", "label_map")),
    "voc": (write_voc, ("voc_root_path", "splits_names")),
}


def _write_chunk(folder: str, rows: Sequence[Mapping[str, Any]], schema: Schema) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in rows:
        if set(row) != set(schema):
            raise InvalidInput(
                f"Dictionary fields {sorted(row)} do not match schema fields {sorted(schema)}."
            )
    columns = {name: [_stored(row[name], field) for row in rows] for name, field in schema.items()}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    folder_at(folder).write("part-00000.parquet", [buffer.getbuffer()])


def _stored(value: Any, field: SchemaField) -> Any:
    if field.feature_type is FeatureType.IMAGE:
        with open(value, "rb") as file:
            return file.read()
    if field.feature_type is FeatureType.NDARRAY:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, arr=value)
        return buffer.getvalue()
    return value.item() if isinstance(value, np.generic) else value


def _array(stored: bytes) -> Any:
    with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
        return arrays["arr"]


def _stacked(records: Sequence[Mapping[str, Any]], schema: Schema) -> dict[str, Any]:
    """Columns: arrays, and images as lists of bytes."""
    columns = {name: [record[name] for record in records] for name in schema}
    return {
        name: values if schema[name].feature_type is FeatureType.IMAGE else np.stack(values)
        for name, values in columns.items()
    }


def _shard(chunks: list[str], shards: int | None, rank: int | None) -> list[str]:
    if shards is None or rank is None:
        return chunks
    if shards > len(chunks):
        raise InvalidInput(
            f"num_shards should be not larger than partitions. but got num_shards {shards} with partitions"
            f" {len(chunks)}.\nHint: write with a smaller block_size."
        )
    if not 0 <= rank < shards:
        raise InvalidInput(
            f"shard index should be included in [0,num_shard), but got rank {rank} of {shards}."
        )
    return chunks[rank::shards]


def _root(path: str) -> str:
    return place(path).rstrip("/")


def _schema(path: str) -> dict[str, SchemaField]:
    return decode_schema(folder_at(path).read(_METADATA))


def _chunks(path: str) -> list[str]:
    """The folders of a set's chunks, in the order of their numbers."""
    from pyarrow.fs import FileSelector

    files, inside = file_system(_root(path))
    found = files.get_file_info(FileSelector(inside, allow_not_found=True))
    numbers = [int(match[1]) for entry in found if (match := _CHUNK.fullmatch(entry.base_name))]
    return [f"{_root(path)}/chunk={number}" for number in sorted(numbers)]


def _idx(file: str, magic: int, what: str) -> Any:
    """An array of a file of MNIST: a number for its kind, its shape, and its bytes."""
    opened = gzip.open if str(file).endswith(".gz") else open
    with opened(file, "rb") as stream:
        found = int.from_bytes(stream.read(4), "big")
        if found != magic:
            raise InvalidInput(f"Invalid magic number {found} in MNIST {what} file: {file}")
        shape = [int.from_bytes(stream.read(4), "big") for _ in range(magic % 256)]
        return np.frombuffer(stream.read(), np.uint8).reshape(shape)
