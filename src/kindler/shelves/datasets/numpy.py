"""numpy arrays as .npy files: any dtype but objects, any shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kindler.errors import ConfigError, DataError
from kindler.shelves.datasets.appendable import Parts, part_name, parts_in

Array = np.ndarray[Any, Any]


class NumpyHandler(Parts):
    """Arrays; what is appended follows along the first axis."""

    kind: ClassVar[str] = "numpy"

    def can(self, obj: Any) -> bool:
        return isinstance(obj, np.ndarray | np.generic | Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        array = np.asarray(_loaded(obj) if isinstance(obj, Path) else obj)
        form, foreign = stored(array)
        np.save(folder / part_name(0, ".npy"), form, allow_pickle=False)
        return {"rows": [len(array) if array.ndim else 0], "shape": array.shape, "foreign": foreign}

    def joined(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        before, after = list(old["shape"]), list(new["shape"])
        if not before or before[1:] != after[1:] or old["foreign"] != new["foreign"]:
            raise DataError(f"rows of shape {after[1:]} cannot follow an array of shape {before}.")
        return {**old, "rows": [*old["rows"], *new["rows"]], "shape": [before[0] + after[0], *before[1:]]}

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> _Arrays:
        return _Arrays(parts_in(folder), meta)


class _Arrays:
    def __init__(self, files: Sequence[Path], meta: Mapping[str, Any]) -> None:
        self.files = files
        self._meta = meta

    def __len__(self) -> int:
        return sum(self._meta["rows"])

    @property
    def value(self) -> Any:
        parts = [native(np.load(path, allow_pickle=False), self._meta["foreign"]) for path in self.files]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def chunks(self, size: int) -> Iterator[Array]:
        if size < 1:
            raise ConfigError(f"chunksize={size}: must be at least 1.")
        held: list[Array] = []
        for path in self.files:
            mapped = native(np.load(path, allow_pickle=False, mmap_mode="r"), self._meta["foreign"])
            at = 0
            while at < len(mapped):
                piece = np.array(mapped[at : at + size - sum(map(len, held))])
                held, at = [*held, piece], at + len(piece)
                if sum(map(len, held)) == size:
                    yield np.concatenate(held)
                    held = []
        if held:
            yield np.concatenate(held)


def stored(array: Array) -> tuple[Array, str | None]:
    """The array as a file can have it, and the name of its dtype if that is none of numpy's own.

    Raises:
        DataError: It holds Python objects.
    """
    if array.dtype.hasobject:
        raise DataError(
            f"an array of {array.dtype} holds Python objects, which a file of numbers cannot.\n"
            "Hint: give it a dtype, or store it as a table or as a list."
        )
    name = array.dtype.name
    # Number types that others add to numpy (bfloat16) would come back as raw bytes.
    if array.dtype.kind == "V" and array.dtype.fields is None and not name.startswith("void"):
        return array.view(np.dtype(f"u{array.dtype.itemsize}")), name
    return array, None


def native(array: Array, foreign: str | None) -> Array:
    """The array that `stored` was given."""
    if foreign is None:
        return array
    import ml_dtypes

    return array.view(np.dtype(getattr(ml_dtypes, foreign)))


def _loaded(path: Path) -> Array:
    try:
        array: Array = np.load(path, allow_pickle=False)
    except ValueError as exc:
        raise DataError(f"{path} is not an array that can be read without a pickle: {exc}.") from exc
    return array
