"""Images of Pascal VOC and the boxes of what they show."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np

from kindler.compat.zoo.orca.data.image.utils import picture
from kindler.compat.zoo.orca.errors import InvalidInput

__all__ = ["CLASSES", "VOCDatasets"]

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


class VOCDatasets:
    """Paths of images with an array of boxes each: x1, y1, x2, y2 as shares of the image, and the class.

    `dataset[i]` is the i-th image itself with its boxes.

    Args:
        root: The folder VOCdevkit.
        splits_names: Pairs of a year and a list of images, such as (2007, "trainval").
        classes: Names of classes, or a dict with their numbers; others are left out with a warning.
        difficult: Whether boxes have a sixth number, 1 if the annotation says that it is difficult.
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
        raise InvalidInput(f"there is no list of images {file}.")
    with open(file, encoding="utf-8") as lines:
        return [(folder, line.split()[0]) for line in lines if line.strip()]


def _image(item: tuple[str, str]) -> str:
    return os.path.join(item[0], "JPEGImages", f"{item[1]}.jpg")
