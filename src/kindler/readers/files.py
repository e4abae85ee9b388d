"""Finds and opens files where the engine's workers see them."""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from pyarrow import fs

from kindler.data.paths import Choice, absolute, expand, file_system, is_remote, local_path
from kindler.errors import ConfigError, DataError
from kindler.xshards.shared_value import session

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


def on_engine(engine: str, call: Callable[[], Any]) -> Any:
    """Run where the files are visible: here, or in a task of a Spark that is elsewhere."""
    if engine == "local":
        return call()
    from kindler.spark.tasks import at_files

    return at_files(session(), call)


def listed(paths: Paths) -> list[str]:
    places = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not places or not all(isinstance(path, str | os.PathLike) for path in places):
        raise ConfigError(
            f"{paths!r} is not a list of files.\nHint: pass a path, a folder, a glob, or a list of them."
        )
    return [absolute(path) for path in places]


def find(places: Sequence[str], choice: Choice, what: str) -> list[str]:
    files = [file for path in places for file in expand(path, choice)]
    if not files:
        raise ConfigError(f"no {what} file in {places}.")
    refuse_keys(places, files)
    return files


def refuse_keys(places: Sequence[str], files: Sequence[str]) -> None:
    """Reject folders named `key=value`: a column that is in no file would be lost silently."""
    for path in places:
        root = file_system(path)[1] if is_remote(path) else local_path(path)
        if glob.has_magic(root):
            continue
        for file in files:
            place = file_system(file)[1] if is_remote(file) else file
            if not place.startswith(root.rstrip("/") + "/"):
                continue
            keyed = [part for part in place[len(root) :].split("/")[:-1] if "=" in part]
            if keyed:
                raise ConfigError(
                    f"{path!r} has the folder {keyed[0]!r}: a column that is not in the files.\n"
                    "Hint: XShards.from_spark_df(spark.read...(path)) reads it with that column, and a glob"
                    " of the files without it."
                )


@contextmanager
def opened(file: str) -> Iterator[Any]:
    system, place = file_system(file)
    try:
        if isinstance(system, fs.LocalFileSystem):
            with open(place, "rb") as raw:
                yield raw
        else:
            with system.open_input_file(place) as raw:
                yield raw
    except FileNotFoundError:
        raise missing(file) from None


def missing(file: str) -> DataError:
    """For a file that was found, but that this worker cannot see."""
    return DataError(
        f"{file} does not exist on {socket.gethostname()}.\n"
        "Hint: every worker must find the files under the same path: use a folder that all machines share,"
        " or an object store."
    )
