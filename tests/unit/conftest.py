"""What all unit tests share."""

from __future__ import annotations

import tests.few_examples  # noqa: F401

# They need a framework or Spark, one a process: the part of the gate that has it names its folder.
collect_ignore_glob = ["with_*"]
