"""The header fields of HTTP/2 (HPACK, RFC 7541): those of requests are read, those of answers written.

Clients send the same fields again and again, so that what a block of them means is remembered until the table
that it refers to changes. Answers are written without a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeAlias, TypeVar

from kindler.serve.grpc_api.huffman import HuffmanError, decoded

__all__ = ["Field", "FieldError", "FieldReader", "written"]

Field: TypeAlias = tuple[str, str]
_Made = TypeVar("_Made")

_TABLE_BYTES = 4096
_ENTRY_BYTES = 32  # that each field counts beside its text
_MOST_KNOWN, _LONGEST_KNOWN = 64, 4096

_STATIC: tuple[Field, ...] = (
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    *((":status", code) for code in ("200", "204", "206", "304", "400", "404", "500")),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    *(
        (name, "")
        for name in (
            *("accept-language", "accept-ranges", "accept", "access-control-allow-origin", "age", "allow"),
            *("authorization", "cache-control", "content-disposition", "content-encoding"),
            *("content-language", "content-length", "content-location", "content-range", "content-type"),
            *("cookie", "date", "etag", "expect", "expires", "from", "host", "if-match"),
            *("if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "last-modified"),
            *("link", "location", "max-forwards", "proxy-authenticate", "proxy-authorization", "range"),
            *("referer", "refresh", "retry-after", "server", "set-cookie", "strict-transport-security"),
            *("transfer-encoding", "user-agent", "vary", "via", "www-authenticate"),
        )
    ),
)


class FieldError(ValueError):
    """A block that cannot be read; the connection cannot go on."""


class FieldReader(Generic[_Made]):
    """Reads the blocks of one connection.

    Args:
        make: What the fields of a block become; it must not keep or change anything.
        most_bytes: The most that the fields of a block may take.
    """

    def __init__(self, make: Callable[[list[Field]], _Made], most_bytes: int) -> None:
        self._make = make
        self._most_bytes = most_bytes
        self._table: deque[Field] = deque()  # the newest first
        self._size = 0
        self._limit = _TABLE_BYTES
        self._known: dict[bytes, _Made] = {}

    def read(self, block: bytes) -> _Made:
        """What `make` makes of a block.

        Raises:
            FieldError: It is none.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            fields, changed = self._fields(block)
        except (IndexError, HuffmanError) as exc:
            raise FieldError(f"header fields that cannot be read: {exc}") from exc
        made = self._make(fields)
        if changed:
            self._known.clear()
        elif len(block) <= _LONGEST_KNOWN and len(self._known) < _MOST_KNOWN:
            self._known[block] = made
        return made

    def _fields(self, block: bytes) -> tuple[list[Field], bool]:
        fields: list[Field] = []
        at, size, changed = 0, 0, False
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _number(block, at, 7)
                field = self._indexed(index)
            elif first & 0x40:
                field, at = self._literal(block, at, 6)
                self._insert(field)
                changed = True
            elif first & 0x20:
                limit, at = _number(block, at, 5)
                if fields or limit > _TABLE_BYTES:
                    raise FieldError("a size of the table that was not agreed upon")
                self._limit = limit
                self._make_room(0)
                changed = True
                continue
            else:
                field, at = self._literal(block, at, 4)
            size += len(field[0]) + len(field[1]) + _ENTRY_BYTES
            if size > self._most_bytes:
                raise FieldError(f"header fields of more than {self._most_bytes} bytes")
            fields.append(field)
        return fields, changed

    def _indexed(self, index: int) -> Field:
        if not index:
            raise FieldError("a field without a number")
        return _STATIC[index - 1] if index <= len(_STATIC) else self._table[index - 1 - len(_STATIC)]

    def _literal(self, block: bytes, at: int, bits: int) -> tuple[Field, int]:
        index, at = _number(block, at, bits)
        if index:
            name = self._indexed(index)[0]
        else:
            name, at = _text(block, at)
        value, at = _text(block, at)
        return (name, value), at

    def _insert(self, field: Field) -> None:
        size = len(field[0]) + len(field[1]) + _ENTRY_BYTES
        self._make_room(size)
        if size <= self._limit:
            self._table.appendleft(field)
            self._size += size

    def _make_room(self, size: int) -> None:
        while self._table and self._size + size > self._limit:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _ENTRY_BYTES


def written(fields: Iterable[Field]) -> bytes:
    """A block that changes no table. Values must be text that HTTP allows."""
    block = bytearray()
    for name, value in fields:
        block.append(0)
        for text in (name.encode("latin-1"), value.encode("latin-1")):
            block += _length(len(text)) + text
    return bytes(block)


def _length(number: int) -> bytes:
    if number < 0x7F:
        return bytes((number,))
    said, number = bytearray((0x7F,)), number - 0x7F
    while number >= 0x80:
        said.append(number & 0x7F | 0x80)
        number >>= 7
    said.append(number)
    return bytes(said)


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in (0, 7, 14, 21):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise FieldError("a number without an end")


def _text(block: bytes, at: int) -> tuple[str, int]:
    coded = block[at] & 0x80
    length, at = _number(block, at, 7)
    text = block[at : at + length]
    if len(text) != length:
        raise FieldError("a text that ends too early")
    return (decoded(text) if coded else text).decode("latin-1"), at + length
