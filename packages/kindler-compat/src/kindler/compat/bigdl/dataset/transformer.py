"""`bigdl.dataset.transformer`."""

from __future__ import annotations

from typing import Any

__all__ = ["normalizer"]


def normalizer(data: Any, mean: float, std: float) -> Any:
    """`data` less its mean, divided by its standard deviation."""
    return (data - mean) / std
