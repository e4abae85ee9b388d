"""Looks through files of models that strangers may have written, before a framework reads them."""

from __future__ import annotations

from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from importlib import resources
from typing import Any


def allowed_names(section: str) -> frozenset[str]:
    """The names in a section of `allowed_names.ini`: those that a file may have without trust."""
    return frozenset(_lists()[section]["names"].split())


@cache
def _lists() -> ConfigParser:
    lists = ConfigParser(interpolation=None)
    lists.read_string((resources.files(__name__) / "allowed_names.ini").read_text(encoding="utf-8"))
    return lists


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
