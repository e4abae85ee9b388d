"""Several arrays as one dataset: a dict or a tuple of them, as `fit` takes them, in .npz files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kindler.errors import ConfigError, DataError
from kindler.shelves.datasets.appendable import Parts, part_name, parts_in
from kindler.shelves.datasets.numpy import Array, native, stored


class ArraysHandler(Parts):
    """Dicts and tuples of arrays. What is appended follows along the first axis of each."""

    kind: ClassVar[str] = "arrays"

    def can(self, obj: Any) -> bool:
        if isinstance(obj, dict):
            return bool(obj) and all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in obj.items())
        return isinstance(obj, tuple) and bool(obj) and all(isinstance(v, np.ndarray) for v in obj)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        arrays = dict(obj) if isinstance(obj, dict) else {str(i): array for i, array in enumerate(obj)}
        forms = [stored(array) for array in arrays.values()]
        members: dict[str, Any] = {f"a{i}": form for i, (form, _) in enumerate(forms)}
        np.savez(folder / part_name(0, ".npz"), **members)
        lengths = {array.shape[0] if array.ndim else None for array in arrays.values()}
        return {
            "names": list(arrays),
            "tuple": isinstance(obj, tuple),
            "shapes": [array.shape for array in arrays.values()],
            "foreign": [foreign for _, foreign in forms],
            "rows": [lengths.pop() if len(lengths) == 1 else None],
        }

    def joined(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        same = all(old[key] == new[key] for key in ("names", "tuple", "foreign"))
        rows = [list(shape[1:]) for shape in old["shapes"]] == [list(shape[1:]) for shape in new["shapes"]]
        if not same or not rows or None in (*old["rows"], *new["rows"]):
            raise DataError(
                f"arrays {new['names']} of the shapes {new['shapes']} cannot follow the arrays {old['names']}"
                f" of the shapes {old['shapes']}."
            )
        shapes = [[a[0] + b[0], *a[1:]] for a, b in zip(old["shapes"], new["shapes"], strict=True)]
        return {**old, "shapes": shapes, "rows": [*old["rows"], *new["rows"]]}

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> _Arrays:
        return _Arrays(parts_in(folder), meta)


class _Arrays:
    def __init__(self, files: Sequence[Path], meta: Mapping[str, Any]) -> None:
        self.files = files
        self._meta = meta

    def __len__(self) -> int:
        if None in self._meta["rows"]:
            raise ConfigError(f"arrays of the shapes {self._meta['shapes']} have no number of rows.")
        return sum(self._meta["rows"])

    @property
    def value(self) -> Any:
        parts = [self._read(path) for path in self.files]
        return self._formed(parts[0] if len(parts) == 1 else _joined(parts))

    def chunks(self, size: int) -> Iterator[Any]:
        if size < 1:
            raise ConfigError(f"chunksize={size}: must be at least 1.")
        len(self)  # says why it cannot be cut
        held: list[list[Array]] = []
        count = 0
        for path in self.files:
            arrays, at = self._read(path), 0
            while at < len(arrays[0]):
                piece = [array[at : at + size - count] for array in arrays]
                held, at, count = [*held, piece], at + len(piece[0]), count + len(piece[0])
                if count == size:
                    yield self._formed(_joined(held))
                    held, count = [], 0
        if held:
            yield self._formed(_joined(held))

    def _read(self, path: Path) -> list[Array]:
        with np.load(path, allow_pickle=False) as loaded:
            return [native(loaded[f"a{i}"], foreign) for i, foreign in enumerate(self._meta["foreign"])]

    def _formed(self, arrays: Sequence[Array]) -> Any:
        if self._meta["tuple"]:
            return tuple(arrays)
        return dict(zip(self._meta["names"], arrays, strict=True))


def _joined(parts: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.concatenate(column) for column in zip(*parts, strict=True)]
