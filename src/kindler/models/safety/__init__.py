"""Looks through files of models that strangers may have written, before a framework reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of parsed JSON, at any depth."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
            stack += one.values()
        elif isinstance(one, list):
            stack += one
