"""Where the two distributions of this repository are, for this process and for those that tests start."""

from __future__ import annotations

import os
from pathlib import Path

COMPAT = Path(__file__).parents[1]
ROOT = COMPAT.parents[1]
PYTHONPATH = os.pathsep.join(
    map(str, [ROOT / "src", COMPAT / "src", COMPAT.parent / "kindler-tfrecord/src", ROOT, COMPAT])
)
