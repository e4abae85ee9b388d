"""Which columns feed a model, and the one set of rules that turns their values into numpy arrays.

Every way into Kindler (Parquet, Spark's Arrow batches, arrays, pandas) goes through `to_numpy` or
`conform`, so that a dtype, a null, a NaN or a ragged row is treated the same everywhere.

    in Arrow or numpy                              out, unless the column asks for a dtype
    int8 ... uint64                                features: the same; labels: int64
    float16, float32, float64, decimal             float32
    bool                                           bool
    date / timestamp                               int64: days / microseconds since 1970
    list, large_list, fixed_size_list, nested      (rows, d[, e, ...]) of the above
    Spark ML vector, dense or sparse               float32, (rows, size)
    binary                                         needs a dtype: its bytes are read as that
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from pyarrow import types

from kindler.errors import DataError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Where: TypeAlias = Callable[[int], "int | str"]

_WORKS = (
    "Columns of integers, floats, decimals, booleans, dates, timestamps, lists of those, Spark ML vectors"
    " and (with a dtype) binary can be used."
)
TEXT = (types.is_string, types.is_large_string)
BINARY = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
_SCALARS = (
    types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_date,
    types.is_timestamp, types.is_null,
)  # fmt: skip
_VECTOR_FIELDS = {"type", "size", "indices", "values"}
_FILE_FIELDS = {"bytes", "path"}  # how Hugging Face datasets hold images and sounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """`dtype` and `shape` are None unless requested; `stored` is the dtype of binary values' bytes."""

    name: str
    role: Literal["feature", "label"]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    allow_nan: bool = False
    stored: str | None = None
    ragged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnPlan:
    """In the order the model and the loss take them; `others` are read but passed to neither."""

    features: tuple[Column, ...]
    labels: tuple[Column, ...]
    stack_features: bool = False
    others: tuple[Column, ...] = ()

    @property
    def all(self) -> tuple[Column, ...]:
        """Every column once; as the feature if it is both feature and label."""
        columns: dict[str, Column] = {}
        for column in (*self.features, *self.labels, *self.others):
            columns.setdefault(column.name, column)
        return tuple(columns.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.all)

    def changed(self, change: Callable[[Column], Column]) -> ColumnPlan:
        features, labels = tuple(map(change, self.features)), tuple(map(change, self.labels))
        return replace(self, features=features, labels=labels, others=tuple(map(change, self.others)))


def to_numpy(array: pa.Array | pa.ChunkedArray, column: Column, *, where: Where) -> Array:
    """One C-contiguous array of shape (rows, *row shape); a view of Arrow's memory if possible. `where`
    names the row in DataErrors about nulls, NaNs, ragged rows and values that do not fit."""
    if isinstance(array, pa.ChunkedArray):
        return _joined(array, column, where)
    return conform(_Reader(column, where).read(array), column, where=where)


def conform(values: Array, column: Column, *, where: Where) -> Array:
    values = _plain(values, column)
    target = _target(values.dtype, column)
    if target.kind != "f":
        _refuse_nan(values, column, where)
    values = _cast(values, target, column, where)
    _refuse_nan(values, column, where)
    return np.ascontiguousarray(_shaped(values, column))


def complaint(arrow_type: pa.DataType, *, dtype: str | None = None) -> str | None:
    kind = _value_type(arrow_type)
    if is_list(kind):
        return _unusable(kind) if is_any(kind.value_type, BINARY) else complaint(kind.value_type, dtype=dtype)
    if is_any(kind, BINARY):
        return None if dtype else _NEEDS_DTYPE
    return None if is_any(kind, _SCALARS) or _is_vector(kind) else _unusable(kind)


def ragged_type(arrow_type: pa.DataType, column: Column, *, text_only: bool) -> bool:
    """Whether rows of this type may differ in length. Bytes with a dtype and lists with a shape are even.
    With `text_only`, only text and lists of text count."""
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        return False
    kind = _value_type(arrow_type)
    lists = types.is_list(kind) or types.is_large_list(kind)
    if is_any(kind.value_type if lists else kind, TEXT):
        return True
    if lists:
        return not text_only and column.shape is None and complaint(kind.value_type) is None
    return not text_only and is_any(kind, BINARY) and column.dtype is None


def _value_type(kind: pa.DataType) -> pa.DataType:
    """What extension types are stored as, and what dictionaries hold."""
    if isinstance(kind, pa.BaseExtensionType):
        return _value_type(kind.storage_type)
    return _value_type(kind.value_type) if types.is_dictionary(kind) else kind


_NEEDS_DTYPE = (
    "binary values need a dtype that says how to read their bytes.\n"
    "Hint: columns=Columns(dtypes={'<column>': 'uint8'}), with shapes={'<column>': (28, 28)} for the shape of"
    " a row; or decode them in the workers with a transform, such as kindler.data.images for PNG and JPEG."
)


def _unusable(arrow_type: pa.DataType) -> str:
    hint = ""
    if is_any(arrow_type, TEXT):
        hint = (
            "Hint: turn strings into numbers first, for example with kindler.features.StringIndexer, or in"
            " the workers with a transform: Prepare(transform=...)."
        )
    elif types.is_struct(arrow_type) and {field.name for field in arrow_type} == _FILE_FIELDS:
        hint = (
            "Hint: decode them first; for images of a Hugging Face dataset:"
            " data.map(lambda row: {'pixels': numpy.asarray(row['image'])}, remove_columns='image')."
        )
    return f"values of type {arrow_type} cannot feed a model. {_WORKS}\n{hint}".rstrip()


def is_list(arrow_type: pa.DataType) -> bool:
    return is_any(arrow_type, (types.is_list, types.is_large_list, types.is_fixed_size_list))


def is_any(arrow_type: pa.DataType, kinds: Sequence[Callable[[pa.DataType], bool]]) -> bool:
    return any(is_kind(arrow_type) for is_kind in kinds)


def _is_vector(arrow_type: pa.DataType) -> bool:
    if not types.is_struct(arrow_type) or {field.name for field in arrow_type} != _VECTOR_FIELDS:
        return False
    return all(types.is_list(arrow_type.field(name).type) for name in ("indices", "values"))


def _joined(array: pa.ChunkedArray, column: Column, where: Where) -> Array:
    """Converts chunk by chunk: joined lists can exceed 32-bit offsets."""
    parts: list[Array] = []
    for chunk, row in chunks(array, where):
        part = to_numpy(chunk, column, where=row)
        if parts and part.shape[1:] != parts[0].shape[1:]:
            raise DataError(
                f"has shape {part.shape[1:]} where earlier rows have {parts[0].shape[1:]}.",
                column=column.name,
                row=row(0),
            )
        parts.append(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def chunks(array: pa.ChunkedArray, where: Where) -> Iterator[tuple[pa.Array, Where]]:
    """Each chunk with rows, and the names of its rows; an empty one if there are none."""
    start = 0
    for chunk in [c for c in array.chunks if len(c)] or [pa.array([], type=array.type)]:
        yield chunk, lambda i, start=start: where(start + i)  # type: ignore[misc]
        start += len(chunk)


def refuse_nulls(
    array: pa.Array,
    column: Column,
    where: Where,
    what: str = "is null",
    row_of: Callable[[int], int] | None = None,
) -> None:
    """`row_of` is the row of each entry of `array`, if it has other than one for each."""
    if array.null_count:
        missing = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
        problem = f"{what}; missing values are not allowed.\nHint: fill or drop such rows first."
        rows = missing if row_of is None else [row_of(place) for place in missing]
        raise DataError(problem, column=column.name, row=where(rows[0]), positions=rows)


def numbers(array: pa.Array) -> Array:
    """Avoids pyarrow's `to_numpy` and `to_pandas_dtype`: importing pandas takes a worker 0.25 s."""
    kind = array.type
    if not (types.is_integer(kind) or types.is_floating(kind)) or not len(array) or array.null_count:
        converted: Array = array.to_numpy(zero_copy_only=False)
        return converted
    size = kind.bit_width // 8
    dtype = f"{'f' if types.is_floating(kind) else 'u' if types.is_unsigned_integer(kind) else 'i'}{size}"
    values: Array = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * size)
    values.flags.writeable = False
    return values


class _Reader:
    """Before the rules on dtype, NaN and shape. Values are counted flat: `i` is in row `i // per_row`."""

    def __init__(self, column: Column, where: Where) -> None:
        self.column = column
        self.where = where

    def read(self, array: pa.Array) -> Array:
        if is_any(array.type, BINARY):
            return self._bytes(array)
        flat, shape = self._flat(array, 1)
        return flat.reshape(len(array), *shape)

    def _error(
        self, problem: str, places: Sequence[int] | Array = (), per_row: int = 1, common: str | None = None
    ) -> DataError:
        rows = np.unique(np.asarray(places, np.int64) // max(per_row, 1)).tolist()
        row = self.where(rows[0]) if rows else None
        return DataError(problem, column=self.column.name, row=row, positions=rows or None, common=common)

    def _refuse_nulls(self, array: pa.Array, per_row: int = 1) -> None:
        what = "is null" if per_row == 1 else "holds a null"
        refuse_nulls(array, self.column, self.where, what, lambda i: i // max(per_row, 1))

    def _flat(self, array: pa.Array, per_row: int) -> tuple[Array, tuple[int, ...]]:
        """All innermost values flat, and the shape of each entry of `array`."""
        kind = array.type
        if isinstance(kind, pa.FixedShapeTensorType):
            return self._tensors(array, per_row)
        if isinstance(kind, pa.BaseExtensionType):
            return self._flat(array.storage, per_row)
        if types.is_dictionary(kind):
            return self._flat(array.dictionary_decode(), per_row)
        problem = complaint(kind, dtype=self.column.dtype)
        if problem or is_any(kind, BINARY):
            raise self._error(problem or _unusable(kind))
        self._refuse_nulls(array, per_row)
        if is_list(kind):
            values, width = self._even(array, per_row)
            flat, inner = self._flat(values, per_row * width)
            return flat, (width, *inner)
        if _is_vector(kind):
            dense = self._vectors(array, per_row)
            return dense.reshape(-1), dense.shape[1:]
        return self._scalars(array), ()

    def _tensors(self, array: pa.Array, per_row: int) -> tuple[Array, tuple[int, ...]]:
        flat, _ = self._flat(array.storage, per_row)
        stored = flat.reshape(len(array), *array.type.shape)
        axes = array.type.permutation
        if axes is not None:
            stored = stored.transpose(0, *(axis + 1 for axis in axes))
        return stored.reshape(-1), stored.shape[1:]

    def _even(self, array: pa.Array, per_row: int) -> tuple[pa.Array, int]:
        if types.is_fixed_size_list(array.type):
            return array.flatten(), array.type.list_size
        offsets = numbers(array.offsets)
        width = self._one_length(np.diff(offsets), per_row)
        return array.values.slice(int(offsets[0]), width * len(array)), width

    def _one_length(self, lengths: Array, per_row: int = 1) -> int:
        if not len(lengths):
            return 0
        if lengths.min() != lengths.max():
            usual = self._usual(lengths, per_row)
            odd = np.flatnonzero(lengths != usual)
            others = "the rows before it" if lengths[0] == usual else "most others"
            raise self._error(
                f"has {lengths[odd[0]]} values where {others} have {usual};"
                " all rows must have the same length.\nHint: pad or cut them first, or let workers pad them:"
                ' prepare=Prepare(pad="batch") of the estimator.',
                odd,
                per_row,
                common=f"has another number of values than {usual}",
            )
        return int(lengths[0])

    def _usual(self, lengths: Array, per_row: int) -> int:
        """What the column's shape says, if it says how long these lists are, else what most of them are."""
        shape = self.column.shape
        if per_row == 1 and shape is not None and np.any(lengths == math.prod(shape)):
            return math.prod(shape)
        return int(Counter(lengths.tolist()).most_common(1)[0][0])  # the first of several

    def _scalars(self, array: pa.Array) -> Array:
        kind = array.type
        values: Array
        if types.is_null(kind):  # nulls were refused, so there is no value that could tell more
            return np.empty(0, np.float32)
        try:
            if types.is_decimal(kind):
                wants_ints = np.dtype(self.column.dtype or "float32").kind in "iu"
                array = array.cast(pa.int64() if wants_ints else pa.float64())
            elif types.is_date(kind):
                array = array.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
            elif types.is_timestamp(kind):
                # Nanoseconds lose their last digits by design; a coarser unit must not overflow.
                array = array.cast(pa.timestamp("us", kind.tz), safe=kind.unit != "ns").cast(pa.int64())
            values = numbers(array)
        except pa.ArrowInvalid as exc:
            raise self._error(f"{kind} values do not fit: {exc}") from exc
        return values

    def _bytes(self, array: pa.Array) -> Array:
        self._refuse_nulls(array)
        written = self.column.stored or self.column.dtype
        if written is None:
            raise self._error(_NEEDS_DTYPE.replace("<column>", self.column.name))
        dtype = np.dtype(written)
        start, width = self._byte_range(array)
        if width % dtype.itemsize:
            raise self._error(
                f"has {width} bytes, which is not a multiple of the {dtype.itemsize} of a {dtype.name}.",
                range(len(array)),
            )
        if not width:
            return np.empty((len(array), 0), dtype)
        data = np.frombuffer(array.buffers()[-1], np.uint8)[start : start + width * len(array)]
        values = data.view(dtype).reshape(len(array), width // dtype.itemsize)
        return values if values.flags.aligned else values.copy()

    def _byte_range(self, array: pa.Array) -> tuple[int, int]:
        """Offset of the first row, and bytes per row."""
        if types.is_fixed_size_binary(array.type):
            width = array.type.byte_width
            return array.offset * width, width
        if not len(array):
            return 0, 0
        size: type[np.signedinteger[Any]] = np.int64 if types.is_large_binary(array.type) else np.int32
        offsets = np.frombuffer(array.buffers()[1], size)[array.offset : array.offset + len(array) + 1]
        return int(offsets[0]), self._one_length(np.diff(offsets))

    def _vectors(self, array: pa.Array, per_row: int) -> Array:
        """Spark ML vectors: type 1 is dense, type 0 is sparse with sorted indices."""
        kinds = array.field("type")
        self._refuse_nulls(kinds, per_row)
        dense = kinds.to_numpy(zero_copy_only=False) == 1
        lengths, values = self._ragged(array.field("values"), np.arange(len(array)), per_row)
        if dense.all():
            return values.reshape(len(array), self._one_length(lengths, per_row))
        sparse = array.filter(pa.array(~dense))
        rows = np.flatnonzero(~dense)
        sizes = sparse.field("size")
        if sizes.null_count or sparse.field("indices").null_count:
            raise self._error("is a sparse vector without size or indices.", rows, per_row)
        widths = lengths.astype(np.int64)
        widths[rows] = sizes.to_numpy()
        width = self._one_length(widths, per_row)
        counts, indices = self._ragged(sparse.field("indices"), rows, per_row)
        odd = np.flatnonzero(counts != lengths[rows])
        outside = (indices < 0) | (indices >= width)
        owners = np.repeat(rows, counts)
        if len(odd) or outside.any():
            wrong = [*rows[odd], *owners[outside]]
            raise self._error(
                f"is a sparse vector whose indices do not fit its size {width}.", wrong, per_row
            )
        filled = np.zeros((len(array), width), values.dtype)
        is_dense = np.repeat(dense, lengths)
        filled[dense] = values[is_dense].reshape(int(dense.sum()), width)
        filled[owners, indices] = values[~is_dense]
        return filled

    def _ragged(self, array: pa.Array, rows: Array, per_row: int) -> tuple[Array, Array]:
        """Length of each list and the flat values; entry `i` belongs to `rows[i]`."""
        offsets = array.offsets.to_numpy()
        lengths = np.diff(offsets)
        flat = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        missing = array.is_null().to_numpy(zero_copy_only=False)
        if flat.null_count:
            missing[
                np.repeat(np.arange(len(array)), lengths)[flat.is_null().to_numpy(zero_copy_only=False)]
            ] = True
        if missing.any():
            problem = "is a vector with a null in it; missing values are not allowed."
            raise self._error(problem, rows[missing], per_row)
        return lengths, self._scalars(flat)


def _plain(values: Array, column: Column) -> Array:
    if values.dtype.kind == "M":
        unit = np.datetime_data(values.dtype)[0]
        days = unit in ("Y", "M", "W", "D")
        if np.isnat(values).any():
            problem = "holds NaT; missing values are not allowed."
            rows = np.flatnonzero(np.isnat(values).reshape(len(values), -1).any(axis=1)).tolist()
            raise DataError(problem, column=column.name, positions=rows)
        return values.astype("datetime64[D]" if days else "datetime64[us]").astype(np.int64)
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"values of numpy dtype {values.dtype} cannot feed a model. {_WORKS}\n"
            "Hint: turn strings into numbers first.",
            column=column.name,
        )
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _target(dtype: np.dtype[Any], column: Column) -> np.dtype[Any]:
    if column.dtype is not None:
        return np.dtype(column.dtype)
    if dtype.kind == "f":
        return np.dtype(np.float32)
    return np.dtype(np.int64) if dtype.kind in "iu" and column.role == "label" else dtype


def _cast(values: Array, target: np.dtype[Any], column: Column, where: Where) -> Array:
    if values.dtype == target or not values.size:
        return values.astype(target, copy=False)
    if target.kind in "iu":
        _refuse_unfit(values, target, column, where)
    try:
        with np.errstate(over="raise"):
            return values.astype(target)
    except FloatingPointError as exc:
        with np.errstate(over="ignore"):
            lost = np.isinf(values.astype(target)) & np.isfinite(values)
        raise _cannot_hold(values, lost, target, column, where) from exc


def _refuse_unfit(values: Array, target: np.dtype[Any], column: Column, where: Where) -> None:
    if values.dtype.kind == "b":
        return
    limits = np.iinfo(target)
    low, high = values.min().item(), values.max().item()
    whole = values.dtype.kind != "f" or bool((np.trunc(values) == values).all())
    if low >= limits.min and high <= limits.max and whole:  # Python's numbers compare exactly
        return
    lost = np.array(
        [not (limits.min <= v <= limits.max and v == v // 1) for v in values.reshape(-1).tolist()]
    )
    raise _cannot_hold(values, lost, target, column, where)


def _cannot_hold(
    values: Array, lost: Array, target: np.dtype[Any], column: Column, where: Where
) -> DataError:
    places = np.flatnonzero(lost.reshape(-1))
    per_row = values.size // len(values)
    return DataError(
        f"{values.reshape(-1)[places[0]]} ({values.dtype.name}) does not fit {target.name}.\n"
        "Hint: choose another dtype, for example"
        f" columns=Columns(dtypes={{{column.name!r}: {values.dtype.name!r}}}).",
        column=column.name,
        row=where(int(places[0]) // per_row),
        positions=np.unique(places // per_row).tolist(),
        common=f"holds a value that does not fit {target.name}",
    )


def _refuse_nan(values: Array, column: Column, where: Where) -> None:
    if column.allow_nan or values.dtype.kind != "f" or not values.size:
        return
    if np.isnan(values.min()):  # min() hands a NaN on, without an array of booleans
        rows = np.flatnonzero(np.isnan(values).reshape(len(values), -1).any(axis=1)).tolist()
        raise DataError(
            "is NaN.\nHint: fill or drop such rows first, or pass columns=Columns(allow_nan=True) if the"
            " model handles NaN.",
            column=column.name,
            row=where(rows[0]),
            positions=rows,
        )


def _shaped(values: Array, column: Column) -> Array:
    if column.shape is None or values.shape[1:] == column.shape:
        return values
    rows = len(values)
    if not rows:
        return values.reshape(-1)[:0].reshape(0, *column.shape)
    have, want = values.size // rows, math.prod(column.shape)
    if have != want:
        raise DataError(
            f"a row has {have} values (shape {values.shape[1:]}), but shape {column.shape} needs {want}.",
            column=column.name,
            positions=range(rows),
        )
    return values.reshape(rows, *column.shape)


def unused_name(name: str, taken: Iterable[str]) -> str:
    """Append underscores until no column has the name; ignores case, as Spark mostly does.

    >>> unused_name("_row", ["x", "_ROW"])
    '_row_'
    """
    folded = {one.lower() for one in taken}
    while name.lower() in folded:
        name += "_"
    return name
