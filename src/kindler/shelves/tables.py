"""Tables as Parquet files: pandas, Arrow and Spark in, the same out; columns and rows chosen in reading."""

from __future__ import annotations

import base64
import json
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from kindler.errors import ConfigError, DataError, first_line
from kindler.shelves.datasets import Handle, PartsHandler, part_name, parts_in, rechunk
from kindler.store import File, Version, VersionStore

_FORMS = ("pandas", "arrow", "spark")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda field, value: field == value if value is not None else field.is_null(nan_is_null=True),
    "ne": lambda field, value: field != value if value is not None else ~field.is_null(nan_is_null=True),
    "lt": operator.lt,
    "lte": operator.le,
    "gt": operator.gt,
    "gte": operator.ge,
    "in": lambda field, value: field.isin(list(value)),
    "between": lambda field, value: (field >= value[0]) & (field <= value[1]),
    "isnull": lambda field, value: field.is_null(nan_is_null=True) == bool(value),
    "startswith": pc.starts_with,
    "endswith": pc.ends_with,
    "contains": pc.match_substring,
}


class ParquetHandler(PartsHandler):
    """pandas DataFrames and Series, Arrow tables, and Spark DataFrames."""

    kind: ClassVar[str] = "parquet"
    get_options: ClassVar[frozenset[str]] = frozenset({"columns", "filter", "as_", "spark"})
    takes_any: ClassVar[bool] = True  # conditions, which are checked against the columns

    def can(self, obj: Any) -> bool:
        return (
            isinstance(obj, Path | pa.Table | pa.RecordBatch | pa.RecordBatchReader) or _form(obj) != "arrow"
        )

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        form = _form(obj)
        table = _table(obj)
        try:
            pq.write_table(table, folder / part_name(0, ".parquet"), compression="zstd")
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            raise DataError(f"the table cannot be represented in Parquet: {exc}") from exc
        return table_meta(table.schema, form, [table.num_rows])

    def write_blobs(self, obj: Any, store: VersionStore) -> tuple[list[File], dict[str, Any]] | None:
        """Let Spark's tasks write, if it is Spark's."""
        if _form(obj) != "spark":
            return None
        from kindler.spark.store_frames import write_blobs

        schema, parts = write_blobs(obj, store.blobs.url)
        files = [File(part_name(i, ".parquet"), sha256, size) for i, (sha256, size, _) in enumerate(parts)]
        return files, table_meta(schema, "spark", [rows for _, _, rows in parts])

    def read_blobs(self, version: Version, store: VersionStore, options: Mapping[str, Any]) -> Any:
        """Let Spark's tasks read, if a frame of Spark's is wanted."""
        if _result_form(version.meta, options.get("as_"), options.get("spark")) != "spark":
            return None
        from kindler.spark.store_frames import read_blobs

        schema, columns, condition = _selection(version.meta, **options)
        return read_blobs(
            options.get("spark"),
            store.blobs.url,
            [file.sha256 for file in version.files],
            schema=schema,
            columns=schema.names if columns is None else columns,
            filter=condition,
        )

    def conform(self, obj: Any, old: Mapping[str, Any]) -> Any:
        if _form(obj) == "spark":
            return obj
        schema, table = schema_of(old), _table(obj)
        if table.schema.names != schema.names:
            raise DataError(
                f"rows with columns {table.schema.names} cannot be appended to rows with columns"
                f" {schema.names}."
            )
        for name in schema.names:
            there, here = schema.field(name).type, table.schema.field(name).type
            try:
                table.column(name).cast(there)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
                raise DataError(f"{here} cannot be appended to {there}: {exc}", column=name) from exc
        return table.cast(schema.with_metadata(table.schema.metadata))

    def append_meta(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        before, after = schema_of(old), schema_of(new)
        if before.names != after.names or before.types != after.types:
            raise DataError(f"rows of {_shown(after)} cannot be appended to rows of {_shown(before)}.")
        return {**old, "rows": [*old["rows"], *new["rows"]]}

    def open(self, folder: Path, meta: Mapping[str, Any], **options: Any) -> _Tables:
        form = _result_form(meta, options.get("as_"), options.get("spark"))
        return _Tables(parts_in(folder), meta, form, options)


class _Tables(Handle):
    def __init__(
        self, files: Sequence[Path], meta: Mapping[str, Any], form: str, options: Mapping[str, Any]
    ) -> None:
        super().__init__(files)
        schema, columns, condition = _selection(meta, **options)
        self._scan: dict[str, Any] = {"columns": columns, "filter": condition}
        self._rows, self._form = sum(meta["rows"]), form
        self._is_series = meta["made_from"] == "series" and options.get("as_") is None
        self._dataset = ds.dataset([str(path) for path in files], schema=schema, format="parquet")

    def __len__(self) -> int:
        """Rows, after the filter."""
        condition = self._scan["filter"]
        return self._rows if condition is None else int(self._dataset.count_rows(filter=condition))

    @property
    def value(self) -> Any:
        # In the order of the rows, which a scan of many files keeps.
        return self._formed(self._dataset.to_table(**self._scan))

    def _chunks(self, size: int) -> Iterator[Any]:
        batches = self._dataset.to_batches(**self._scan, batch_size=size)
        for chunk in rechunk(batches, size, len, lambda batch, i, j: batch.slice(i, j - i)):
            yield self._formed(pa.Table.from_batches(chunk))

    def _formed(self, table: pa.Table) -> Any:
        if self._form == "arrow":
            return table
        frame = table.to_pandas()
        return frame.iloc[:, 0] if self._is_series else frame


def table_meta(schema: pa.Schema, form: str, rows: Sequence[int]) -> dict[str, Any]:
    """What reading must know: the schema, what it was made from, and the rows of each part."""
    packed = base64.b64encode(schema.serialize().to_pybytes()).decode()
    return {"schema": packed, "made_from": form, "rows": list(rows), "columns": schema.names}


def schema_of(meta: Mapping[str, Any]) -> pa.Schema:
    """The schema of a stored table."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(meta["schema"])))


def _form(obj: Any) -> str:
    """What a table is made of. Loads nothing."""
    pandas, sql = sys.modules.get("pandas"), sys.modules.get("pyspark.sql")
    if pandas is not None and isinstance(obj, pandas.Series):
        return "series"
    if pandas is not None and isinstance(obj, pandas.DataFrame):
        return "pandas"
    return "spark" if sql is not None and isinstance(obj, sql.DataFrame) else "arrow"


def _table(obj: Any) -> pa.Table:
    try:
        if isinstance(obj, Path):
            return pq.read_table(obj)
        if isinstance(obj, pa.RecordBatch):
            return pa.Table.from_batches([obj])
        if isinstance(obj, pa.RecordBatchReader):
            return obj.read_all()
        if _form(obj) == "series":
            obj = obj.to_frame("value" if obj.name is None else obj.name)
        if not isinstance(obj, pa.Table):
            # An index that only counts from 0 is not stored, unless nothing else says how many rows it has.
            default = sys.modules["pandas"].RangeIndex(len(obj))
            counts = obj.index.equals(default) and obj.index.name is None and len(obj.columns)
            obj = pa.Table.from_pandas(obj, preserve_index=None if counts else True)
        table: pa.Table = obj
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError) as exc:
        raise DataError(f"the table cannot be stored: {exc}") from exc
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise DataError(f"duplicate columns: {', '.join(twice)}.")
    return table


def _result_form(meta: Mapping[str, Any], as_: str | None, spark: Any) -> str:
    if as_ not in (None, *_FORMS):
        raise ConfigError(f"as_={as_!r}: must be one of {', '.join(_FORMS)}.")
    if spark is not None and as_ not in (None, "spark"):
        raise ConfigError(f"as_={as_!r}: spark=... requires as_='spark'.")
    made_from = str(meta["made_from"])
    return as_ or ("spark" if spark is not None else "pandas" if made_from == "series" else made_from)


def _selection(
    meta: Mapping[str, Any],
    /,
    *,
    columns: Sequence[str] | None = None,
    filter: Any = None,  # noqa: A002
    as_: str | None = None,
    spark: Any = None,
    **conditions: Any,
) -> tuple[pa.Schema, list[str] | None, pc.Expression | None]:
    """The schema of a table, and the columns and rows that options of `get` ask for."""
    schema = schema_of(meta)
    condition = expression(schema, filter, conditions)
    if columns is None:
        return schema, None, condition
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r} is a string.\nHint: columns=[{columns!r}].")
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise ConfigError(f"columns={list(columns)}: {missing} not found; available: {schema.names}.")
    pandas = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    # A pandas frame keeps its index, as it does when columns of it are taken.
    index = [name for name in pandas.get("index_columns", ()) if isinstance(name, str)]
    kept = [name for name in index if name not in columns and name in schema.names]
    return schema, [*columns, *kept], condition


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def expression(schema: pa.Schema, filter_: Any, named: Mapping[str, Any]) -> pc.Expression | None:
    """One expression, which reading pushes down, of another one or of conditions such as `{"x__gt": 3}`, and
    of more conditions; None for all rows."""
    conditions = [_condition(schema, key, value) for key, value in named.items()]
    if isinstance(filter_, Mapping):
        conditions += [_condition(schema, str(key), value) for key, value in filter_.items()]
    elif isinstance(filter_, pc.Expression):
        conditions.append(_tried(schema, lambda: filter_, f"filter={filter_}"))
    elif filter_ is not None:
        raise ConfigError(
            f"filter={filter_!r} is a {type(filter_).__name__}.\n"
            "Hint: a pyarrow expression, or a dict such as {'x__gt': 3}."
        )
    return reduce(operator.and_, conditions) if conditions else None


def _condition(schema: pa.Schema, key: str, value: Any) -> pc.Expression:
    column, _, name = key.rpartition("__")
    if key in schema.names:
        column, name = key, "eq"
    if column not in schema.names:
        raise ConfigError(
            f"{key!r}: there is no column {column or key!r}; available: {', '.join(schema.names)}."
        )
    if name not in _OPERATORS:
        raise ConfigError(f"{key!r}: there is no operator {name!r}; available: {', '.join(_OPERATORS)}.")
    shown = f"{key}={value!r}: the column {column!r} is {schema.field(column).type}"
    if name == "between" and not (isinstance(value, Sequence) and len(value) == 2):
        raise ConfigError(f"{shown}; between needs two values, the lowest and the highest.")
    if name == "in" and isinstance(value, str | bytes):
        raise ConfigError(f"{shown}; in needs a list of values.")
    return _tried(schema, lambda: _OPERATORS[name](pc.field(column), value), shown)


def _tried(schema: pa.Schema, make: Callable[[], pc.Expression], shown: str) -> pc.Expression:
    """The condition, after a trial on no rows."""
    try:
        condition = make()
        schema.empty_table().filter(condition)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        raise ConfigError(
            f"{shown}, which does not support this comparison: {first_line(exc)}.\nHint: a condition is a"
            f" column, an"
            " operator and a value of the column's type, such as {'x__gt': 3} or {'name__in': ['a', 'b']}."
        ) from exc
    return condition
