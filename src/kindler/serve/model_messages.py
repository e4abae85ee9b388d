"""What the server and a process that runs a model say to each other.

A message is a word of a few bytes on a socket; all else lies in shared memory (`tensor_area.py`), a header of
JSON after the arrays. So a message is sent and read in one go, and nobody waits for the other to read.
Nothing in it can be code.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

from kindler.data import received
from kindler.errors import ConfigError, DataError, KindlerError, MissingExtraError, UntrustedError
from kindler.models.predictor import Predictor
from kindler.models.signature import Arrays, Signature
from kindler.serve.http_errors import own_status
from kindler.serve.request_codec import signature_from, signature_told

__all__ = [
    "CALL",
    "NEEDS_ROOM",
    "REPLY",
    "REPLY_IN_ROOM",
    "ROOM",
    "WORD",
    "DescribedModel",
    "ModelFailure",
    "described",
    "raised",
    "read_word",
    "told_error",
    "told_model",
]

WORD = struct.Struct("<cQQ")  # what it is, and where the header lies: offset, bytes

# From the server: an order or a call, in the process's own area or in one that comes with it; more room.
CALL, ROOM = b"c", b"o"
# To the server: an answer in the process's own area, or in the room that it got; that it needs so many bytes.
REPLY, REPLY_IN_ROOM, NEEDS_ROOM = b"r", b"R", b"n"

_MOST_MESSAGE = 4000
_PLAIN: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "DataError": DataError,
    "MemoryError": MemoryError,
}


class ModelFailure(Exception):
    """An exception that a model raised in its process, whose class may be unknown here.

    Attributes:
        name: The name of its class.
        http_status: The status that it is to be answered with, if it says one.
    """

    def __init__(self, name: str, message: str, http_status: Any = None) -> None:
        self.name = name
        self.http_status = http_status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """What a process told of the model that it has loaded.

    Attributes:
        predictor: Its signatures and methods; it cannot be called here.
        joins: For each method, whether requests may share a call; None if that is not known yet.
        device: Where it computes, "cpu" or "cuda"; None if its own code decides.
        device_bytes: What the process has of its GPU's memory, as far as is known.
    """

    predictor: Predictor
    joins: dict[str, bool | None]
    device: str | None = None
    device_bytes: int = 0


class _Elsewhere(Predictor):
    """A model in another process."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.signature = signature_from(told["signature"])
        self.methods = tuple(map(str, told["methods"]))
        others = {str(name): signature_from(fields) for name, fields in told["signatures"].items()}
        own = {str(name): self.signature for name in told["own"]}
        self._signatures = {**own, **others}

    @property
    def signatures(self) -> dict[str, Signature]:
        return self._signatures

    def call(self, inputs: Arrays, method: str) -> Arrays:
        raise NotImplementedError("it is called in its own process")


def told_model(predictor: Predictor, joins: dict[str, bool | None]) -> dict[str, Any]:
    """A loaded model, for the server."""
    known = predictor.signatures
    return {
        "signature": signature_told(predictor.signature),
        "own": [name for name, signature in known.items() if signature is predictor.signature],
        "signatures": {
            name: signature_told(signature)
            for name, signature in known.items()
            if signature is not predictor.signature
        },
        "methods": predictor.methods,
        "joins": joins,
    }


def described(told: dict[str, Any]) -> DescribedModel:
    """What the server makes of it.

    Raises:
        ValueError: It cannot be.
    """
    try:
        joins = {str(m): None if j is None else bool(j) for m, j in told["joins"].items()}
        model = _Elsewhere(told)
        for signature in model.signatures.values():
            _check(signature)
        if not model.methods or not model.signature.inputs:
            raise ValueError("a model without methods or inputs")
        device = told.get("device")
        if device not in (None, "cpu", "cuda"):
            raise ValueError("no such device")
        return DescribedModel(model, joins, device, max(0, int(told.get("device_bytes", 0))))
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"no description of a model: {exc!r}") from exc


def _check(signature: Signature) -> None:
    for spec in (*signature.inputs, *signature.outputs):
        received.shape([size for size in spec.shape or () if size is not None])
        if type(spec.name) is not str or not isinstance(spec.dtype, str | None):
            raise ValueError("no description of an array")
    if not all(type(name) is str for name in signature.columns or ()):
        raise ValueError("no names of columns")


def told_error(error: BaseException) -> dict[str, Any]:
    """An exception, for the server."""
    status, text = own_status(error, str(error))
    told: dict[str, Any] = {"type": type(error).__name__, "message": text[:_MOST_MESSAGE], "status": status}
    if isinstance(error, UntrustedError):
        told["fields"] = {"what": error.what, "reason": error.reason}
    elif isinstance(error, MissingExtraError):
        what = str(error).partition(" needs ")[0]
        told["fields"] = {"what": what, "package": error.package, "extra": error.extra}
    elif isinstance(error, KindlerError) and not isinstance(error, DataError):
        told["type"] = "ConfigError"
    return told


def raised(told: Any) -> Exception:
    """The exception again: one of a few classes of Kindler's, or a `ModelFailure`."""
    if not isinstance(told, dict):
        return ModelFailure("Exception", "")
    name, message = str(told.get("type")), str(told.get("message"))[:_MOST_MESSAGE]
    fields = told.get("fields")
    try:
        if name == "UntrustedError" and fields:
            what, reason = (str(fields[key])[:_MOST_MESSAGE] for key in ("what", "reason"))
            return UntrustedError(what=what, reason=reason)
        if name == "MissingExtraError" and fields:
            names = ("what", "package", "extra")
            return MissingExtraError(**{key: str(fields[key])[:_MOST_MESSAGE] for key in names})
    except (TypeError, KeyError):
        pass  # not what it says it is
    found = _PLAIN.get(name)
    return ModelFailure(name[:100], message, told.get("status")) if found is None else found(message)


def read_word(sock: socket.socket) -> tuple[bytes, int, int, int]:
    """Wait for a word: what it is, two numbers, and the descriptor that came with it, or -1.

    Raises:
        EOFError: The other side is gone.
    """
    data, fds = b"", []
    while len(data) < WORD.size:
        some, got, _, _ = socket.recv_fds(sock, WORD.size - len(data), 1)
        fds += got
        if not some:
            raise EOFError
        data += some
    kind, first, second = WORD.unpack(data)
    return kind, first, second, fds[0] if fds else -1
