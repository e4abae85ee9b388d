"""How Java runs in these tests: on small data, its optimizing compiler costs more than it saves."""

from __future__ import annotations

import os

from tests.java_archive import OPTIONS

__all__ = ["JAVA_OPTIONS", "set_java_options"]

_QUICK = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions"
    " -XX:-BytecodeVerificationRemote"
)
_ARCHIVE = OPTIONS.read_text().strip() if OPTIONS.exists() else ""
JAVA_OPTIONS = f"{_QUICK} {_ARCHIVE}".strip()


def set_java_options() -> None:
    """For every Spark that this process and its children start: the driver, and the launcher of each Java."""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", JAVA_OPTIONS)
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", _QUICK)  # with classes of its own, that are few
