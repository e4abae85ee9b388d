"""Images as shards of arrays, decoded by Pillow in the workers."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kindler.data.columns import Array
from kindler.data.paths import absolute, expand, file_system, hidden, is_remote, local_path
from kindler.data.shards import frames
from kindler.data.shards.codec import Packed, leaves, pack, unpack
from kindler.data.shards.pytree import even_bounds
from kindler.errors import ConfigError, DataError, MissingExtraError
from kindler.readers.files import Paths, listed, on_engine, opened
from kindler.xshards import XShards, backends

if TYPE_CHECKING:
    import pandas as pd

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MODES = ("RGB", "L", "RGBA")
_IMAGES_A_SHARD = 1024  # 150 MB at 224 x 224 pixels


def read_images(
    file_path: Paths,
    labels: Mapping[str, int] | Callable[[str], int] | pd.DataFrame | str | os.PathLike[str] | None = None,
    *,
    path_col: str = "path",
    label_col: str = "label",
    size: tuple[int, int] | None = None,
    mode: str = "RGB",
    paths: bool = False,
    engine: str = "auto",
    num_shards: int | None = None,
) -> XShards:
    """Read images into shards `{"x": uint8 (rows, height, width, channels), "y": int64 (rows,)}`.

    Args:
        file_path: A folder, a file, a glob, a URI, or a list of them. Folders are searched recursively for
            files with image extensions.
        labels: The source of `y`. None: for a folder of class folders, the index of the image's folder in
            sorted order; otherwise there is no `y`. A dict: folder name to label. A function: path to
            label, called in the workers. A DataFrame, or the path of a CSV file: one row per image, with
            its path relative to the folder, its full path, or just its file name. String labels are
            numbered in sorted order.
        path_col: The column of paths in such a table.
        label_col: The column of labels in such a table.
        size: (height, width) to scale images to, bilinearly. Default: unchanged; all must have one size.
        mode: "RGB", "L" (grey, one channel) or "RGBA".
        paths: Whether to include the paths, as strings under "path".
        engine: "local", "spark", or "auto": Spark if a session is running, else local. Every worker must find
            the files under the same path, and have Pillow (the extra `images`).
        num_shards: The number of shards. Default: one per core, with at most 1024 images each.

    Raises:
        ConfigError: No image was found, or an image has no label.
        DataError: A file is not an image, has 16 bits per channel, or differs in size from the others.
            The message names it.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r}: must be one of {', '.join(_MODES)}.")
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise ConfigError(f"size={size!r}: must be (height, width).")
    where = backends.choose(engine)
    source = absolute(labels) if isinstance(labels, str | os.PathLike) else labels
    files, numbers = on_engine(where, partial(_labelled, listed(file_path), source, path_col, label_col))
    if num_shards is None:
        num_shards = min(len(files), max(backends.slots(where), -(-len(files) // _IMAGES_A_SHARD)))
    bounds = even_bounds(len(files), num_shards)
    if num_shards > len(files):
        raise ConfigError(f"num_shards={num_shards}: there are only {len(files)} images.")
    parts = [(files[a:b], None if numbers is None else numbers[a:b]) for a, b in bounds]
    path_width = max(map(len, files)) if paths else None
    decode = partial(_decode, size, mode, labels if callable(labels) else None, path_width)
    shards = backends.put(map(pack, parts), where).mapped(decode, by_user=True)
    shapes = [
        next(shape for path, _, _, shape in leaves(info.schema) if path == ("x",)) for info in shards.infos
    ]
    for shape, part in zip(shapes, parts, strict=True):
        if shape != shapes[0]:
            raise _other_size(part[0][0], shape, parts[0][0][0], shapes[0])
    return XShards(shards)


def _decode(
    size: tuple[int, int] | None,
    mode: str,
    label: Callable[[str], Any] | None,
    path_width: int | None,
    number: int,
    packed: Packed,
) -> Packed:
    """Runs in a worker. `path_width` is the longest path's: one width for all shards gives one dtype."""
    files, labels = unpack(packed)
    first = _decoded(files[0], size, mode)
    pixels = np.empty((len(files), *first.shape), np.uint8)
    pixels[0] = first
    for i, file in enumerate(files[1:], 1):
        image = _decoded(file, size, mode)
        if image.shape != first.shape:
            raise _other_size(file, image.shape, files[0], first.shape)
        pixels[i] = image
    arrays: dict[str, Array] = {"x": pixels}
    if label is not None:
        labels = [_as_label(label(file), file) for file in files]
    if labels is not None:
        arrays["y"] = np.array(labels, np.int64)
    if path_width is not None:
        arrays["path"] = np.array(files, f"<U{path_width}")
    return pack(arrays)


def _decoded(file: str, size: tuple[int, int] | None, mode: str) -> Array:
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="read_images", package="Pillow", extra="images") from exc
    try:
        with opened(file) as raw, Image.open(raw) as image:
            deep = image.mode.startswith(("I", "F"))
            converted = image if deep else image.convert(mode)
            if size is not None and not deep:
                converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            pixels = np.asarray(converted)
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as exc:
        raise DataError(f"{file} cannot be read as an image: {exc}") from exc
    if deep:
        raise DataError(
            f"{file} has more than 8 bits per channel (mode {image.mode!r}), which uint8 cannot hold.\n"
            "Hint: scale its values to 0-255 first."
        )
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _other_size(file: str, shape: Sequence[int], first: str, first_shape: Sequence[int]) -> DataError:
    return DataError(
        f"{file} has {shape[0]} x {shape[1]} pixels, where {first} has {first_shape[0]} x {first_shape[1]}.\n"
        "Hint: size=(height, width) scales all images to one size."
    )


def _image_files(path: str, inside: Sequence[tuple[str, ...]]) -> Callable[[tuple[str, ...]], bool]:
    return lambda parts: parts[-1].lower().endswith(_ENDINGS) and not any(map(hidden, parts))


@dataclass(frozen=True)
class _Image:
    file: str
    below: str
    group: str | None


def _labelled(
    places: Sequence[str], labels: Any, path_col: str, label_col: str
) -> tuple[list[str], list[int] | None]:
    images = [image for path in places for image in _images(path)]
    if not images:
        raise ConfigError(f"no image in {list(places)}.")
    files = [image.file for image in images]
    if callable(labels):
        return files, None
    if labels is None:
        return files, _by_folder(images)
    if isinstance(labels, Mapping):
        return files, [_by_name(labels, image) for image in images]
    if isinstance(labels, str):
        labels = _read_table(labels)
    if not (hasattr(labels, "columns") and hasattr(labels, "iloc")):
        raise ConfigError(
            f"labels={labels!r}: must be a dict of folder names, a function, a DataFrame or a CSV file."
        )
    return files, _by_table(labels, images, path_col, label_col)


def _as_label(value: Any, file: str) -> int:
    if isinstance(value, bool | int | np.integer | np.bool_):
        return int(value)
    raise DataError(
        f"the label of {file} is {value!r}; expected a whole number.\nHint: number the classes first."
    )


def _images(path: str) -> list[_Image]:
    root = (file_system(path)[1] if is_remote(path) else local_path(path)).rstrip("/") + "/"
    images = []
    for file in expand(path, _image_files):
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
    return _as_label(labels[group], image.file)


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
        numbers.append(_as_label(known[name], image.file))
    return numbers


def _read_table(path: str) -> Any:
    import pandas as pd

    try:
        return pd.read_csv(path)
    except FileNotFoundError:
        raise ConfigError(f"labels={path!r} does not exist.") from None
    except ValueError as exc:
        raise DataError(f"{path}: {exc}") from exc
