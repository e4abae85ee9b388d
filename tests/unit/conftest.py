"""What all unit tests share."""

from __future__ import annotations

from pathlib import Path

import tests.few_examples  # noqa: F401

# They need a framework or Spark, one a process: the part of the gate that has it names its folder.
collect_ignore = [path.name for path in Path(__file__).parent.glob("with_*")]
