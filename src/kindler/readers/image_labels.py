"""Which image has which label: by its folder, a dict, or a table. Functions are left to the workers."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindler.data.paths import Choice, expand, file_system, is_remote, local_path
from kindler.data.shards import frames
from kindler.errors import ConfigError, DataError


@dataclass(frozen=True)
class Labelled:
    """Files, and the label of each, if it is known."""

    files: list[str]
    labels: list[int] | None


@dataclass(frozen=True)
class _Image:
    """A file, its path below the folder that was given, and the name of its class folder."""

    file: str
    below: str
    group: str | None


def labelled(places: Sequence[str], labels: Any, path_col: str, label_col: str, choice: Choice) -> Labelled:
    """Find images and their labels; see `read_images` for the arguments."""
    images = [image for path in places for image in _images(path, choice)]
    if not images:
        raise ConfigError(f"no image in {list(places)}.")
    files = [image.file for image in images]
    if callable(labels):
        return Labelled(files, None)
    if labels is None:
        return Labelled(files, _by_folder(images))
    if isinstance(labels, Mapping):
        return Labelled(files, [_by_name(labels, image) for image in images])
    if isinstance(labels, str | os.PathLike):
        labels = _read_table(labels)
    if not (hasattr(labels, "columns") and hasattr(labels, "iloc")):
        raise ConfigError(
            f"labels={labels!r}: must be a dict of folder names, a function, a DataFrame or a CSV file."
        )
    return Labelled(files, _by_table(labels, images, path_col, label_col))


def as_label(value: Any, file: str) -> int:
    """A label as a whole number."""
    if isinstance(value, bool | int | np.integer | np.bool_):
        return int(value)
    raise DataError(
        f"the label of {file} is {value!r}; expected a whole number.\nHint: number the classes first."
    )


def _images(path: str, choice: Choice) -> list[_Image]:
    files = expand(path, choice)
    root = (file_system(path)[1] if is_remote(path) else local_path(path)).rstrip("/") + "/"
    images = []
    for file in files:
        place = file_system(file)[1] if is_remote(file) else file
        inside = place.startswith(root)
        below = place[len(root) :] if inside else posixpath.basename(place)
        group = below.split("/")[0] if inside and "/" in below else None
        images.append(_Image(file, below, group))
    return images


def _by_folder(images: Sequence[_Image]) -> list[int] | None:
    groups = {image.group for image in images}
    if groups == {None}:
        return None
    if None in groups:
        odd = next(image.file for image in images if image.group is None)
        raise ConfigError(
            f"{odd} is not in a class folder, but other images are.\n"
            "Hint: move it, name the folders with a glob, or pass labels=..."
        )
    number = {group: i for i, group in enumerate(sorted(group for group in groups if group is not None))}
    return [number[image.group] for image in images if image.group is not None]


def _by_name(labels: Mapping[str, int], image: _Image) -> int:
    group = image.group or posixpath.basename(posixpath.dirname(image.file))
    if group not in labels:
        raise ConfigError(
            f"labels has no entry for the folder {group!r} of {image.file}; it has {list(labels)}."
        )
    return as_label(labels[group], image.file)


def _by_table(table: Any, images: Sequence[_Image], path_col: str, label_col: str) -> list[int]:
    frames.check_columns([path_col, label_col], list(table.columns), "labels")
    values = table[label_col].tolist()
    if all(isinstance(value, str) for value in values):
        number = {name: i for i, name in enumerate(sorted(set(values)))}
        values = [number[value] for value in values]
    known = dict(zip(map(str, table[path_col]), values, strict=True))
    numbers = []
    for image in images:
        names = (image.below, image.file, posixpath.basename(image.file))
        name = next((name for name in names if name in known), None)
        if name is None:
            raise ConfigError(f"labels has no row for {image.file}: no {path_col!r} is {image.below!r}.")
        numbers.append(as_label(known[name], image.file))
    return numbers


def _read_table(path: str | os.PathLike[str]) -> Any:
    import pandas as pd

    try:
        return pd.read_csv(path)
    except FileNotFoundError:
        raise ConfigError(f"labels={os.fspath(path)!r} does not exist.") from None
    except ValueError as exc:
        raise DataError(f"{os.fspath(path)}: {exc}") from exc
