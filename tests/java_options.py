"""How Java runs in these tests: on small data, its optimizing compiler costs more than it saves."""

from __future__ import annotations

import os

__all__ = ["JAVA_OPTIONS", "set_java_options"]

JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)


def set_java_options() -> None:
    """For every Spark that this process and its children start: the driver, and the launcher of each Java."""
    for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
        os.environ.setdefault(name, JAVA_OPTIONS)
