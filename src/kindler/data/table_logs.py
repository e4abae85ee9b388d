"""Which files of a Delta or Iceberg table are the table's rows now, as its own log says.

Read by the libraries of these formats, where they are installed. A table is plain if each of its rows is a
row of one of these files: nothing is deleted within a file, and columns have the names that they have there.
Tables that are not plain, and those that are not in a folder of this machine, are refused: Spark reads them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kindler.errors import ConfigError, MissingExtraError

_HINT = "Hint: read it with Spark and pass the DataFrame."
# Features that do not change which rows the files hold, nor under which names and types.
_HARMLESS = {"timestampNtz", "vacuumProtocolCheck", "v2Checkpoint", "domainMetadata", "appendOnly"}


def delta_files(path: str) -> set[tuple[str, ...]]:
    """The files of a Delta table's newest version, as parts of paths below its folder.

    Raises:
        ConfigError: The table is not plain.
        MissingExtraError: The library that reads its log is not installed.
    """
    deltalake = _library("deltalake", path, extra="delta")
    try:
        table = deltalake.DeltaTable(path)
        features = set(table.protocol().reader_features or ()) - _HARMLESS
    except Exception as exc:  # the library's own, of many kinds
        raise ConfigError(f"{path!r}: the log of this Delta table cannot be read ({exc}).\n{_HINT}") from exc
    if features:
        raise ConfigError(
            f"{path!r} is a Delta table with {', '.join(sorted(features))}, whose files cannot be read as"
            f" they are.\n{_HINT}"
        )
    return _below(path, table.file_uris())


def iceberg_files(path: str) -> set[tuple[str, ...]]:
    """The same for an Iceberg table whose folder says which metadata is the newest (`version-hint.text`).

    Raises:
        ConfigError: The table is not plain, or only its catalog knows what is newest.
        MissingExtraError: The library that reads its metadata is not installed.
    """
    tables = _library("pyiceberg.table", path, extra="iceberg")
    hint = Path(path, "metadata", "version-hint.text")
    try:
        newest = Path(path, "metadata", f"v{int(hint.read_text())}.metadata.json")
    except (OSError, ValueError):
        raise ConfigError(
            f"{path!r}: which version of this Iceberg table is the newest, only its catalog knows.\n{_HINT}"
        ) from None
    try:
        tasks = list(tables.StaticTable.from_metadata(str(newest)).scan().plan_files())
    except Exception as exc:  # the library's own, of many kinds
        raise ConfigError(f"{path!r}: this Iceberg table cannot be read ({exc}).\n{_HINT}") from exc
    if any(task.delete_files for task in tasks):
        raise ConfigError(f"{path!r} is an Iceberg table with deleted rows in its files.\n{_HINT}")
    return _below(path, [task.file.file_path for task in tasks])


def _library(name: str, path: str, *, extra: str) -> Any:
    if not os.path.isdir(path):
        raise ConfigError(f"{path!r} is a table in another place than this machine's folders.\n{_HINT}")
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name != package:
            raise
        raise MissingExtraError(what=f"{path!r}, a table with a log,", package=package, extra=extra) from exc


def _below(path: str, files: Iterable[str]) -> set[tuple[str, ...]]:
    root = Path(path).resolve()
    found = set()
    for file in files:
        place = Path(unquote(urlsplit(file).path) if file.startswith("file:") else file).resolve()
        if root not in place.parents:
            raise ConfigError(f"{path!r}: its file {file!r} is in another folder.\n{_HINT}")
        found.add(place.relative_to(root).parts)
    return found
