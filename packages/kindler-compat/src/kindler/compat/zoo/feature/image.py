"""`ImageSet`, and steps of preprocessing for images.

As in Analytics Zoo, an image is an array of (height, width, 3) float32 values in the order blue, green,
red, until `ImageMatToTensor` says otherwise.
"""

from __future__ import annotations

import glob
import io
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kindler.compat.zoo.feature.common import ChainedPreprocessing, Preprocessing, Sample, ToPair
from kindler.compat.zoo.tfpark.rows import RddRows, Rows
from kindler.compat.zoo.tfpark.structures import Unpack
from kindler.errors import ConfigError, DataError, MissingExtraError
from kindler.spark.session import running

__all__ = [
    "ChainedPreprocessing",
    "ImageBytesToMat",
    "ImageCenterCrop",
    "ImageChannelNormalize",
    "ImageHFlip",
    "ImageMatToTensor",
    "ImagePreprocessing",
    "ImageRandomCrop",
    "ImageRandomPreprocessing",
    "ImageResize",
    "ImageSet",
    "ImageSetToSample",
]

_RESAMPLING = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "LANCZOS")  # by the numbers of OpenCV
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")

Item = dict[str, Any]


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
        """Read images.

        Args:
            path: A file, a folder or a glob pattern; with labels, a folder with one folder a class.
            sc: The Spark context; None takes the running one.
            min_partitions: The least number of partitions.
            resize_height: The height to scale images to; -1 leaves them.
            resize_width: The width to scale images to.
            image_codec: OpenCV's -1 or 1: images have three colours.
            with_label: Whether the label is the number of the image's folder, in the order of names.
            one_based_label: Whether labels count from 1.
            label_map: The label of each folder, instead of its number.
            bigdl_type: Without effect.
        """
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
        """The set after a step of preprocessing."""
        return ImageSet(self.rdd, (*self.steps, transformer), self.label_map)

    def get_image(self, key: str = "floats", to_chw: bool = True) -> Any:
        """An RDD of the images as arrays; channels first, if `to_chw`.

        `key` is what of an image; "floats" are its present pixels, other keys are those that steps gave.
        """

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
        """The set itself."""
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
        return RddRows(self.rdd.map(ToPair(ChainedPreprocessing(self.steps), labelled)), unpack)

    def _done(self) -> Any:
        return self.rdd.map(ChainedPreprocessing(self.steps))


class ImagePreprocessing(Preprocessing):
    """A step of preprocessing that changes the image."""

    def __call__(self, item: Item) -> Item:
        opened = _mat(item)
        return {**opened, "mat": np.ascontiguousarray(self.change(opened["mat"]), np.float32)}

    def change(self, image: Any) -> Any:
        raise NotImplementedError


class ImageBytesToMat(ImagePreprocessing):
    """Decode the image; `byte_key` must be "bytes", and `image_codec` OpenCV's -1 or 1."""

    def __init__(self, byte_key: str = "bytes", image_codec: int = -1) -> None:
        _require_colours(image_codec)
        if byte_key != "bytes":
            raise ConfigError(f"ImageBytesToMat: byte_key must be 'bytes'; received {byte_key!r}.")

    def change(self, image: Any) -> Any:
        return image


class ImageResize(ImagePreprocessing):
    """Scale the image.

    Args:
        resize_h: The new height.
        resize_w: The new width.
        resize_mode: OpenCV's number: 0 nearest, 1 bilinear, 2 bicubic, 3 area, 4 Lanczos.
        use_scale_factor: Without effect: the new size is exact.
    """

    def __init__(
        self, resize_h: int, resize_w: int, resize_mode: int = 1, use_scale_factor: bool = True
    ) -> None:
        if resize_mode not in range(len(_RESAMPLING)):
            raise ConfigError(f"ImageResize: resize_mode must be 0 to 4; received {resize_mode!r}.")
        self.size, self.resampling = (resize_h, resize_w), _RESAMPLING[resize_mode]

    def change(self, image: Any) -> Any:
        pil = _pillow()
        planes = [
            pil.fromarray(image[..., channel]).resize(self.size[::-1], pil.Resampling[self.resampling])
            for channel in range(image.shape[-1])
        ]
        return np.stack([np.asarray(plane) for plane in planes], axis=-1)


class _Crop(ImagePreprocessing):
    def __init__(self, crop_width: int, crop_height: int, is_clip: bool = True) -> None:
        self.width, self.height = crop_width, crop_height

    def change(self, image: Any) -> Any:
        down, right = image.shape[0] - self.height, image.shape[1] - self.width
        if down < 0 or right < 0:
            raise DataError(
                f"an image of {image.shape[:2]} cannot be cropped to {(self.height, self.width)}."
            )
        top, left = self.corner(down, right)
        return image[top : top + self.height, left : left + self.width]

    def corner(self, down: int, right: int) -> tuple[int, int]:
        raise NotImplementedError


class ImageCenterCrop(_Crop):
    """Cut out the middle."""

    def corner(self, down: int, right: int) -> tuple[int, int]:
        return down // 2, right // 2


class ImageRandomCrop(_Crop):
    """Cut out a random part."""

    def corner(self, down: int, right: int) -> tuple[int, int]:
        return random.randint(0, down), random.randint(0, right)


class ImageHFlip(ImagePreprocessing):
    """Mirror the image."""

    def change(self, image: Any) -> Any:
        return image[:, ::-1]


class ImageRandomPreprocessing(Preprocessing):
    """Another step, with a probability."""

    def __init__(self, preprocessing: Callable[[Item], Item], prob: float) -> None:
        self.step, self.prob = preprocessing, prob

    def __call__(self, item: Item) -> Item:
        return self.step(item) if random.random() < self.prob else item


class ImageChannelNormalize(ImagePreprocessing):
    """Subtract a mean from each channel, and divide by a deviation; red, green, blue."""

    def __init__(
        self,
        mean_r: float,
        mean_g: float,
        mean_b: float,
        std_r: float = 1,
        std_g: float = 1,
        std_b: float = 1,
    ) -> None:
        self.mean = np.array([mean_b, mean_g, mean_r], np.float32)
        self.std = np.array([std_b, std_g, std_r], np.float32)

    def change(self, image: Any) -> Any:
        return (image - self.mean) / self.std


class ImageMatToTensor(Preprocessing):
    """Make the tensor "imageTensor" of the image.

    Args:
        to_RGB: Whether to put red first.
        tensor_key: Its key.
        share_buffer: Without effect: it changes speed only.
        format: "NCHW", channels first, or "NHWC".
    """

    def __init__(
        self,
        to_RGB: bool = False,
        tensor_key: str = "imageTensor",
        share_buffer: bool = True,
        format: str = "NCHW",  # noqa: A002
    ) -> None:
        if format not in ("NCHW", "NHWC"):
            raise ConfigError(f"ImageMatToTensor: format must be 'NCHW' or 'NHWC'; received {format!r}.")
        self.to_rgb, self.key, self.format = to_RGB, tensor_key, format

    def __call__(self, item: Item) -> Item:
        opened = _mat(item)
        image = opened["mat"][..., ::-1] if self.to_rgb else opened["mat"]
        tensor = image if self.format == "NHWC" else np.transpose(image, (2, 0, 1))
        return {**opened, self.key: np.ascontiguousarray(tensor, np.float32)}


class ImageSetToSample(Preprocessing):
    """Make a sample of what is under some keys.

    Args:
        input_keys: The features.
        target_keys: The labels; None for none.
        sample_key: Where the sample goes.
    """

    def __init__(
        self,
        input_keys: Sequence[str] = ("imageTensor",),
        target_keys: Sequence[str] | None = None,
        sample_key: str = "sample",
    ) -> None:
        self.inputs, self.targets, self.key = list(input_keys), list(target_keys or ()), sample_key

    def __call__(self, item: Item) -> Item:
        features = [np.asarray(item[key]) for key in self.inputs]
        labels = [np.atleast_1d(np.asarray(item[key])) for key in self.targets]
        return {**item, self.key: Sample(_one(features), _one(labels) if labels else None)}


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
