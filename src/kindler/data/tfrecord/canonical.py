"""One tf.train.Example at a time, with all that protobuf allows: the slow way, for unusual records.

Writers agree on one form of a record, and `entries` reads that form for many records at once. Protobuf
allows others: numbers that are not packed, fields in pieces, fields that nobody knows. `canonical` gives
the same record in the usual form.
"""

from __future__ import annotations

from collections.abc import Iterator

from kindler.data.tfrecord.varints import one

__all__ = ["BYTES", "FLOAT", "INT64", "Malformed", "canonical"]

BYTES, FLOAT, INT64 = 1, 2, 3  # the numbers of a Feature's fields
_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5
_MASK = (1 << 64) - 1

Value = tuple[int, list[bytes]]  # the kind, and each value as it stands in a packed list


class Malformed(ValueError):
    """Bytes that are no tf.train.Example."""


def canonical(record: bytes) -> bytes:
    """The same Example in the form that `entries` reads.

    Raises:
        Malformed: The bytes are no Example.
    """
    features: dict[bytes, Value] = {}
    for message in _messages(record, 1):
        for entry in _messages(message, 1):
            key, feature = b"", b""
            for number, wire, value in _fields(entry):
                if number == 1 and wire == _LEN:
                    key = value
                elif number == 2 and wire == _LEN:
                    feature += value  # the pieces of a message add up to it
            features[key] = _feature(feature)
    return _framed(0x0A, b"".join(_entry(key, value) for key, value in features.items()))


def _feature(data: bytes) -> Value:
    kind = 0
    values: list[bytes] = []
    for number, wire, value in _fields(data):
        if number in (BYTES, FLOAT, INT64) and wire == _LEN:
            values = values if number == kind else []  # one of the three: the last one given
            kind = number
            values = [*values, *_LISTS[number](value)]
    return kind, values


def _bytes_list(data: bytes) -> list[bytes]:
    return _messages(data, 1)


def _float_list(data: bytes) -> list[bytes]:
    chunks: list[bytes] = []
    for number, wire, value in _fields(data):
        if number == 1 and wire == _FIXED32:
            chunks.append(value)
        elif number == 1 and wire == _LEN:
            if len(value) % 4:
                raise Malformed(f"a list of floats has {len(value)} bytes")
            chunks += [value[i : i + 4] for i in range(0, len(value), 4)]
    return chunks


def _int64_list(data: bytes) -> list[bytes]:
    chunks: list[bytes] = []
    for number, wire, value in _fields(data):
        if number == 1 and wire == _VARINT:
            chunks.append(value)
        elif number == 1 and wire == _LEN:
            position = 0
            while position < len(value):
                item, position = _varint(value, position)
                chunks.append(one(item))
    return chunks


_LISTS = {BYTES: _bytes_list, FLOAT: _float_list, INT64: _int64_list}


def _entry(key: bytes, value: Value) -> bytes:
    kind, values = value
    if not kind:
        feature = b""
    elif kind == BYTES:
        feature = _framed(0x0A, b"".join(_framed(0x0A, item) for item in values))
    else:
        feature = _framed(kind << 3 | _LEN, _framed(0x0A, b"".join(values)) if values else b"")
    return _framed(0x0A, _framed(0x0A, key) + _framed(0x12, feature))


def _framed(tag: int, data: bytes) -> bytes:
    return bytes((tag,)) + one(len(data)) + data


def _messages(data: bytes, wanted: int) -> list[bytes]:
    return [value for number, wire, value in _fields(data) if number == wanted and wire == _LEN]


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise Malformed("a field has the number 0")
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, wire, one(value)
            continue
        if wire == _LEN:
            size, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise Malformed(f"a field has the unknown wire type {wire}")
        if size > len(data) - position:
            raise Malformed("a field is longer than its message")
        yield number, wire, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for step in range(10):
        if position + step >= len(data):
            raise Malformed("a number has no end")
        byte = data[position + step]
        value |= (byte & 0x7F) << (7 * step)
        if byte < 0x80:
            return value & _MASK, position + step + 1
    raise Malformed("a number has more than ten bytes")
