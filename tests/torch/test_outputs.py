"""Outputs of any form are taken apart to tensors with names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from kindler import Estimator


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"double": x * 2, "parts": [x + 1, {"sum": (x * self.w).sum(1)}]}


def test_nested_outputs_are_columns_of_what_predict_returns() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    est = Estimator.from_torch(model=Nested(), workers=1)

    scored = est.predict({"x": x}, verbose=0)

    assert list(scored) == ["x", "double", "parts_0", "parts_1_sum"]
    np.testing.assert_array_equal(scored["parts_1_sum"], x @ [2, 3])
    np.testing.assert_array_equal(scored["parts_0"], x + 1)
