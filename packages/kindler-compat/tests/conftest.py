"""kindler-compat and helpers of its tests are found, and a test must leave everything as it found it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = ("bigdl", "keras_faces", "sparkflow")  # whose helpers are imported by their bare names
sys.path[:0] = map(str, [HERE.parent / "src", *(HERE / part for part in FOLDERS)])
sys.path.append(str(HERE.parent))  # `tests` is a package of two folders, and the core's is the first

from tests.conftest import _no_leaks, mnist, no_workers_left  # noqa: E402

__all__ = ["_no_leaks", "mnist", "no_workers_left"]
