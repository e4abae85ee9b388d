"""Proves that a Spark DataFrame is nothing but the Parquet files behind it.

All of this must hold; anything else goes through Spark.

- The optimized plan is one Parquet scan, with only selections of columns above it, and no column was given
  another's name (`_classic_scan`, `_connect_scan`): a row of the frame is a row of a file.
- The files are those that the scan lists, as often as it lists them, with unchanged lengths: no row is
  missing or there twice.
- No wanted column comes from folder names, which win over what is in the files.
- Every file holds every wanted column once, with exactly the frame's type, and dates in today's calendar
  (`StoredColumns`): Spark would convert, fill in or rebase nothing.
- No setting of the session makes Spark skip files it cannot read, find columns by id, or shift timestamps
  (`_SETTINGS`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types
from pyspark.sql import DataFrame

from kindler.data import parquet
from kindler.data.paths import is_remote, local_path
from kindler.errors import ConfigError, KindlerError
from kindler.spark.frames import arrow_types
from kindler.spark.session import is_on_this_machine
from kindler.spark.tasks import each_file
from kindler.spark.versions import connect_relation, explained, is_connect, optimized_plan

_SETTINGS = (
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.fieldId.read.enabled",
    "spark.sql.parquet.int96TimestampConversion",
)
# Spark's own names for where a row is stored: a column called so would hide them.
_RESERVED = ("_metadata", "_tmp_metadata_row_index")
# What the reader may be told. These decide which files are read and how a schema is found, and both are
# looked at afterwards; others decide how values are read, or what happens to files that cannot be.
_OPTIONS = {
    "path", "mergeschema", "basepath", "pathglobfilter", "recursivefilelookup", "modifiedbefore",
    "modifiedafter", "compression", "serialization.format",
}  # fmt: skip
_INDEXES = {"InMemoryFileIndex", "CatalogFileIndex"}
_PHYSICAL_STEPS = ("Project", "ColumnarToRow", "FileScan parquet")
_ATTRIBUTE = re.compile(r"(.*)#(\d+)L?", re.DOTALL)
_FILE = re.compile(r"\{path=(.*?); isDirectory=false; length=(\d+); replication=")
_UNREADABLE_NAMES = "the names of its columns cannot be parsed"
_SIMPLE_NAME = re.compile(r"\w+|`[^`]+`")
_PLAN_CHARACTERS = 20_000
_SPARK_VERSION = b"org.apache.spark.version"
_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
# Since then a file says so itself where its dates are of the old calendar. Compared as text, as Spark does.
_SAYS_ITS_CALENDAR = "3.1.0"


class NotPlain(Exception):
    """Why a frame is not a plain scan."""


@dataclass(frozen=True)
class StoredColumns:
    """Exactly the frame's types. A value, so that an executor that opens a file later can check it again."""

    types: Mapping[str, pa.DataType]

    def problem(self, opened: pq.ParquetFile) -> str | None:
        """Why Spark may read other values than pyarrow does; None if it cannot."""
        schema = opened.schema_arrow
        kinds = dict(zip(schema.names, schema.types, strict=True))
        alike = Counter(name.lower() for name in schema.names)
        dated = [name for name, wanted in self.types.items() if _has_dates(wanted)]
        instants = _int96(opened) if dated else set()
        for name, wanted in self.types.items():
            if name not in kinds:
                return f"column {name!r} is not stored in its files"
            if alike[name.lower()] > 1:
                # Spark tells such names apart or not, depending on its settings.
                return f"its files have several columns called {name!r}, upper and lower case aside"
            # An INT96 is an instant, which Arrow does not say.
            stored = _with_time_zone(kinds[name]) if name in instants else kinds[name]
            if not _same(wanted, stored):
                return f"column {name!r} is {wanted} in the frame and {stored} in its files"
        if dated and not _is_of_todays_calendar(opened):
            return f"column {dated[0]!r} has dates that may be counted in the calendar from before 1582"
        return None


@dataclass(frozen=True)
class PlainScan:
    """A file that is scanned twice is listed twice."""

    files: parquet.ParquetFiles
    columns: StoredColumns


def plan_of(frame: DataFrame) -> str:
    """The plan of a frame as text, the same in every session: without the numbers of its columns."""
    text = explained(frame) if is_connect(frame.sparkSession) else optimized_plan(frame).toString()
    return re.sub(r"#\d+L?", "", text)[:_PLAN_CHARACTERS]


def plain_parquet(frame: DataFrame, names: Sequence[str], *, must: bool = False) -> PlainScan | None:
    """None if the frame is not provably a plain scan; with `must`, raises ConfigError with the reason."""
    try:
        return _inspect(frame, names)
    except NotPlain as reason:
        if must:
            raise ConfigError(
                "ingest='direct' needs a plain Parquet scan, at most with a selection of columns;"
                f" {reason}.\nHint: ingest='auto' or 'inline' accepts any DataFrame."
            ) from None
        return None


def _inspect(frame: DataFrame, names: Sequence[str]) -> PlainScan:
    if frame.isStreaming:
        raise NotPlain("it is a streaming DataFrame")
    _check_names(frame.columns, names)
    kinds = arrow_types(frame)
    unknown = [name for name in names if kinds[name] is None]
    if unknown:
        raise NotPlain(f"Arrow has no type for its columns {unknown}")
    columns = StoredColumns({name: kinds[name] for name in names})
    scan = _connect_scan if is_connect(frame.sparkSession) else _classic_scan
    scanned = scan(frame, names)
    # Values of partition columns come from folder names, not from the files.
    folders = {part for path, _ in scanned for part in path.split("/")[:-1] if "=" in part}
    _check_partitions([unquote(folder.partition("=")[0]) for folder in folders], names)
    for key in _SETTINGS:
        if (frame.sparkSession.conf.get(key, "false") or "false").lower() != "false":
            raise NotPlain(f"the session has {key}=true")
    try:
        files = parquet.inspect_files(
            [path for path, _ in scanned],
            partial(_check_file, columns=columns, lengths=dict(scanned)),
            partial(each_file, frame.sparkSession),
        )
    except (OSError, KindlerError) as exc:
        raise NotPlain(f"its files cannot be read from this process ({exc})") from None
    return PlainScan(files, columns)


def _check_names(there: Sequence[str], names: Sequence[str]) -> None:
    folded = Counter(name.lower() for name in there)
    for name in names:
        if folded[name.lower()] > 1:
            raise NotPlain(f"it has several columns called {name!r}, ignoring case")
    if any(reserved in folded for reserved in _RESERVED):
        raise NotPlain(f"it has a column with a reserved name, one of {list(_RESERVED)}")


def _check_file(
    path: str, opened: pq.ParquetFile, *, columns: StoredColumns, lengths: Mapping[str, int | None]
) -> None:
    planned = lengths[path]
    if planned is not None and planned != parquet.file_length(path):
        raise NotPlain(f"{path} has changed since the DataFrame was created")
    problem = columns.problem(opened)
    if problem is not None:
        raise NotPlain(problem)


_Scanned = tuple[str, int | None]  # a file, and its length if known: Spark reads no further


def _classic_scan(frame: Any, names: Sequence[str]) -> list[_Scanned]:
    plan = optimized_plan(frame)
    columns = frame.columns
    output = _attributes(plan.output(), len(columns))
    while (step := str(plan.nodeName())) == "Project":
        if any(" AS " in one or not _ATTRIBUTE.fullmatch(one) for one in _lines(plan.projectList())):
            raise NotPlain("it computes columns")
        plan = plan.children().head()
    if step != "LogicalRelation" or _class(relation := plan.relation()) != "HadoopFsRelation":
        raise NotPlain(f"its plan has a step of kind {step}")
    if (format_ := _class(relation.fileFormat())) != "ParquetFileFormat":
        raise NotPlain(f"its files are read as {format_}")
    location = relation.location()
    if (index := _class(location)) not in _INDEXES:
        raise NotPlain(f"its files are listed by {index}")
    _check_options(_lines(relation.options().keySet()))
    stored, partitions = _field_names(relation.dataSchema()), _field_names(relation.partitionSchema())
    read = _attributes(plan.output())
    if not len(stored) <= len(read) <= len(stored) + len(partitions):
        raise NotPlain(_UNREADABLE_NAMES)
    by_number = {number: name for (_, number), name in zip(read, stored, strict=False)}
    numbers = {shown: number for shown, (_, number) in zip(columns, output, strict=True)}
    for name in names:
        # The same attribute under the same name: not one that has got the name of another on the way.
        if by_number.get(numbers[name]) != name:
            raise NotPlain(f"column {name!r} is not stored in its files")
    _check_partitions(partitions, names)
    return _listed(location, nothing=plan.children())


def _connect_scan(frame: Any, names: Sequence[str]) -> list[_Scanned]:
    relation = connect_relation(frame)
    chosen: list[Any] = []
    plans = {relation.common.plan_id}
    while (kind := relation.WhichOneof("rel_type")) == "project":
        chosen += relation.project.expressions
        relation = relation.project.input
        plans.add(relation.common.plan_id)
    for expression in chosen:
        _check_chosen(expression, plans)
    if kind != "read" or relation.read.is_streaming or relation.read.WhichOneof("read_type") != "data_source":
        raise NotPlain(f"its plan has a step of kind {kind}")
    source = relation.read.data_source
    if source.format.lower() != "parquet" or source.predicates:
        raise NotPlain(f"its files are read as {source.format}")
    if len(source.paths) != 1 or re.search(r"[*?\[{\\]", source.paths[0]):
        # Spark tells each file once, and would scan one twice that two paths lead to.
        raise NotPlain("it reads more than one path, which Spark Connect does not distinguish")
    _check_options(source.options)
    # The server may know more than the message: what is cached, or a filter of its own.
    for line in explained(frame).strip().splitlines()[1:]:
        step = re.sub(r"^[\s:|+-]*(\*\(\d+\) )?", "", line)
        if not step.startswith(_PHYSICAL_STEPS) or (step.startswith("Project") and " AS " in step):
            raise NotPlain(f"Spark runs it as {step[:200]!r}")
    files = [_place(file) for file in frame.inputFiles()]
    if not is_on_this_machine(frame.sparkSession) and not all(map(is_remote, files)):
        raise NotPlain("its files are on the Connect server's machine")
    return [(file, None) for file in files]


def _check_partitions(partitions: Iterable[str], names: Sequence[str]) -> None:
    folded = {partition.lower() for partition in partitions}
    for name in names:
        if name.lower() in folded:
            raise NotPlain(f"column {name!r} is taken from folder names")


def _check_options(options: Iterable[str]) -> None:
    others = sorted({key.lower() for key in options} - _OPTIONS)
    if others:
        raise NotPlain(f"it is read with the options {others}")


def _check_chosen(expression: Any, plans: set[int]) -> None:
    attribute = expression.unresolved_attribute
    if (
        expression.WhichOneof("expr_type") != "unresolved_attribute"
        or attribute.is_metadata_column
        or not _SIMPLE_NAME.fullmatch(attribute.unparsed_identifier)  # others may be fields of a struct
        or (attribute.HasField("plan_id") and attribute.plan_id not in plans)
    ):
        raise NotPlain("it computes columns")


def _listed(location: Any, nothing: Any) -> list[_Scanned]:
    """All in one string: a JVM call per file would take longer. `nothing` is an empty Scala sequence."""
    shown = location.listFiles(nothing, nothing).mkString("\n")
    files: list[_Scanned] = [(_place(path), int(length)) for path, length in _FILE.findall(shown)]
    if len(files) != shown.count("; isDirectory=") or len(files) != shown.count("{path="):
        raise NotPlain("the list of its files cannot be parsed")
    return files


def _place(path: str) -> str:
    """Spark names local files by URI, `file:///a%20b`, or without encoding, `file:/a b`."""
    if path.startswith("file:///"):
        return local_path(path)
    if path.startswith("file:"):
        return path.removeprefix("file:")
    return path if "%" in path else quote(path, safe="/:@!$&'()*+,;=~")


def _attributes(output: Any, count: int | None = None) -> list[tuple[str, str]]:
    matches = [_ATTRIBUTE.fullmatch(one) for one in _lines(output)]
    if not all(matches) or count not in (None, len(matches)):
        raise NotPlain(_UNREADABLE_NAMES)
    return [match.groups() for match in matches if match]  # type: ignore[misc]


def _lines(collection: Any) -> list[str]:
    text = str(collection.mkString("\n"))
    return text.split("\n") if text else []


def _field_names(schema: Any) -> list[str]:
    return [field["name"] for field in json.loads(schema.json())["fields"]]


def _class(java_object: Any) -> str:
    return str(java_object.getClass().getSimpleName())


def _same(wanted: pa.DataType, stored: pa.DataType) -> bool:
    """Whether Spark would read the stored type without conversion."""
    if types.is_list(wanted):
        kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        return any(kind(stored) for kind in kinds) and _same(wanted.value_type, stored.value_type)
    if types.is_struct(wanted):
        if not types.is_struct(stored) or [f.name for f in wanted] != [f.name for f in stored]:
            return False
        return all(_same(one.type, other.type) for one, other in zip(wanted, stored, strict=True))
    if types.is_binary(wanted):
        return bool(types.is_binary(stored) or types.is_large_binary(stored))
    plain = types.is_signed_integer(wanted) or types.is_floating(wanted) or types.is_boolean(wanted)
    return bool(plain or types.is_decimal(wanted) or _has_dates(wanted)) and wanted == stored


def _has_dates(kind: pa.DataType) -> bool:
    if types.is_list(kind):
        return _has_dates(kind.value_type)
    if types.is_struct(kind):
        return any(_has_dates(field.type) for field in kind)
    return bool(types.is_date(kind) or types.is_timestamp(kind))


def _is_of_todays_calendar(opened: pq.ParquetFile) -> bool:
    """Otherwise Spark's settings decide whether it rebases old dates."""
    facts = opened.metadata.metadata or {}
    version = facts.get(_SPARK_VERSION, b"").decode("utf-8", "replace")
    return version >= _SAYS_ITS_CALENDAR and not any(key in facts for key in _OLD_CALENDAR)


def _int96(opened: pq.ParquetFile) -> set[str]:
    """Columns with INT96 values, and the prefixes of nested names."""
    leaves = (opened.schema.column(i) for i in range(len(opened.schema.names)))
    paths = [leaf.path.split(".") for leaf in leaves if leaf.physical_type == "INT96"]
    return {".".join(parts[: i + 1]) for parts in paths for i in range(len(parts))}


def _with_time_zone(stored: pa.DataType) -> pa.DataType:
    if types.is_list(stored):
        return pa.list_(_with_time_zone(stored.value_type))
    return pa.timestamp("us", "UTC") if stored == pa.timestamp("us") else stored
