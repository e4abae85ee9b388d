"""Where the program of the driver finds its modules, for processes that run parts of it elsewhere."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

# What a Python puts on its path by itself begins with the zip file of its library, which need not exist.
_LIBRARY = re.compile(r"python3\d+\.zip|python3\.\d+|lib-dynload|(site|dist)-packages")


def program_path() -> tuple[str, ...]:
    """The module search path of this process, for others."""
    return tuple(place for path in sys.path for place in _places(path))


def _places(path: str) -> Iterator[str]:
    if path:
        yield os.path.abspath(path)
        return
    # The folder of an interactive program, which may have changed it since it imported its modules.
    yield from _folder()
    yield from _BEGAN_IN


def _folder() -> list[str]:
    try:
        return [os.getcwd()]
    except FileNotFoundError:  # somebody has deleted it
        return []


_BEGAN_IN = _folder()


def enter_program_path(paths: Sequence[str]) -> None:
    """Find modules as the process with this search path does, as far as this machine has those places."""
    here = map(os.path.abspath, sys.path)
    if all(path in here for path in paths):  # in that order: this is the program, and the path its own
        return
    sys.path[:] = merged_path(sys.path, paths)


def merged_path(
    own: Sequence[str], other: Sequence[str], exists: Callable[[str], bool] = os.path.exists
) -> list[str]:
    """The search path of a process that takes over the program of another.

    The program's own folders come first, so that its `utils` is the same module here as there, whatever else
    has that name. Libraries stay those of this process: its Python may be another one.

    >>> other = ["/proj", "/usr/lib/python311.zip", "/usr/lib/site-packages", "/more"]
    >>> merged_path(["/cwd", "/opt/lib/python311.zip"], other, lambda path: not path.endswith("zip"))
    ['/proj', '/cwd', '/opt/lib/python311.zip', '/usr/lib/site-packages', '/more']
    """
    first = [*takewhile(lambda path: not _LIBRARY.fullmatch(os.path.basename(path)), other)]
    first = [path for path in dict.fromkeys(first) if exists(path)]
    kept = [path for path in own if path not in first]
    last = [path for path in dict.fromkeys(other) if path not in first and path not in kept and exists(path)]
    return [*first, *kept, *last]
