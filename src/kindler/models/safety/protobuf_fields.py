"""Protocol buffers without their schema: the fields of a message, one by one.

Every occurrence of a field is given, also of those that a parser would merge or skip, so that nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["Malformed", "fields", "messages", "texts"]

Bytes: TypeAlias = "bytes | memoryview"


class Malformed(ValueError):
    """The bytes are no message."""


def fields(data: Bytes) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field: an integer, or the bytes of what has a length."""
    view, at = memoryview(data), 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(view, at)
            yield number, value
            continue
        if wire in (1, 5):
            size = 8 if wire == 1 else 4
        elif wire == 2:
            size, at = _varint(view, at)
        else:
            raise Malformed(f"a field of wire type {wire}")
        if at + size > len(view):
            raise Malformed("a field that ends after its message")
        if wire == 2:
            yield number, view[at : at + size]
        at += size


def messages(data: Bytes, *path: int) -> Iterator[memoryview]:
    """All that lie at a path of field numbers."""
    if not path:
        yield memoryview(data)
        return
    for number, value in fields(data):
        if number == path[0] and isinstance(value, memoryview):
            yield from messages(value, *path[1:])


def texts(data: Bytes, *path: int) -> list[str]:
    """The same, as text."""
    return [bytes(found).decode("utf-8", "replace") for found in messages(data, *path)]


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise Malformed("a number that does not end")
        byte = view[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if not byte & 0x80:
            return value, at
