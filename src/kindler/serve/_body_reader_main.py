"""A process that reads bodies for the server, within a bound on its memory.

A few bytes can stand for gigabytes, and a parser can hold Python's lock for seconds. Here neither reaches
anybody else: what takes more memory than its bytes can be worth fails, and the server ends what takes too
long. A parser with a flaw does not reach anything either: where the system can do it, the process is locked
in. The server sets its limits, from outside.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from kindler import jail
from kindler.data.arrow import stream
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Codec, Sent
from kindler.serve.protocols.mlflow import Mlflow
from kindler.serve.protocols.omega import OmegaCodec
from kindler.serve.protocols.tables import read_table
from kindler.serve.protocols.tfserving import TfServing
from kindler.serve.protocols.v2 import V2
from kindler.serve.request_body import decompressed
from kindler.serve.request_codec import packed_request, read_frame, signature_from, write_frame
from kindler.serve.requests import InferRequest, Target, check_rows

try:
    from kindler.serve.grpc_api.tensors import InferMessage, request_from
except ModuleNotFoundError:  # protobuf; then nobody sends messages either
    pass

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (V2(), TfServing(), Mlflow(), OmegaCodec())}


def main() -> None:
    """Read what comes until nothing comes any more."""
    asked = io.BufferedReader(io.FileIO(os.dup(0)), 1 << 16)
    answers = io.BufferedWriter(io.FileIO(os.dup(1), "wb"), 1 << 16)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)  # nothing that is printed gets between the frames
    _lock_in(keep=(asked.fileno(), answers.fileno()))
    write_frame(answers, {})
    while True:
        try:
            header, (body,) = read_frame(asked)
        except EOFError:
            return
        answer, buffers = _answered(header, body)
        write_frame(answers, answer, buffers)
        del header, body, answer, buffers


def _lock_in(keep: tuple[int, ...]) -> None:
    try:
        jail.enter((), keep=keep)
    except OSError as exc:
        sys.stderr.write(f"bodies are read by a process that is not locked in: {exc.strerror}.\n")


def _answered(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], list[Any]]:
    most = int(header["most_bytes"])
    try:
        if header["what"] == "content":
            return {}, [decompressed(body, header["coding"], header["limit"])]
        if header["what"] == "table":
            table, mode = read_table(body, header["content_type"])
            return {"mode": mode}, [stream(table)]
        if header["what"] == "message":
            request = _of_message(body)
        else:
            sent = Sent(body, header["headers"], header["query"])
            target = Target(**header["target"])
            request = _CODECS[header["codec"]].decode(sent, signature_from(header["signature"]), target)
        check_rows(request, header["most_rows"])
        return packed_request(request)
    except Problem as exc:
        return {"status": exc.status, "message": exc.message}, []
    except MemoryError:
        limit = f"takes more than the {most} bytes of memory that one of its size gets"
        return {"status": 413, "message": f"reading the body of {len(body)} bytes {limit}."}, []
    except Exception as exc:  # noqa: BLE001 - what was sent did it; the server goes on
        return {"status": 400, "message": f"the body cannot be read: {type(exc).__name__}."}, []


def _of_message(body: bytes) -> InferRequest:
    sent = InferMessage(body)
    return request_from(sent.parsed(), sent.raw)


if __name__ == "__main__":
    main()
