"""Delta and Iceberg tables, at one version: `Table`, which users name, and its files, which workers read.

`delta.py` and `iceberg.py` ask the formats' own libraries which files and rows a version has. Here each file
gets the `FileView` by which its rows become rows of the table.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from pyarrow import fs, types

from kindler.data import parquet
from kindler.data.file_view import FileView, Storage
from kindler.data.paths import absolute, file_system, is_remote
from kindler.errors import ConfigError, DataError, KindlerError, MissingExtraError

Format: TypeAlias = Literal["delta", "iceberg"]

FIELD_ID = b"PARQUET:field_id"
USE_SPARK = "Hint: read it with Spark and pass the DataFrame."


class UnreadableError(ConfigError):
    """A version of a table that cannot be read without Spark, whose own reader may know it."""


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A file that a version of a table has. `constants` are columns with the same value in all of its rows,
    `deleted` the positions of rows that the version has no more."""

    path: str
    constants: Mapping[str, pa.Scalar] = field(default_factory=dict)
    deleted: Sequence[int] | np.ndarray[Any, Any] = ()


@dataclass(frozen=True, slots=True)
class TableFiles:
    """One version of a table.

    Attributes:
        schema: Its columns. In tables whose columns have numbers, fields have them under `FIELD_ID`.
        stored: The names that its columns may have in files whose fields have no numbers.
        defaults: The values of columns in files that were written before there was such a column.
        storage: None for what Arrow and fsspec open without more.
    """

    schema: pa.Schema
    files: Sequence[LiveFile]
    stored: Mapping[str, Sequence[str]] = field(default_factory=dict)
    defaults: Mapping[str, pa.Scalar] = field(default_factory=dict)
    storage: Storage | None = None


class Table:
    """A Delta or Iceberg table as data: for `fit`, `evaluate`, `predict` and `read_parquet`.

    The version is chosen once, when the table is first used, and stays the same for this object.

    Args:
        name: A path, a URI (`s3://`, `gs://`, `abfss://`, ...), for Iceberg also the file of its metadata or
            a name in a catalog: "catalog.namespace.table".
        version: The version of a Delta table. Default: the newest.
        snapshot: The number of an Iceberg snapshot, or the name of a branch or tag.
        as_of: The version that the table had then: a datetime, or text like "2026-01-31T12:00:00+00:00", each
            with its time zone.
        since: Only rows that were added after this version or snapshot. Between the two, rows may only have
            been added, or files rewritten without a change of rows.
        format: "delta" or "iceberg". Default: found out.
        options: Where and as whom to read, by the names of the format's library: `storage_options` of
            deltalake, properties of a catalog or file system of pyiceberg, which also read the environment.
            They are sent to the workers of a run, and neither shown nor kept: a pickled table has none.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        version: int | None = None,
        snapshot: int | str | None = None,
        as_of: datetime | str | None = None,
        since: int | None = None,
        format: Format | None = None,  # noqa: A002
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.name = os.fspath(name)
        self.version, self.snapshot, self.since = version, snapshot, since
        self.as_of = None if as_of is None else _moment(as_of)
        self.format, self.options = format, dict(options or {})
        self.chosen: dict[str, Any] = {}  # what `describe` returns, as soon as the log has been read
        self._files: TableFiles | None = None
        self._check()

    def describe(self) -> dict[str, Any]:
        """The format, the URI and the version or snapshot that are read, as plain data without credentials.

        Raises:
            ConfigError: There is no such table or version, or its format's library cannot read it.
        """
        self.files()
        return dict(self.chosen)

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Table:
        """The table that `describe` described; its credentials are those of the environment."""
        given = {name: described.get(name) for name in ("version", "snapshot", "since", "format")}
        return cls(described.get("name") or described["uri"], **cast("Any", given))

    def files(self) -> TableFiles:
        if self._files is None:
            module = importlib.import_module(f"kindler.data.{self.resolved_format()}")
            try:
                self._files = module.files(self)
            except KindlerError:
                raise
            except Exception as exc:  # the library's own, of many kinds  # noqa: BLE001
                why = f"{type(exc).__name__}: {self._redacted(str(exc))}"
                raise UnreadableError(f"{self!r} cannot be read ({why}).\n{USE_SPARK}") from None
        return self._files

    def is_path(self) -> bool:
        return is_remote(self.name) or os.sep in self.name or os.path.exists(self.name)

    def uri(self) -> str:
        return absolute(self.name)

    def place(self) -> str:
        """The name, as an absolute path if it is one."""
        return self.uri() if self.is_path() else self.name

    def __repr__(self) -> str:
        given = {n: getattr(self, n) for n in ("version", "snapshot", "as_of", "since", "format")}
        shown = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"Table({', '.join([repr(self.name), *shown])})"

    def __reduce__(self) -> Any:
        given = {n: getattr(self, n) for n in ("version", "snapshot", "as_of", "since", "format")}
        return partial(Table, self.name, **given), ()

    def __copy__(self) -> Table:
        return self

    def __deepcopy__(self, memo: Any) -> Table:
        return self

    def _check(self) -> None:
        chosen = [n for n in ("version", "snapshot", "as_of") if getattr(self, n) is not None]
        if len(chosen) > 1:
            raise ConfigError(f"{self!r}: {' and '.join(chosen)} choose a version each; pass one of them.")
        address = urlsplit(self.name)
        if "://" in self.name and (address.query or address.password is not None):
            shown = f"{address.scheme}://...{address.path}"
            raise ConfigError(f"Table({shown!r}): a URI with options.\nHint: pass them as options={{...}}.")
        if self.format not in (None, "delta", "iceberg"):
            raise ConfigError(f"{self!r}: must be format='delta' or format='iceberg'.")
        other = {"delta": "snapshot", "iceberg": "version"}.get(self.format or "")
        if other is not None and getattr(self, other) is not None:
            right = "version" if other == "snapshot" else "snapshot"
            raise ConfigError(f"{self!r}: versions of this format are chosen with {right}=..., not {other}.")

    def resolved_format(self) -> Format:
        asked = self.format or ("delta" if self.version is not None else None)
        asked = asked or ("iceberg" if self.snapshot is not None or not self.is_path() else None)
        if asked is None and self.name.endswith(".metadata.json"):
            asked = "iceberg"
        found = asked or (None if self.options else format_of(self.name))
        if found is None:
            raise ConfigError(
                f"{self!r}: no Delta or Iceberg table was found there.\n"
                "Hint: pass format='delta' or 'iceberg'; for an Iceberg table without"
                " metadata/version-hint.text also the path of its newest metadata/....metadata.json, or its"
                " name in a catalog."
            )
        return found

    def _redacted(self, text: str) -> str:
        for value in sorted(map(str, self.options.values()), key=len, reverse=True):
            text = text.replace(value, "***") if value else text
        return text


def format_of(path: str) -> Format | None:
    """The format of the table in this folder, if there is one."""
    system, place = file_system(path)
    place = place.rstrip("/")
    marks = [f"{place}/_delta_log", f"{place}/metadata"]
    delta, iceberg = (info.type == fs.FileType.Directory for info in system.get_file_info(marks))
    if delta:
        return "delta"
    listed = system.get_file_info(fs.FileSelector(marks[1])) if iceberg else []
    return "iceberg" if any(info.path.endswith(".metadata.json") for info in listed) else None


def library(name: str, table: Table, *, extra: str) -> Any:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(what=repr(table), package=package, extra=extra) from exc


Data: TypeAlias = "str | os.PathLike[str] | Table"
_PLACES = (str, os.PathLike, Table)


def inspect(data: Data | Sequence[Data], each: parquet.EachFile | None = None) -> parquet.ParquetFiles:
    """The rows of Parquet files and of tables, in the order in which they are named."""
    named = located(data)
    if not any(isinstance(place, Table) for place in named):
        return parquet.inspect(cast("list[str]", named), each)
    return _joined([_of_table(p, each) if isinstance(p, Table) else parquet.inspect(p, each) for p in named])


def located(data: Data | Sequence[Data]) -> list[str | Table]:
    """Paths, with a `Table` for each that is the folder of one."""
    return [_table_at(place) for place in ([data] if isinstance(data, _PLACES) else data)]


def _table_at(place: Data) -> str | Table:
    if isinstance(place, Table):
        return place
    path = os.fspath(place)
    is_table = not any(mark in path for mark in "*[?") and format_of(path)
    return Table(path) if is_table else path


def _of_table(table: Table, each: parquet.EachFile | None) -> parquet.ParquetFiles:
    found = table.files()
    live = sorted(found.files, key=lambda file: file.path)
    paths = [file.path for file in live]
    try:
        footers = list((each or parquet.each_here)(partial(parquet.footer, storage=found.storage), paths))
    except FileNotFoundError as exc:
        name = next((path for path in paths if path in str(exc)), str(exc))
        raise DataError(f"{table!r} lacks its file {os.path.basename(name)!r}: {name}.") from None
    views = [_view(found, file, *footer) for file, footer in zip(live, footers, strict=True)]
    groups = tuple(view.live_groups() for view in views)
    rows = sum(map(sum, groups))
    if not rows:
        raise DataError(f"{table!r} has no rows{'' if table.since is None else ' that were added since'}.")
    schema = found.schema.remove_metadata()
    nbytes = sum(size for _, size, _ in footers)
    return parquet.ParquetFiles(tuple(paths), groups, rows, nbytes, (schema,) * len(paths), tuple(views))


def _joined(parts: Sequence[parquet.ParquetFiles]) -> parquet.ParquetFiles:
    def all_of(values: Callable[[parquet.ParquetFiles], Iterable[Any]]) -> tuple[Any, ...]:
        return tuple(value for part in parts for value in values(part))

    return parquet.ParquetFiles(
        all_of(lambda part: part.files),
        all_of(lambda part: part.row_groups),
        sum(part.rows for part in parts),
        sum(part.nbytes for part in parts),
        all_of(lambda part: part.schemas),
        all_of(lambda part: part.views or [None] * len(part.files)),
    )


def _view(
    found: TableFiles, file: LiveFile, groups: tuple[int, ...], nbytes: int, stored: pa.Schema
) -> FileView:
    deleted = np.unique(np.asarray(file.deleted, np.int64))
    ids = {_number(f): f for f in stored if _number(f) is not None}
    if not ids and not found.stored and any(map(_number, found.schema)):
        raise DataError(
            f"{file.path}: its columns have no numbers, nor has the table names for them.\n{USE_SPARK}"
        )
    sources: dict[str, str | pa.Scalar] = {}
    for column in found.schema:
        number = _number(column)
        if column.name in file.constants:
            sources[column.name] = file.constants[column.name].cast(column.type)
            continue
        if number is not None and ids:
            there = ids.get(number)
        else:
            names = found.stored.get(column.name, [column.name])
            there = next((stored.field(name) for name in names if name in stored.names), None)
        if there is None:
            sources[column.name] = found.defaults.get(column.name, pa.scalar(None, column.type))
        elif _alike(column.type, there.type):
            sources[column.name] = there.name
    return FileView(found.storage, groups, stored, sources, deleted)


def _alike(wanted: pa.DataType, stored: pa.DataType) -> bool:
    """Whether nested fields are the same: pyarrow would cast structs by name, or by place."""
    inside = [[kind.field(i) for i in range(kind.num_fields)] for kind in (wanted, stored)]
    if len(inside[0]) != len(inside[1]):
        return False
    named = types.is_struct(wanted)
    for one, other in zip(*inside, strict=True):
        numbers = [_number(one), _number(other)]
        same = numbers[0] == numbers[1] if None not in numbers else not named or one.name == other.name
        if not same or (named and one.name != other.name) or not _alike(one.type, other.type):
            return False
    return True


def _number(column: pa.Field) -> bytes | None:
    number: bytes | None = (column.metadata or {}).get(FIELD_ID)
    return number


def _moment(given: datetime | str) -> datetime:
    try:
        moment = datetime.fromisoformat(given.replace("Z", "+00:00")) if isinstance(given, str) else given
    except ValueError:
        raise ConfigError(f"as_of={given!r} is not a time.\nHint: '2026-01-31T12:00:00+00:00'.") from None
    if moment.tzinfo is None:
        raise ConfigError(
            f"as_of={given!r} has no time zone.\nHint: '2026-01-31T12:00:00+00:00', or"
            " datetime(..., tzinfo=timezone.utc)."
        )
    return moment
