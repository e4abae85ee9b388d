"""What the shards of every engine are for whoever feeds a model."""

from __future__ import annotations

import numpy as np

from kindler import XShards
from kindler.data.shards.source import array_columns, values


def assert_arrays_are_flat_columns(engine: str) -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6)
    held = XShards.partition({"x": (x, x + 1), "y": y}, 2, engine=engine)._ready()

    assert [(c.name, c.role, c.dtype, c.shape) for c in array_columns(dict(enumerate(held.infos)))] == [
        ("x0", "feature", "<f4", (2,)),
        ("x1", "feature", "<f4", (2,)),
        ("y", "label", "<i8", ()),
    ]
    parts = [values(packed, ["x1"], None)["x1"] for packed in held.load(range(2))]
    assert [len(part) for part in parts] == [3, 3]
    np.testing.assert_array_equal(np.concatenate(parts), x + 1)
