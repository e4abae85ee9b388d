"""Arrays as .npy and .npz files, and Python values as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from kindler.errors import ConfigError, DataError
from kindler.models.kind import Handler
from kindler.shelves.datasets import Handle, PartsHandler, part_name, parts_in, rechunk

Array = np.ndarray[Any, Any]
_JSON = "value.json"


class NumpyHandler(PartsHandler):
    """Arrays of any dtype but objects, and any shape; what is appended follows along the first axis."""

    kind: ClassVar[str] = "numpy"

    def can(self, obj: Any) -> bool:
        return isinstance(obj, np.ndarray | np.generic | Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        if isinstance(obj, Path):
            try:
                obj = np.load(obj, allow_pickle=False)
            except ValueError as exc:
                raise DataError(f"{obj} is not an array that can be read without unpickling: {exc}.") from exc
        array = np.asarray(obj)
        storable, foreign = _storable(array)
        with (folder / part_name(0, ".npy")).open("wb") as file:
            # To a file itself, numpy writes through C, which loses the end on a full disk without an error.
            np.save(SimpleNamespace(write=file.write), storable, allow_pickle=False)
        return {"rows": [len(array) if array.ndim else 0], "shape": array.shape, "foreign": foreign}

    def append_meta(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        before, after = list(old["shape"]), list(new["shape"])
        if not before or before[1:] != after[1:] or old["foreign"] != new["foreign"]:
            raise DataError(f"rows of shape {after[1:]} cannot be appended to an array of shape {before}.")
        return {**old, "rows": [*old["rows"], *new["rows"]], "shape": [before[0] + after[0], *before[1:]]}

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> _Arrays:
        def read(path: Path, mmap_mode: Any) -> list[Array]:
            return [_native(np.load(path, allow_pickle=False, mmap_mode=mmap_mode), meta["foreign"])]

        return _Arrays(parts_in(folder), meta, read, lambda arrays: arrays[0])


class ArraysHandler(PartsHandler):
    """Dicts and tuples of arrays, as `fit` takes them; what is appended follows along the first axes."""

    kind: ClassVar[str] = "arrays"

    def can(self, obj: Any) -> bool:
        if isinstance(obj, dict):
            return bool(obj) and all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in obj.items())
        return isinstance(obj, tuple) and bool(obj) and all(isinstance(v, np.ndarray) for v in obj)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        arrays = dict(obj) if isinstance(obj, dict) else {str(i): array for i, array in enumerate(obj)}
        storable = [_storable(array) for array in arrays.values()]
        members: dict[str, Any] = {f"a{i}": array for i, (array, _) in enumerate(storable)}
        np.savez(folder / part_name(0, ".npz"), **members)
        lengths = {array.shape[0] if array.ndim else None for array in arrays.values()}
        return {
            "names": list(arrays),
            "tuple": isinstance(obj, tuple),
            "shapes": [array.shape for array in arrays.values()],
            "foreign": [foreign for _, foreign in storable],
            "rows": [lengths.pop() if len(lengths) == 1 else None],
        }

    def append_meta(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        same = all(old[key] == new[key] for key in ("names", "tuple", "foreign"))
        rows = [list(shape[1:]) for shape in old["shapes"]] == [list(shape[1:]) for shape in new["shapes"]]
        if not same or not rows or None in (*old["rows"], *new["rows"]):
            raise DataError(
                f"arrays {new['names']} of the shapes {new['shapes']} cannot be appended to the arrays"
                f" {old['names']}"
                f" of the shapes {old['shapes']}."
            )
        shapes = [[a[0] + b[0], *a[1:]] for a, b in zip(old["shapes"], new["shapes"], strict=True)]
        return {**old, "shapes": shapes, "rows": [*old["rows"], *new["rows"]]}

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> _Arrays:
        def read(path: Path, _: Any) -> list[Array]:
            with np.load(path, allow_pickle=False) as loaded:
                return [_native(loaded[f"a{i}"], foreign) for i, foreign in enumerate(meta["foreign"])]

        def form(arrays: Sequence[Array]) -> Any:
            return tuple(arrays) if meta["tuple"] else dict(zip(meta["names"], arrays, strict=True))

        return _Arrays(parts_in(folder), meta, read, form)


class JsonHandler(Handler):
    """None, booleans, numbers, strings, and lists and dicts of them. Tuples come back as lists."""

    kind: ClassVar[str] = "json"

    def can(self, obj: Any) -> bool:
        return obj is None or isinstance(obj, bool | int | float | str | list | tuple | dict | Path)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        if isinstance(obj, Path):
            try:
                obj = json.loads(obj.read_text(encoding="utf-8"))
            except ValueError as exc:
                raise DataError(f"{obj} is not valid JSON: {exc}.") from exc
        _check_json(obj, "the value")
        (folder / _JSON).write_text(json.dumps(obj), encoding="utf-8")
        return {}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        return json.loads((folder / _JSON).read_text(encoding="utf-8"))


class _Arrays(Handle):
    """Parts of one or several arrays: `read` loads those of a part, with "r" as they are used; `form` makes
    of them what was put."""

    def __init__(
        self,
        files: Sequence[Path],
        meta: Mapping[str, Any],
        read: Callable[[Path, Any], list[Array]],
        form: Callable[[Sequence[Array]], Any],
    ) -> None:
        super().__init__(files)
        self._meta, self._read, self._form = meta, read, form

    def __len__(self) -> int:
        if None in self._meta["rows"]:
            raise ConfigError(f"arrays of the shapes {self._meta['shapes']} have no common number of rows.")
        return sum(self._meta["rows"])

    @property
    def value(self) -> Any:
        parts = [self._read(path, None) for path in self.files]
        return self._form(parts[0] if len(parts) == 1 else _concatenated(parts))

    def _chunks(self, size: int) -> Iterator[Any]:
        len(self)  # raises if they cannot be cut
        parts = (self._read(path, "r") for path in self.files)
        for chunk in rechunk(
            parts, size, lambda part: len(part[0]), lambda part, i, j: [a[i:j] for a in part]
        ):
            yield self._form(_concatenated(chunk))


def _concatenated(parts: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _storable(array: Array) -> tuple[Array, str | None]:
    """The array as a file can have it, and the name of its dtype if that is none of numpy's own."""
    if array.dtype.hasobject:
        raise DataError(
            f"an array of {array.dtype} holds Python objects, which an array file cannot store.\n"
            "Hint: give it a dtype, or store it as a table or as a list."
        )
    name = array.dtype.name
    # Number types that others add to numpy (bfloat16) would come back as raw bytes.
    if array.dtype.kind == "V" and array.dtype.fields is None and not name.startswith("void"):
        return array.view(np.dtype(f"u{array.dtype.itemsize}")), name
    return array, None


def _native(array: Array, foreign: str | None) -> Array:
    """The array that `_storable` got."""
    if foreign is None:
        return array
    import ml_dtypes

    return array.view(np.dtype(getattr(ml_dtypes, foreign)))


def _check_json(value: Any, where: str) -> None:
    """JSON would silently turn keys into strings, and fail in the middle of a file."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for i, inside in enumerate(value):
            _check_json(inside, f"{where}[{i}]")
    elif isinstance(value, dict):
        for key, inside in value.items():
            if not isinstance(key, str):
                raise DataError(f"{where} has the key {key!r}; keys in JSON must be strings.")
            _check_json(inside, f"{where}[{key!r}]")
    else:
        raise DataError(
            f"{where} is a {type(value).__qualname__}, which JSON cannot represent.\n"
            "Hint: store arrays and tables as separate datasets; kind='pickle' with trusted=True stores any"
            " object."
        )
