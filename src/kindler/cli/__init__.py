"""The `kindler` command; each module beside this one adds its own subcommands.

Imports neither Spark nor a framework until a command needs it.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

from kindler.cli import cluster, doctor, predict, serve, store
from kindler.errors import JavaNotFoundError, KindlerError

__all__ = ["build_parser", "main"]

_PACKAGES = (
    *("kindler", "numpy", "pyarrow", "pyspark", "torch", "keras", "tensorflow", "jax"),
    *("transformers", "lightning", "mlflow"),
)
_OTHER_NAMES = {"mlflow": "mlflow-skinny"}  # the same package, without its server
_EPILOG = """Run `kindler COMMAND --help` for details. KINDLER_STORE sets the default store.

  kindler models put net.keras team/net --tag prod     store a model
  kindler models ls 'team/*'                           list models
  kindler predict team/net@prod --input rows.csv       predict with it
  kindler serve                                        serve all of them over HTTP
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="kindler",
        description="Deep learning where the data already is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version of Kindler and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for module in (store, predict, serve, cluster, doctor):
        module.add_commands(commands)
    info = commands.add_parser("info", help="show the versions of Kindler and its dependencies")
    info.set_defaults(run=_show_info)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    if chosen.version:
        print(f"kindler {_version('kindler')}")
        return 0
    if chosen.command is None:
        parser.print_help()
        return 2
    try:
        return int(chosen.run(chosen))
    except KindlerError as exc:
        return _failed(str(exc))
    except BrokenPipeError:
        # Whoever read what we print has seen enough; Python would complain about it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as exc:
        return _failed(f"{exc.filename}: {exc.strerror}." if exc.filename else f"{exc}.")
    except KeyboardInterrupt:
        return 130


def _failed(message: str) -> int:
    print(f"kindler: {message}", file=sys.stderr)
    return 1


def _show_info(_: argparse.Namespace) -> int:
    from kindler.spark.java import find_java

    try:
        java = find_java()
        found = f"{java.version} ({java.origin}: {java.home})"
    except JavaNotFoundError:
        found = "not found: pip install 'kindler[java]'"
    versions = {package: _version(package) for package in _PACKAGES}
    for name, value in {"python": platform.python_version(), **versions, "java": found}.items():
        print(f"{name:<12} {value}")
    return 0


def _version(package: str) -> str:
    other = _OTHER_NAMES.get(package, package)
    return doctor.version_of(package) or doctor.version_of(other) or "not installed"
