"""Reads TensorBoard's event files back with TensorBoard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["scalars"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar in a folder, by tag."""
    pytest.importorskip("tensorboard")
    # The name by which tensorboard is told to do without TensorFlow, which it would import otherwise.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
