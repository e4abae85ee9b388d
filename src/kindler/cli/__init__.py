"""The `kindler` command: what is installed here, and the commands of the modules beside this one.

Imports neither Spark nor a framework before a command needs it.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from kindler.cli import serving, working
from kindler.errors import JavaNotFoundError, KindlerError

__all__ = ["main"]

_PACKAGES = ("kindler", "numpy", "pyarrow", "pyspark", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit status."""
    parser = argparse.ArgumentParser(prog="kindler", description="Deep learning where the data already is.")
    parser.add_argument("--version", action="version", version=f"kindler {_version('kindler')}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    info = commands.add_parser("info", help="show the versions of what Kindler uses on this machine")
    info.set_defaults(run=_show_info)
    serving.add_commands(commands)
    working.add_commands(commands)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 2
    try:
        return int(chosen.run(chosen))
    except KindlerError as exc:
        print(f"kindler: {exc}", file=sys.stderr)
        return 1


def _show_info(_: argparse.Namespace) -> int:
    for name, value in _info():
        print(f"{name:<10} {value}")
    return 0


def _info() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in _PACKAGES:
        yield package, _version(package)
    yield "java", _java()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _java() -> str:
    from kindler.spark.java import find_java

    try:
        java = find_java()
    except JavaNotFoundError:
        return "not found: pip install 'kindler[java]'"
    return f"{java.version} ({java.origin}: {java.home})"
