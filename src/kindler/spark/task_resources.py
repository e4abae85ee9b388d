"""What Spark gave to a task."""

from __future__ import annotations

from pyspark import TaskContext


def task_gpus(context: TaskContext) -> list[str]:
    """The GPUs of a task, as the discovery script named them; empty if it was given none."""
    return [a for kind, part in context.resources().items() if "gpu" in kind for a in part.addresses]
