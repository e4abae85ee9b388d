"""What a batch is made of."""

from __future__ import annotations

from typing import Any

import numpy as np


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
