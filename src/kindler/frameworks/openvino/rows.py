"""Calls a compiled model with any number of rows, whatever number it takes at a time.

If each row is as large as a whole input (such as a batch of images), the model is called once per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError, DataError
from kindler.frameworks.openvino.graph import cause, names_of, shape_of


class RowCaller:
    """Not thread-safe."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = model, name
        self._request = model.create_infer_request()
        self.names = names_of(model.inputs, "input")
        self._aliases = [set(port.get_names()) for port in model.inputs]
        self._shapes = [shape_of(port) for port in model.inputs]
        self._dtypes = [np.dtype(port.get_element_type().to_dtype()) for port in model.inputs]
        fixed = {shape[0] for shape in self._shapes if shape and shape[0] is not None}
        self._size: int | None = fixed.pop() if len(fixed) == 1 else None
        self._per_row: bool | None = None

    def arranged(self, columns: Sequence[str], arrays: Sequence[Array]) -> list[Array]:
        """In input order if the columns have the inputs' names."""
        if len(arrays) != len(self.names):
            raise ConfigError(
                f"{self._name} takes {len(self.names)} inputs ({', '.join(self.names)}), and the data has"
                f" {len(arrays)} ({', '.join(columns)}).\n"
                "Hint: feature_cols=[...] names one column for each input, in the model's order."
            )
        places = [[i for i, name in enumerate(columns) if name in aliases] for aliases in self._aliases]
        if all(len(place) == 1 for place in places):
            return [arrays[place[0]] for place in places]
        return list(arrays)

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        inputs = [self._cast(array, i) for i, array in enumerate(arrays)]
        rows = len(inputs[0])
        if self._is_whole(inputs):
            found = [self.run([array[row] for array in inputs]) for row in range(rows)]
            return [np.stack(parts) for parts in zip(*found, strict=True)]
        inputs = [self._rowwise(array, i) for i, array in enumerate(inputs)]
        if self._size is None or rows == self._size:
            return self.run(inputs)
        return self._in_groups(inputs, rows, self._size)

    def _in_groups(self, inputs: Sequence[Array], rows: int, size: int) -> list[Array]:
        """The last group repeats its last row."""
        whole = rows - rows % size
        groups = [[array[i : i + size] for array in inputs] for i in range(0, whole, size)]
        if whole < rows:
            groups.append([_filled(array[whole:], size) for array in inputs])
        found = [self.run(group) for group in groups]
        for place, part in enumerate(found[0]):
            if part.ndim == 0 or len(part) != size:
                raise DataError(
                    f"{self._name} takes {size} rows at a time, and its output {place} has the shape"
                    f" {list(part.shape)}, which does not have one row for each of them."
                )
        if whole < rows and not self._fills(inputs, size):
            raise DataError(
                f"{self._name} takes {size} rows at a time, and its result for one depends on the others, so "
                "a smaller batch cannot be padded.\n"
                f"Hint: pass a multiple of {size} rows, and a batch_size that is one."
            )
        return [np.concatenate(parts)[:rows] for parts in zip(*found, strict=True)]

    def _fills(self, inputs: Sequence[Array], size: int) -> bool:
        """Whether rows that fill a group leave the results of the others alone; tried once."""
        if self._per_row is None:
            self._per_row = is_per_row(self.run, [_with_another(array[:1]) for array in inputs], size)
        return self._per_row

    def _is_whole(self, inputs: Sequence[Array]) -> bool:
        return all(
            shape is not None and array.ndim == len(shape) + 1 and _fits(array.shape[1:], shape)
            for array, shape in zip(inputs, self._shapes, strict=True)
        )

    def _rowwise(self, array: Array, place: int) -> Array:
        shape = self._shapes[place]
        if shape is None:
            return array
        if array.ndim == 1 and len(shape) == 2 and shape[1] in (1, None):
            array = array[:, None]  # numbers for a model that takes rows of one number
        if array.ndim != len(shape) or not _fits(array.shape[1:], shape[1:]):
            wanted = ", ".join(["rows", *("any" if n is None else str(n) for n in shape[1:])])
            raise DataError(
                f"has the shape {list(array.shape)}; {self._name} takes [{wanted}].\n"
                "Hint: columns=Columns(shapes={column: (...)}) gives flat rows their shape.",
                column=self.names[place],
            )
        return array

    def _cast(self, array: Array, place: int) -> Array:
        target = self._dtypes[place]
        if array.dtype == target:
            return np.ascontiguousarray(array)
        if not _castable(array, target):
            raise DataError(
                f"is {array.dtype.name}, and {self._name} takes {target.name}.", column=self.names[place]
            )
        with np.errstate(over="ignore"):  # beyond the largest float is infinity, as everywhere
            return np.ascontiguousarray(array.astype(target))

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        try:
            found = self._request.infer(dict(enumerate(inputs)), share_inputs=True, share_outputs=True)
        except RuntimeError as exc:
            shapes = ", ".join(str(list(array.shape)) for array in inputs)
            raise DataError(f"{self._name} cannot compute inputs of shape {shapes}: {cause(exc)}") from exc
        return [np.array(found[i]) for i in range(len(self._model.outputs))]


def _fits(sizes: Sequence[int], declared: Sequence[int | None]) -> bool:
    return len(sizes) == len(declared) and all(
        want is None or want == have for have, want in zip(sizes, declared, strict=True)
    )


def _castable(array: Array, target: np.dtype[Any]) -> bool:
    if array.dtype.kind in "iu" and target.kind in "iu":
        info = np.iinfo(target)
        return not array.size or bool(array.min() >= info.min and array.max() <= info.max)
    if array.dtype.kind == "b" and target.kind in "iuf":
        return True
    return bool(np.can_cast(array.dtype, target, casting="same_kind"))


def _filled(array: Array, size: int) -> Array:
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])


def _with_another(row: Array) -> Array:
    """The other is reversed, which keeps indices valid, and doubled if floating point."""
    turned = row.reshape(1, -1)[:, ::-1].reshape(row.shape)
    return np.concatenate([row, turned * 2 if row.dtype.kind == "f" else turned])


def is_per_row(run: Callable[[list[Array]], list[Array]], rows: Sequence[Array], size: int = 1) -> bool:
    """Whether each of two rows gives the same beside the other as without it, `size` rows at a time."""
    alone = [run([_filled(array[i : i + 1], size) for array in rows]) for i in range(2)]
    together = run([_filled(array, max(size, 2)) for array in rows])
    for place, both in enumerate(together):
        single = [found[place] for found in alone]
        if both.ndim == 0 or len(both) != max(size, 2) or any(len(part) != size for part in single):
            return False
        largest = float(np.max(np.abs(both), initial=0.0)) if both.dtype.kind in "fiu" else 0.0
        joined = np.stack([part[0] for part in single])
        # Calls of different sizes differ in their last bits.
        if not np.allclose(joined, both[:2], rtol=1e-3, atol=1e-5 * largest, equal_nan=True):
            return False
    return True
