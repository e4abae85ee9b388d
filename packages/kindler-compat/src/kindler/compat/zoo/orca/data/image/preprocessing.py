"""Images as shards: one image of Pillow a shard, alone or with its label, mask or boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from kindler.compat.zoo.orca.data.image.utils import picture
from kindler.compat.zoo.orca.data.image.voc_dataset import VOCDatasets
from kindler.compat.zoo.orca.errors import InvalidInput, as_orca
from kindler.data.paths import hidden
from kindler.readers.files import find, listed
from kindler.xshards import XShards

__all__ = ["read_images", "read_images_pil", "read_images_spark", "read_voc"]


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

    Args:
        file_path: A folder, a file or a glob; images are in the order of their names.
        label_func: A function of an image's path that returns its label.
        target_path: A folder with a mask for each image, in the same order of names.
        image_type: How names of images end.
        target_type: How names of masks end.
        backend: "pillow" or "spark"; both read alike.
    """
    if backend.lower() not in ("pillow", "spark"):
        raise InvalidInput(f"backend of read_images must be either spark or pillow; received {backend!r}.")
    files: list[Any] = _files(file_path, image_type)
    if target_path is not None:
        if label_func is not None:
            raise InvalidInput("label_func should be None when reading targets directly.")
        masks = _files(target_path, target_type)
        if len(masks) != len(files):
            raise InvalidInput(
                "number of target files and image files should be the same; received"
                f" {len(masks)} and {len(files)}."
            )
        files = list(zip(files, masks, strict=True))
    return XShards.from_shards(files).transform_shard(_Read(label_func))


def read_images_pil(file_path: str, *args: Any, **options: Any) -> XShards:
    return read_images(file_path, *args, **options)


read_images_spark = read_images_pil


@as_orca
def read_voc(
    file_path: str = "VOCdevkit",
    split_names: Sequence[tuple[Any, str]] | None = None,
    classes: Any = None,
    diff: bool = False,
    max_samples: int | None = None,
) -> XShards:
    """Images of Pascal VOC as shards of (image, boxes); see `VOCDatasets`.

    Args:
        file_path: The folder VOCdevkit.
        split_names: Pairs of a year and a list of images; None is (2009, "trainval").
        classes: Names of classes; None is the twenty of Pascal VOC.
        diff: Whether boxes say if they are difficult.
        max_samples: How many images at most.
    """
    images = VOCDatasets(file_path, split_names or [(2009, "trainval")], classes, diff)
    pairs = list(islice(images, max_samples))
    if not pairs:
        raise InvalidInput(f"the lists {split_names} of {file_path} name no images.")
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
