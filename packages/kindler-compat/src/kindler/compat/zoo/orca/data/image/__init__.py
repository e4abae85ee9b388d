"""`zoo.orca.data.image`: images with labels, masks and boxes; images in Parquet files.

Parquet files are in folders `chunk=N` beside their schema. Folders that Orca wrote are read, and Orca and
Spark read those that are written here.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from kindler import XShards
from kindler.compat.zoo.orca import InvalidInputError, as_orca, refuse_given
from kindler.data.paths import file_system, hidden
from kindler.errors import DataError, MissingExtraError
from kindler.files import folder_at, place
from kindler.readers.files import find, listed, opened
from kindler.spark.session import running

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_METADATA = "_orca_metadata"
_CHUNK = re.compile(r"chunk=(\d+)")


class DType(Enum):
    STRING = 1
    BYTES = 2
    INT32 = 3
    FLOAT32 = 4
    UINT8 = 5


class FeatureType(Enum):
    """How a value is stored: an image file's bytes, an array, or the value itself."""

    IMAGE = 1
    NDARRAY = 2
    SCALAR = 3


_ENUMS: dict[str, type[Enum]] = {"FeatureType": FeatureType, "DType": DType}


class SchemaField(NamedTuple):
    feature_type: FeatureType
    dtype: DType
    shape: Any


def ndarray_dtype_to_dtype(dtype: Any) -> DType:
    name = np.dtype(dtype).name.upper()
    if name not in ("INT32", "FLOAT32", "UINT8"):
        raise InvalidInputError(f"{name.lower()} is not supported: arrays are int32, float32 or uint8.")
    return DType[name]


def encode_schema(schema: Mapping[str, SchemaField]) -> str:
    return json.dumps(
        {name: field._asdict() for name, field in schema.items()},
        default=lambda value: {"__enum__": str(value)},
    )


def decode_schema(text: str | bytes) -> dict[str, SchemaField]:
    """The schema that `encode_schema`, or Orca, wrote."""
    return {name: SchemaField(**fields) for name, fields in json.loads(text, object_hook=_enum).items()}


def _enum(given: dict[str, Any]) -> Any:
    if "__enum__" not in given:
        return given
    kind, _, member = given["__enum__"].partition(".")
    return _ENUMS[kind][member]


def picture(file: str) -> Any:
    """The image, whole, so that it can travel."""
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="images", package="Pillow", extra="images") from exc
    try:
        with opened(file) as raw:
            image = Image.open(raw)
            image.load()
    except (OSError, SyntaxError, ValueError) as exc:
        raise DataError(f"{file} cannot be read as an image: {exc}") from exc
    return image


class VOCDatasets:
    """Paths of images with an array of boxes each: x1, y1, x2, y2 as shares of the image, and the class.

    `dataset[i]` is the i-th image itself with its boxes.
    """

    def __init__(
        self,
        root: str = "VOCdevkit",
        splits_names: Sequence[tuple[Any, str]] = ((2007, "trainval"),),
        classes: Any = None,
        difficult: bool = False,
    ) -> None:
        names = classes or CLASSES
        self._numbers = names if isinstance(names, dict) else {name: i for i, name in enumerate(names)}
        self._difficult = difficult
        self._images = [item for year, split in splits_names for item in _listed(root, year, split)]

    @property
    def classes_label(self) -> list[str]:
        return list(self._numbers)

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((_image(item), self._boxes(item)) for item in self._images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = self._images[index]
        return np.asarray(picture(_image(item))), self._boxes(item)

    def _boxes(self, item: tuple[str, str]) -> Any:
        file = os.path.join(item[0], "Annotations", f"{item[1]}.xml")
        root = ElementTree.parse(file).getroot()
        size = root.find("size")
        if size is not None:
            width, height = (float(size.findtext(side) or 0) for side in ("width", "height"))
        else:
            width, height = picture(_image(item)).size
        boxes = []
        for thing in root.iter("object"):
            name = (thing.findtext("name") or "").strip().lower()
            if name not in self._numbers:
                warnings.warn(f"{name!r} isn't included in {self.classes_label}: {file}", stacklevel=2)
                continue
            corners = [
                float(thing.findtext(f"bndbox/{side}") or 0) for side in ("xmin", "ymin", "xmax", "ymax")
            ]
            shares = [corner / side for corner, side in zip(corners, (width, height) * 2, strict=True)]
            if not (0 <= shares[0] < shares[2] <= 1 and 0 <= shares[1] < shares[3] <= 1):
                warnings.warn(f"a box {corners} is not inside {width:g} x {height:g}: {file}", stacklevel=2)
            boxes.append([*shares, self._numbers[name], float(thing.findtext("difficult") or 0)])
        array = np.array(boxes, np.float32).reshape(-1, 6)
        return array if self._difficult else array[:, :5]


def _listed(root: str, year: Any, split: str) -> list[tuple[str, str]]:
    folder = os.path.join(os.path.abspath(os.path.expanduser(root)), f"VOC{year}")
    file = os.path.join(folder, "ImageSets", "Main", f"{split}.txt")
    if not os.path.isfile(file):
        raise InvalidInputError(f"there is no list of images {file}.")
    with open(file, encoding="utf-8") as lines:
        return [(folder, line.split()[0]) for line in lines if line.strip()]


def _image(item: tuple[str, str]) -> str:
    return os.path.join(item[0], "JPEGImages", f"{item[1]}.jpg")


@as_orca
def read_images(
    file_path: str,
    label_func: Callable[[str], Any] | None = None,
    target_path: str | None = None,
    image_type: str = ".jpg",
    target_type: str = ".png",
    backend: str = "pillow",
) -> XShards:
    """Images as shards: the image; (image, label) with `label_func`; (image, mask) with `target_path`.

    `kindler.read_images` has arrays of many images instead, ready for a model.
    """
    if backend.lower() not in ("pillow", "spark"):
        raise InvalidInputError(
            f"backend of read_images must be either spark or pillow; received {backend!r}."
        )
    files: list[Any] = _files(file_path, image_type)
    if target_path is not None:
        if label_func is not None:
            raise InvalidInputError("label_func should be None when reading targets directly.")
        masks = _files(target_path, target_type)
        if len(masks) != len(files):
            raise InvalidInputError(
                "number of target files and image files should be the same; received"
                f" {len(masks)} and {len(files)}."
            )
        files = list(zip(files, masks, strict=True))
    return XShards.from_shards(files).transform_shard(_Read(label_func))


read_images_pil = read_images_spark = read_images


@as_orca
def read_voc(
    file_path: str = "VOCdevkit",
    split_names: Sequence[tuple[Any, str]] | None = None,
    classes: Any = None,
    diff: bool = False,
    max_samples: int | None = None,
) -> XShards:
    images = VOCDatasets(file_path, split_names or [(2009, "trainval")], classes, diff)
    pairs = list(islice(images, max_samples))
    if not pairs:
        raise InvalidInputError(f"the lists {split_names} of {file_path} name no images.")
    return XShards.from_shards(pairs).transform_shard(_Read(None))


def _files(path: str, suffix: str) -> list[str]:
    def choice(_: str, __: Sequence[tuple[str, ...]]) -> Callable[[tuple[str, ...]], bool]:
        return lambda parts: parts[-1].endswith(suffix) and not any(map(hidden, parts))

    return sorted(find(listed(path), choice, suffix))


class _Read:
    """In a worker: paths become images; what comes with a path that is not one stays."""

    def __init__(self, label: Callable[[str], Any] | None) -> None:
        self.label = label

    def __call__(self, shard: Any) -> Any:
        if isinstance(shard, tuple):
            file, other = shard
            return picture(file), picture(other) if isinstance(other, str) else other
        return picture(shard) if self.label is None else (picture(shard), self.label(shard))


Schema = Mapping[str, SchemaField]
_TEXT = SchemaField(FeatureType.SCALAR, DType.STRING, ())
_IMAGE = SchemaField(FeatureType.IMAGE, DType.FLOAT32, ())


class ParquetDataset:
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
        """`write_mode` is "overwrite", or "error" if there must not be such a folder yet."""
        refuse_given("ParquetDataset.write", **kwargs)
        if write_mode not in ("overwrite", "error", "errorifexists"):
            raise InvalidInputError(f"write_mode must be 'overwrite' or 'error'; received {write_mode!r}.")
        old = _chunks(path)
        if old and write_mode != "overwrite":
            raise InvalidInputError(f"{path} exists.\nHint: write_mode='overwrite' replaces it.")
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
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(
            _stacked(list(_Records(path, _chunks(path))), _schema(path))
        )

    @staticmethod
    def _read_as_dict_rdd(path: str) -> tuple[Any, dict[str, SchemaField]]:
        chunks, session = _chunks(path), running()
        if session is None:
            raise InvalidInputError("an RDD needs a Spark session.\nHint: init_orca_context().")
        rdd = session.sparkContext.parallelize(chunks, len(chunks))
        return rdd.flatMap(lambda chunk: list(_Records(path, [chunk]))), _schema(path)

    @staticmethod
    def _read_as_xshards(path: str) -> XShards:
        schema = _schema(path)
        return XShards.from_shards(_chunks(path)).transform_shard(
            lambda chunk: _stacked(list(_Records(path, [chunk])), schema)
        )


class _Records:
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
    options = dict(config or {})
    chunks = _shard(_chunks(path), options.get("num_shards"), options.get("rank"))
    if format == "dataloader":
        refuse_given("read_parquet('dataloader')", output_types=output_types, output_shapes=output_shapes)
        from torch.utils.data import DataLoader

        from kindler.compat.zoo.orca.data.image.torch_records import TorchRecords

        rows = TorchRecords(_Records(path, chunks, transforms))
        return DataLoader(rows, batch_size=batch_size, num_workers=options.get("num_workers", 0))
    if format != "tf_dataset":
        raise InvalidInputError(f"{format} is not supported, should be 'tf_dataset' or 'dataloader'.")
    refuse_given(
        "read_parquet('tf_dataset')",
        transforms=transforms,
        batch_size=None if batch_size == 1 else batch_size,
    )
    if output_types is None:
        raise InvalidInputError("output_types is not specified for format tf_dataset.")
    import tensorflow as tf

    records = _Records(path, chunks)
    return tf.data.Dataset.from_generator(
        lambda: iter(records), output_types=output_types, output_shapes=output_shapes
    )


@as_orca
def write_parquet(format: str, output_path: str, **arguments: Any) -> None:  # noqa: A002 - Orca's name
    if format not in _WRITERS:
        raise InvalidInputError(
            f"{format} is not supported, should be one of 'mnist','image_folder' and 'voc'."
        )
    write, required = _WRITERS[format]
    for name in required:
        if name not in arguments:
            raise InvalidInputError(f"{name} is not specified for format {format}.")
    write(output_path=output_path, **arguments)


@as_orca
def write_ndarrays(images: Any, labels: Any, output_path: str, **options: Any) -> None:
    """Write arrays: "image" and "label", a record a row."""
    if len(images) != len(labels):
        raise InvalidInputError(f"there are {len(images)} images and {len(labels)} labels.")
    schema = {
        name: SchemaField(FeatureType.NDARRAY, ndarray_dtype_to_dtype(array.dtype), list(array.shape[1:]))
        for name, array in (("image", images), ("label", labels))
    }
    records = ({"image": image, "label": label} for image, label in zip(images, labels, strict=True))
    ParquetDataset.write(output_path, records, schema, **options)


_write_ndarrays = write_ndarrays


@as_orca
def write_mnist(image_file: str, label_file: str, output_path: str, **options: Any) -> None:
    images, labels = _idx(image_file, 2051, "image"), _idx(label_file, 2049, "label")
    write_ndarrays(images[..., None], labels, output_path, **options)


@as_orca
def write_from_directory(
    directory: str, label_map: Mapping[str, int], output_path: str, shuffle: bool = True, **options: Any
) -> None:
    """Write images of a folder with a folder for each class: "image", "label", "image_id", "label_str"."""
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
            raise InvalidInputError(
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
        raise InvalidInputError(
            f"num_shards should be not larger than partitions. but got num_shards {shards} with partitions"
            f" {len(chunks)}.\nHint: write with a smaller block_size."
        )
    if not 0 <= rank < shards:
        raise InvalidInputError(
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
            raise InvalidInputError(f"Invalid magic number {found} in MNIST {what} file: {file}")
        shape = [int.from_bytes(stream.read(4), "big") for _ in range(magic % 256)]
        return np.frombuffer(stream.read(), np.uint8).reshape(shape)
