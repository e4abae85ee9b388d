"""Protocol buffers without their schema: the fields of a message, one by one.

Every occurrence of a field is given, also of those that a parser would merge or skip, so that nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

Bytes: TypeAlias = "bytes | memoryview"


class Malformed(ValueError):
    """The bytes are no message."""


def spans(data: Bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Where fields lie: number, wire type, where the field starts, where its value does, where it ends."""
    at, end = 0, len(data)
    while at < end:
        start = at
        key, at = _varint(data, at)
        wire = key & 7
        begin = at
        if wire == 2:
            size, begin = _varint(data, at)
            at = begin + size
        elif wire == 0:
            _, at = _varint(data, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise Malformed(f"a field of wire type {wire}")
        if at > end:
            raise Malformed("a field that ends after its message")
        yield key >> 3, wire, start, begin, at


def fields(data: Bytes) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field: an integer, or the bytes of what has a length."""
    view = memoryview(data)
    for number, wire, _, begin, end in spans(view):
        if wire == 0:
            yield number, _varint(view, begin)[0]
        elif wire == 2:
            yield number, view[begin:end]


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


def _varint(data: Bytes, at: int) -> tuple[int, int]:
    if at >= len(data):
        raise Malformed("a number that does not end")
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    for shift in range(7, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Malformed("a number that does not end")
