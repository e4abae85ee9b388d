"""The files that a frame scans, where its plan is a scan of Parquet files and a choice of their columns.

Both ways to ask (the JVM's plan of a classic session, the message and the explanation of a Connect one)
accept what they know and refuse the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from kindler.data.paths import is_remote, local_path
from kindler.spark.session import is_on_this_machine

# What may be said to the reader. These decide which files are read and how a schema is found, and both are
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


class NotPlain(Exception):
    """Why a frame is not a plain scan."""


@dataclass(frozen=True)
class Scanned:
    """A file of a scan.

    Attributes:
        path: Its absolute path, or a URI.
        length: Its bytes when the frame was planned, where that is known: Spark reads no further.
    """

    path: str
    length: int | None


def classic_scan(frame: Any, names: Sequence[str]) -> list[Scanned]:
    """The files of a classic frame, one that is scanned twice being there twice.

    Raises:
        NotPlain: The frame does something else, or the columns `names` are not all the files' own.
    """
    # A plan of its own: the frame's may have been made before something was cached.
    plan = frame.select("*")._jdf.queryExecution().optimizedPlan()
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


def connect_scan(frame: Any, names: Sequence[str]) -> list[Scanned]:
    """The files of a frame of Spark Connect.

    Raises:
        NotPlain: The frame does something else, or the columns `names` are not all the files' own.
    """
    spark = frame.sparkSession
    relation = frame._plan.to_proto(spark.client).root
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
    for line in frame._explain_string().strip().splitlines()[1:]:
        step = re.sub(r"^[\s:|+-]*(\*\(\d+\) )?", "", line)
        if not step.startswith(_PHYSICAL_STEPS) or (step.startswith("Project") and " AS " in step):
            raise NotPlain(f"Spark runs it as {step[:200]!r}")
    files = [_place(file) for file in frame.inputFiles()]
    if not is_on_this_machine(spark) and not all(map(is_remote, files)):
        raise NotPlain("its files are on the Connect server's machine")
    return [Scanned(file, None) for file in files]


def check_folders(files: Iterable[Scanned], names: Sequence[str]) -> None:
    """Refuse columns that folders are named after: their values are those of the names, not of the files."""
    folders = {part for file in files for part in file.path.split("/")[:-1] if "=" in part}
    _check_partitions([unquote(folder.partition("=")[0]) for folder in folders], names)


def _check_partitions(partitions: Iterable[str], names: Sequence[str]) -> None:
    folded = {partition.lower() for partition in partitions}
    for name in names:
        if name.lower() in folded:
            raise NotPlain(f"column {name!r} is taken from folder names")


def _check_options(given: Iterable[str]) -> None:
    others = sorted({key.lower() for key in given} - _OPTIONS)
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


def _listed(location: Any, nothing: Any) -> list[Scanned]:
    """What the scan itself lists. All in one text: a call for each file would take longer than the rest.

    Args:
        location: The index of the files.
        nothing: An empty sequence of Scala's: there are no filters.
    """
    shown = location.listFiles(nothing, nothing).mkString("\n")
    files = [Scanned(_place(path), int(length)) for path, length in _FILE.findall(shown)]
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
    """Name and number of each attribute, of which there are `count`; the number is what tells them apart."""
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
