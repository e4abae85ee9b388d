"""`zoo.feature`: steps of preprocessing, and sets of arrays, images and texts to train on.

As in Analytics Zoo, an image is an array of (height, width, 3) float32 values in the order blue, green,
red, until `ImageMatToTensor` says otherwise.
"""

from __future__ import annotations

import glob
import io
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kindler.compat.bigdl.arguments import Configured, arguments
from kindler.compat.bigdl.util.arrays import JTensor, Sample
from kindler.compat.zoo.tfpark.rows import ArrayRows, RddRows, Rows, Unpack, require_rdd
from kindler.errors import ConfigError, DataError, MissingExtraError
from kindler.spark.session import running

_RESAMPLING = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "LANCZOS")  # by the numbers of OpenCV
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
_WORD = re.compile(r"\S+")

Item = dict[str, Any]


class Preprocessing(Configured, takes=arguments()):
    """A step of preprocessing: called with an item, it returns the item to go on with."""

    def __call__(self, item: Any) -> Any:
        raise NotImplementedError


class ChainedPreprocessing(Preprocessing, takes=arguments("transformers")):
    transformers: list[Callable[[Any], Any]]

    def setup(self) -> None:
        self.transformers = list(self.transformers)
        wrong = [step for step in self.transformers if not callable(step)]
        if wrong:
            raise ConfigError(f"ChainedPreprocessing takes steps of preprocessing; received {wrong[0]!r}.")

    def __call__(self, item: Any) -> Any:
        for step in self.transformers:
            item = step(item)
        return item


class SeqToTensor(Preprocessing, takes=arguments("size=()")):
    """The numbers of a row, or a vector of Spark ML, as an array of a shape; () leaves it as it is."""

    size: tuple[int, ...]

    def setup(self) -> None:
        self.size = tuple(int(length) for length in self.size)

    def __call__(self, item: Any) -> Any:
        array = np.asarray(item.toArray() if hasattr(item, "toArray") else item, dtype=np.float32)
        return array.reshape(self.size) if self.size else array


ArrayToTensor = MLlibVectorToTensor = SeqToTensor


class ScalarToTensor(SeqToTensor, takes=arguments()):
    def setup(self) -> None:
        self.size = (1,)


class SeqToMultipleTensors(Preprocessing, takes=arguments("size=()")):
    """The numbers of a row cut into several arrays, for a model of several inputs."""

    def setup(self) -> None:
        self.sizes = [tuple(int(length) for length in shape) for shape in self.size]

    def __call__(self, item: Any) -> Any:
        flat = np.asarray(item, dtype=np.float32).reshape(-1)
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in self.sizes])
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), self.sizes, strict=False)]


class FeatureLabelPreprocessing(Preprocessing, takes=arguments("feature_transformer, label_transformer")):
    def __call__(self, item: Any) -> Sample:
        features, labels = item
        return Sample(self.feature_transformer(features), self.label_transformer(labels))


class TensorToSample(Preprocessing):
    def __call__(self, item: Any) -> Sample:
        return Sample(item)


class FeatureSet:
    """Elements of an RDD with their preprocessing; made by `rdd`, `sample_rdd` or `image_frame`."""

    def __init__(self, rdd: Any, steps: Sequence[Callable[[Any], Any]] = (), shuffled: bool = True) -> None:
        require_rdd(rdd)
        self._rdd, self._steps, self.shuffled = rdd, tuple(steps), shuffled

    @classmethod
    def rdd(
        cls, rdd: Any, memory_type: str = "DRAM", sequential_order: bool = False, shuffle: bool = True
    ) -> FeatureSet:
        """`memory_type` is without effect: rows are kept in files that are mapped into memory."""
        return cls(rdd, shuffled=shuffle and not sequential_order)

    sample_rdd = rdd

    @classmethod
    def image_frame(
        cls, image_frame: Any, memory_type: str = "DRAM", sequential_order: bool = False, shuffle: bool = True
    ) -> FeatureSet:
        return cls(image_frame.rdd, image_frame.steps, shuffle and not sequential_order)

    image_set = image_frame

    def transform(self, transformer: Callable[[Any], Any]) -> FeatureSet:
        return FeatureSet(self._rdd, (*self._steps, transformer), self.shuffled)

    def to_dataset(self) -> FeatureSet:
        return self

    def sample_rows(self, unpack: Unpack, *, labelled: bool) -> Rows:
        return RddRows(self._rdd.map(_ToPair(ChainedPreprocessing(self._steps), labelled)), unpack)


class _ToPair:
    """Preprocesses an item and takes its features and labels; runs on the executors."""

    def __init__(self, steps: Callable[[Any], Any], labelled: bool) -> None:
        self.steps, self.labelled = steps, labelled

    def __call__(self, item: Any) -> Any:
        made = self.steps(item)
        sample = made.get("sample", made) if isinstance(made, dict) else made
        if isinstance(sample, Sample):
            features, labels = _arrays(sample.features), _arrays(sample.labels)
            return (features, labels) if self.labelled else features
        return sample


def _arrays(tensors: Sequence[JTensor]) -> Any:
    return _one([tensor.to_ndarray() for tensor in tensors])


class ImageSet:
    """Images, with labels if they are in folders of classes, in an RDD of dicts: "uri", "bytes", "label"."""

    def __init__(
        self, rdd: Any, steps: Sequence[Callable[[Item], Item]] = (), label_map: dict[str, int] | None = None
    ) -> None:
        self.rdd, self.steps, self.label_map = rdd, tuple(steps), label_map
        self._predictions: Any = None

    @classmethod
    def read(
        cls,
        path: str,
        sc: Any = None,
        min_partitions: int = 1,
        resize_height: int = -1,
        resize_width: int = -1,
        image_codec: int = -1,
        with_label: bool = False,
        one_based_label: bool = True,
        label_map: dict[str, int] | None = None,
        bigdl_type: str = "float",
    ) -> ImageSet:
        """`path` may be a glob pattern; with labels, a folder with one folder a class."""
        _require_colours(image_codec)
        files = _files(path)
        labels: dict[str, int] = dict(label_map or {})
        if with_label and not labels:
            names = sorted({os.path.basename(os.path.dirname(file)) for file in files})
            labels = {name: number + one_based_label for number, name in enumerate(names)}
        context = sc if sc is not None else _context()
        items = [
            (file, labels[os.path.basename(os.path.dirname(file))] if with_label else None) for file in files
        ]
        partitions = max(min_partitions, min(len(items), context.defaultParallelism))
        made = cls(context.parallelize(items, partitions).map(_read), label_map=labels or None)
        if resize_height > 0 and resize_width > 0:
            made = made.transform(ImageResize(resize_height, resize_width))
        return made

    def transform(self, transformer: Callable[[Item], Item]) -> ImageSet:
        return ImageSet(self.rdd, (*self.steps, transformer), self.label_map)

    def get_image(self, key: str = "floats", to_chw: bool = True) -> Any:
        """`key` "floats" are the present pixels of an image, other keys are those that steps gave."""

        def image(item: Item) -> Any:
            if key != "floats":
                return item[key]
            mat = item["imageTensor"] if "imageTensor" in item else _mat(item)["mat"]
            turned = to_chw and mat.ndim == 3 and "imageTensor" not in item
            return np.transpose(mat, (2, 0, 1)) if turned else mat

        return self._done().map(image)

    def get_label(self) -> Any:
        return self._done().map(lambda item: np.array([item["label"]], np.float32))

    def get_predict(self, key: str = "predict") -> Any:
        """An RDD of (uri, prediction); after `KerasModel.predict` or `TFEstimator.predict`."""
        if self._predictions is None:
            return self.rdd.map(lambda item: (item["uri"], None))
        return self.rdd.map(lambda item: item["uri"]).zip(self._predictions)

    def to_image_frame(self, bigdl_type: str = "float") -> ImageSet:
        return self

    def get_label_map(self) -> dict[str, int] | None:
        return self.label_map

    def with_predictions(self, rdd: Any) -> ImageSet:
        made = ImageSet(self.rdd, self.steps, self.label_map)
        rows, parts = rdd.collect(), self.rdd.glom().map(len).collect()
        starts = np.cumsum([0, *parts])
        pieces = [rows[start : start + size] for start, size in zip(starts, parts, strict=False)]
        made._predictions = rdd.context.parallelize(pieces, len(pieces)).flatMap(list)
        return made

    def sample_rows(self, unpack: Unpack, *, labelled: bool) -> Rows:
        return RddRows(self.rdd.map(_ToPair(ChainedPreprocessing(self.steps), labelled)), unpack)

    def _done(self) -> Any:
        return self.rdd.map(ChainedPreprocessing(self.steps))


class ImagePreprocessing(Preprocessing):
    def __call__(self, item: Item) -> Item:
        opened = _mat(item)
        return {**opened, "mat": np.ascontiguousarray(self.change(opened["mat"]), np.float32)}

    def change(self, image: Any) -> Any:
        raise NotImplementedError


class ImageBytesToMat(ImagePreprocessing, takes=arguments("byte_key='bytes', image_codec=-1")):
    def setup(self) -> None:
        _require_colours(self.image_codec)
        if self.byte_key != "bytes":
            raise ConfigError(f"ImageBytesToMat: byte_key must be 'bytes'; received {self.byte_key!r}.")

    def change(self, image: Any) -> Any:
        return image


class ImageResize(
    ImagePreprocessing, takes=arguments("resize_h, resize_w, resize_mode=1, use_scale_factor=True")
):
    """`use_scale_factor` is without effect: the new size is exact."""

    def setup(self) -> None:
        if self.resize_mode not in range(len(_RESAMPLING)):
            raise ConfigError(f"ImageResize: resize_mode must be 0 to 4; received {self.resize_mode!r}.")

    def change(self, image: Any) -> Any:
        pil = _pillow()
        size, how = (self.resize_w, self.resize_h), pil.Resampling[_RESAMPLING[self.resize_mode]]
        planes = [pil.fromarray(image[..., channel]).resize(size, how) for channel in range(image.shape[-1])]
        return np.stack([np.asarray(plane) for plane in planes], axis=-1)


class _Crop(ImagePreprocessing, takes=arguments("crop_width, crop_height, is_clip=True")):
    def change(self, image: Any) -> Any:
        height, width = self.crop_height, self.crop_width
        down, right = image.shape[0] - height, image.shape[1] - width
        if down < 0 or right < 0:
            raise DataError(f"an image of {image.shape[:2]} cannot be cropped to {(height, width)}.")
        top, left = self.corner(down, right)
        return image[top : top + height, left : left + width]

    def corner(self, down: int, right: int) -> tuple[int, int]:
        raise NotImplementedError


class ImageCenterCrop(_Crop):
    def corner(self, down: int, right: int) -> tuple[int, int]:
        return down // 2, right // 2


class ImageRandomCrop(_Crop):
    def corner(self, down: int, right: int) -> tuple[int, int]:
        return random.randint(0, down), random.randint(0, right)


class ImageHFlip(ImagePreprocessing):
    def change(self, image: Any) -> Any:
        return image[:, ::-1]


class ImageRandomPreprocessing(Preprocessing, takes=arguments("preprocessing, prob")):
    def __call__(self, item: Item) -> Item:
        changed: Item = self.preprocessing(item) if random.random() < self.prob else item
        return changed


class ImageChannelNormalize(
    ImagePreprocessing, takes=arguments("mean_r, mean_g, mean_b, std_r=1, std_g=1, std_b=1")
):
    def change(self, image: Any) -> Any:
        mean = np.array([self.mean_b, self.mean_g, self.mean_r], np.float32)
        return (image - mean) / np.array([self.std_b, self.std_g, self.std_r], np.float32)


class ImageMatToTensor(
    Preprocessing,
    takes=arguments("to_RGB=False, tensor_key='imageTensor', share_buffer=True, format='NCHW'"),
):
    """`share_buffer` is without effect."""

    def setup(self) -> None:
        if self.format not in ("NCHW", "NHWC"):
            raise ConfigError(f"ImageMatToTensor: format must be 'NCHW' or 'NHWC'; received {self.format!r}.")

    def __call__(self, item: Item) -> Item:
        opened = _mat(item)
        image = opened["mat"][..., ::-1] if self.to_RGB else opened["mat"]
        tensor = image if self.format == "NHWC" else np.transpose(image, (2, 0, 1))
        return {**opened, self.tensor_key: np.ascontiguousarray(tensor, np.float32)}


class ImageSetToSample(
    Preprocessing, takes=arguments("input_keys=('imageTensor',), target_keys=None, sample_key='sample'")
):
    def __call__(self, item: Item) -> Item:
        features = [np.asarray(item[key]) for key in self.input_keys]
        labels = [np.atleast_1d(np.asarray(item[key])) for key in self.target_keys or ()]
        return {**item, self.sample_key: Sample(_one(features), _one(labels) if labels else None)}


def _one(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else parts


def _files(path: str) -> list[str]:
    name = os.fspath(path).removeprefix("file://")
    if os.path.isdir(name):
        found = [os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files]
    else:
        found = [file for file in glob.glob(name) if os.path.isfile(file)]
    images = sorted(os.path.abspath(file) for file in found if file.lower().endswith(_SUFFIXES))
    if not images:
        raise ConfigError(f"ImageSet.read: there are no images at {path}.")
    return images


def _read(pair: tuple[str, int | None]) -> Item:
    file, label = pair
    with open(file, "rb") as opened:
        item: Item = {"uri": file, "bytes": opened.read()}
    return item if label is None else {**item, "label": np.float32(label)}


def _mat(item: Item) -> Item:
    if "mat" in item:
        return item
    with _pillow().open(io.BytesIO(item["bytes"])) as image:
        rgb = np.asarray(image.convert("RGB"), np.float32)
    return {**item, "mat": np.ascontiguousarray(rgb[..., ::-1])}


def _require_colours(image_codec: int) -> None:
    if image_codec not in (-1, 1):
        raise ConfigError(
            f"image_codec={image_codec!r}: images are decoded to three colours, which are -1 and 1.\n"
            "Hint: kindler.read_images(mode='L') reads grey ones."
        )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="ImageSet", package="Pillow", extra="images") from exc
    return Image


def _context() -> Any:
    session = running()
    if session is None:
        raise ConfigError("ImageSet.read needs a Spark context.\nHint: call init_nncontext() first.")
    return session.sparkContext


class TextSet:
    def __init__(self, texts: Sequence[str], labels: Sequence[int] | None = None) -> None:
        if labels is not None and len(labels) != len(texts):
            raise ConfigError(f"TextSet: {len(texts)} texts and {len(labels)} labels.")
        self._texts = list(texts)
        self._labels = None if labels is None else [int(label) for label in labels]
        self._tokens: list[list[str]] | None = None
        self._indices: list[list[int]] | None = None
        self._word_index: dict[str, int] | None = None

    @classmethod
    def read(cls, path: str, sc: Any = None, min_partitions: int = 1, bigdl_type: str = "float") -> TextSet:
        """Read a folder with one folder a class; labels count from 0, in the order of names."""
        if not os.path.isdir(path):
            raise ConfigError(f"TextSet.read: there is no folder {path}.")
        classes = sorted(name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name)))
        texts, labels = [], []
        for number, name in enumerate(classes):
            for file in sorted(os.listdir(os.path.join(path, name))):
                with open(os.path.join(path, name, file), encoding="utf-8", errors="replace") as opened:
                    texts.append(opened.read())
                labels.append(number)
        if not texts:
            raise ConfigError(f"TextSet.read: there are no texts in the folders of {path}.")
        return cls(texts, labels)

    def tokenize(self) -> TextSet:
        return self._with(_tokens=[_WORD.findall(text) for text in self._texts])

    def normalize(self) -> TextSet:
        words = [
            [re.sub(r"[^a-z]", "", word.lower()) for word in text]
            for text in self._need("_tokens", "tokenize")
        ]
        return self._with(_tokens=[[word for word in text if word] for text in words])

    def word2idx(
        self,
        remove_topN: int = 0,
        max_words_num: int = -1,
        min_freq: int = 1,
        existing_map: Mapping[str, int] | None = None,
    ) -> TextSet:
        """Number words by how frequent they are, from 1; unknown words are left out."""
        tokens = self._need("_tokens", "tokenize")
        if existing_map is None:
            counted = Counter(word for text in tokens for word in text)
            ordered = sorted((w for w, n in counted.items() if n >= min_freq), key=lambda w: (-counted[w], w))
            chosen = ordered[remove_topN:][: max_words_num if max_words_num > 0 else None]
            index = {word: number for number, word in enumerate(chosen, start=1)}
        else:
            index = dict(existing_map)
        indices = [[index[word] for word in text if word in index] for text in tokens]
        return self._with(_indices=indices, _word_index=index)

    def shape_sequence(self, len: int, trunc_mode: str = "pre", pad_element: int = 0) -> TextSet:  # noqa: A002
        if trunc_mode not in ("pre", "post"):
            raise ConfigError(f"shape_sequence: trunc_mode must be 'pre' or 'post'; received {trunc_mode!r}.")
        cut = [row[-len:] if trunc_mode == "pre" else row[:len] for row in self._need("_indices", "word2idx")]
        return self._with(_indices=[row + [pad_element] * (len - row.__len__()) for row in cut])

    def generate_sample(self) -> TextSet:
        """The set itself: samples are made when it is used."""
        self._need("_indices", "word2idx")
        return self

    def transform(self, transformer: Any) -> TextSet:
        return TextSet([transformer(text) for text in self._texts], self._labels)

    def get_word_index(self) -> dict[str, int] | None:
        return self._word_index

    def get_texts(self) -> list[str]:
        return list(self._texts)

    def get_labels(self) -> list[int]:
        """The labels; -1 for texts without one."""
        return [-1] * len(self._texts) if self._labels is None else list(self._labels)

    def get_samples(self) -> list[Sample]:
        labels: Sequence[Any] = self._labels if self._labels is not None else [None] * len(self._texts)
        rows = self._need("_indices", "word2idx")
        return [Sample(np.array(row), label) for row, label in zip(rows, labels, strict=True)]

    def sample_rows(self, unpack: Unpack, *, labelled: bool) -> Rows:
        if labelled and self._labels is None:
            raise ConfigError("the TextSet has no labels.")
        rows = self._need("_indices", "word2idx")
        pairs: list[Any] = list(zip(rows, self._labels or [], strict=True)) if labelled else rows
        made = [
            unpack.arrays((np.array(one[0]), np.array(one[1])) if labelled else np.array(one))
            for one in pairs
        ]
        return ArrayRows([np.stack(parts) for parts in zip(*made, strict=True)])

    def _need(self, name: str, step: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"call {step}() on the TextSet first.")
        return value

    def _with(self, **parts: Any) -> TextSet:
        made = TextSet(self._texts, self._labels)
        made.__dict__.update({**self.__dict__, **parts})
        return made
