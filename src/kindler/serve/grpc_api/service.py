"""The gRPC methods: each reads its message, asks the parts that HTTP asks too, and writes its answer.

Who may is decided before a message is read, so that nobody without a key can fill the server's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from kindler.errors import KindlerError
from kindler.serve.auth import Resource, Wanted, bare_name, bucket_of, check_limits, covers
from kindler.serve.deadlines import within
from kindler.serve.grpc_api.calls import Call
from kindler.serve.grpc_api.messages import HEALTH, INFERENCE, message, methods
from kindler.serve.grpc_api.tensors import InferMessage, TooManyFields, parsed, request_from, response_to
from kindler.serve.http_errors import Problem
from kindler.serve.predict_app import MOST_TEXTS, PREDICTS, Front
from kindler.serve.protocols.v2 import TooManyTexts
from kindler.serve.request_log import REQUEST_ID, Entry, request_id
from kindler.serve.requests import InferRequest
from kindler.serve.routes import Parts, check_ready
from kindler.serve.serializers import metadata_of, server_metadata
from kindler.serve.triton import (
    check_load_parameters,
    config_of,
    index_of,
    statistics_of,
    wanted_versions,
)
from kindler.store.keys import Key

__all__ = ["Service"]

_NAME = "grpc"
_LARGE_BYTES = 1 << 20  # of tensors that are not handled on the event loop
_SPARE_BYTES = 1 << 20  # of a message around its tensors
_HERE_BYTES, _THREAD_BYTES = 16 << 10, 1 << 18  # of a message without its raw tensors: where it is read
_FEW_FIELDS = 256  # of a message that is looked through on the event loop
_OPEN = Wanted(())
_MODEL = Wanted(("predict", "read"), filtered=True)
_ADMIN = Wanted(("admin",), filtered=True)
_NEEDS = {
    "ServerLive": _OPEN,
    "ServerReady": _OPEN,
    "ServerMetadata": _OPEN,
    "Check": _OPEN,
    "ModelReady": _MODEL,
    "ModelMetadata": _MODEL,
    "ModelConfig": _MODEL,
    "ModelStatistics": _MODEL,
    "ModelInfer": PREDICTS,
    "ModelStreamInfer": PREDICTS,
    "RepositoryIndex": Wanted(("read",), filtered=True),
    "RepositoryModelLoad": _ADMIN,
    "RepositoryModelUnload": _ADMIN,
}
_OK, _CANCELLED, _INVALID, _LATE, _NOT_FOUND, _EXISTS, _DENIED, _EXHAUSTED = 0, 1, 3, 4, 5, 6, 7, 8
_UNIMPLEMENTED, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 12, 13, 14, 16
_CODES = {  # by gRPC's numbers
    **dict.fromkeys((400, 415, 422), _INVALID),
    401: _UNAUTHENTICATED,
    403: _DENIED,
    404: _NOT_FOUND,
    409: _EXISTS,
    **dict.fromkeys((408, 504), _LATE),
    **dict.fromkeys((413, 429), _EXHAUSTED),
    499: _CANCELLED,
    501: _UNIMPLEMENTED,
    503: _UNAVAILABLE,
}

Method: TypeAlias = Callable[["_Asked", Any], Awaitable[Any]]


class _Asked:
    """One message of a call: its headers, its key and what is known of it."""

    __slots__ = ("bucket", "entry", "headers", "key", "until")

    def __init__(
        self, headers: Mapping[str, str], key: Key | None, entry: Entry, until: float | None
    ) -> None:
        self.headers = headers
        self.entry = entry
        self.key = key
        self.until = until
        self.bucket = bucket_of(headers, None)
        entry.bucket = self.bucket
        entry.key = None if key is None else key.id

    def check(self, name: str) -> None:
        """Check that the key is for a model."""
        check_limits(self.key, Resource(self.bucket, "models", bare_name(name)))

    def sees(self, shelf: str, name: str) -> bool:
        """Whether the key is for a name."""
        return covers(self.key, Resource(self.bucket, shelf, name))


class Service:
    """Answers calls.

    Args:
        front: Answers predictions.
        parts: Answers the rest.
    """

    def __init__(self, front: Front, parts: Parts) -> None:
        self._front = front
        self._parts = parts
        self._timeout_s = parts.settings.timeout_s
        self._most_bytes = parts.settings.body_bytes + _SPARE_BYTES
        self._methods: dict[str, Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "ModelInfer": self._infer,
            "ModelStreamInfer": self._infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "Check": self._check,
        }

        self._known = {
            f"/{service}/{name}": (name, self._methods[name], descriptor.input_type, descriptor.output_type)
            for service in (INFERENCE, HEALTH)
            for name, descriptor in methods(service).items()
        }

    async def answer(self, call: Call) -> None:
        """Answer a call, whatever happens."""
        started = time.perf_counter()
        head = call.head
        name = head.path.rpartition("/")[2]
        entry = _entry(head.headers, name, call.peer)
        try:
            if head.timeout_s is None:
                await self._answered(call, name, entry, None)
            else:
                with within(head.timeout_s):
                    await self._answered(call, name, entry, started + head.timeout_s)
        except asyncio.CancelledError:
            entry.status = 0 if call.streams else 499
            raise
        except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
            late = Problem(504, "the call did not end in the time that its client gave it.")
            problem = self._front.problem_of(late if isinstance(exc, TimeoutError) else exc, entry)
            entry.status = problem.status
            trailing = [(REQUEST_ID, entry.id)]
            trailing += [(key, value) for key, value in problem.headers.items() if key == "retry-after"]
            call.let_go()
            await asyncio.sleep(self._pause_after(exc, entry, started))
            call.finish(_CODES.get(problem.status, _INTERNAL), problem.message, trailing)
        finally:
            call.over()
            if entry.status:
                self._front.note(entry, time.perf_counter() - started)

    def _pause_after(self, error: Exception, entry: Entry, started: float) -> float:
        return self._front.bodies.pause_after(error, entry.bytes_in, time.perf_counter() - started)

    async def _answered(self, call: Call, name: str, entry: Entry, until: float | None) -> None:
        headers = call.head.headers
        known = self._known.get(call.head.path)
        key = await self._front.gate.admit(headers, _NEEDS.get(name, _ADMIN))
        if known is None:
            raise Problem(501, f"unknown method {call.head.path[:200]!r}.")
        if name == "ModelStreamInfer":
            await self._streamed(call, until)
            call.finish(_OK)
            return
        call.admitted()
        _, method, taken, given = known
        content = await call.message(self._most_bytes, self._timeout_s)
        if content is None:
            raise Problem(400, "the call has no message.")
        entry.bytes_in = len(content)
        entry.changes = name in ("RepositoryModelLoad", "RepositoryModelUnload")
        sent = content if name == "ModelInfer" else parsed(taken.full_name, content)
        reply = await method(_Asked(headers, key, entry, until), sent)
        if isinstance(reply, dict):
            reply = message(given.full_name)(**reply)
        answer = reply.SerializeToString()
        entry.status, entry.bytes_out = 200, len(answer)
        call.send(answer)
        call.finish(_OK, trailing=((REQUEST_ID, entry.id),))

    async def _streamed(self, call: Call, until: float | None) -> None:
        """Predictions one after the other; one that fails is an answer too, and does not end the stream."""
        reply = message("inference.ModelStreamInferResponse")
        headers = call.head.headers
        call.streams = True
        call.admitted()
        while (content := await call.message(self._most_bytes, self._timeout_s)) is not None:
            started = time.perf_counter()
            entry = _entry(headers, "ModelStreamInfer", call.peer)
            entry.bytes_in = len(content)
            try:
                key = await self._front.gate.admit(headers, PREDICTS)  # it may have been removed meanwhile
                answer = reply(infer_response=await self._infer(_Asked(headers, key, entry, until), content))
                entry.status = 200
            except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
                problem = self._front.problem_of(exc, entry)
                entry.status = problem.status
                answer = reply(error_message=problem.message)
                answer.infer_response.id = _id_of(content)
                await asyncio.sleep(self._pause_after(exc, entry, started))
            packed = answer.SerializeToString()
            entry.bytes_out = len(packed)
            self._front.note(entry, time.perf_counter() - started)
            call.send(packed)
            call.let_go()
            await call.drained()

    async def _live(self, asked: _Asked, sent: Any) -> Any:
        return {"live": True}

    async def _ready(self, asked: _Asked, sent: Any) -> Any:
        return {"ready": await self._is_ready()}

    async def _server(self, asked: _Asked, sent: Any) -> Any:
        return server_metadata()

    async def _check(self, asked: _Asked, sent: Any) -> Any:
        if sent.service not in ("", INFERENCE):
            raise Problem(404, f"unknown service {sent.service[:100]!r}.")
        return {"status": 1 if await self._is_ready() else 2}

    async def _is_ready(self) -> bool:
        try:
            await check_ready(self._parts)
        except (KindlerError, Problem):
            return False
        return True

    async def _model_ready(self, asked: _Asked, sent: Any) -> Any:
        asked.check(sent.name)
        try:
            resident = await self._parts.residents.find((asked.bucket, sent.name, sent.version or None))
        except Problem:
            return {"ready": False}
        return {"ready": not resident.batcher.is_stuck}

    async def _metadata(self, asked: _Asked, sent: Any) -> Any:
        return metadata_of(await self._resident(asked, sent))

    async def _config(self, asked: _Asked, sent: Any) -> Any:
        return {"config": config_of(await self._resident(asked, sent), self._parts.settings)}

    async def _resident(self, asked: _Asked, sent: Any) -> Any:
        asked.check(sent.name)
        return await self._parts.residents.find((asked.bucket, sent.name, sent.version or None))

    async def _statistics(self, asked: _Asked, sent: Any) -> Any:
        residents = self._parts.residents
        if not sent.name:
            return statistics_of(
                self._parts.stats, residents, asked.bucket, lambda name, _: asked.sees("models", name)
            )
        asked.check(sent.name)
        wanted = await wanted_versions(residents, (asked.bucket, sent.name, sent.version or None))
        return statistics_of(self._parts.stats, residents, asked.bucket, wanted)

    async def _index(self, asked: _Asked, sent: Any) -> Any:
        parts = self._parts
        return {
            "models": await parts.in_thread(
                lambda: index_of(parts.omega, parts.residents, asked.bucket, asked.sees, ready=sent.ready)
            )
        }

    async def _load(self, asked: _Asked, sent: Any) -> Any:
        asked.check(sent.model_name)
        check_load_parameters(sent.parameters)
        await self._parts.residents.load(asked.bucket, sent.model_name)
        return {}

    async def _unload(self, asked: _Asked, sent: Any) -> Any:
        asked.check(sent.model_name)
        await self._parts.residents.unload(asked.bucket, sent.model_name)
        return {}

    async def _infer(self, asked: _Asked, content: bytes) -> Any:
        try:
            sent = InferMessage(content, _FEW_FIELDS)
        except TooManyFields:
            sent = await asyncio.to_thread(InferMessage, content)
        size = len(sent.rest)
        if size <= _THREAD_BYTES:
            told = await asyncio.to_thread(sent.parsed) if size > _HERE_BYTES else sent.parsed()
        else:
            told = sent.without_tensors()
        asked.check(told.model_name)

        async def decode(_: Any) -> InferRequest:
            try:
                if size > _THREAD_BYTES:
                    raise TooManyTexts
                if size > _HERE_BYTES or len(content) > _LARGE_BYTES:
                    request = await asyncio.to_thread(request_from, told, sent.raw, most_texts=MOST_TEXTS)
                else:
                    request = request_from(told, sent.raw, most_texts=MOST_TEXTS)
            except TooManyTexts:
                request = await self._front.readers.message(content)
            if asked.until is not None:
                left = asked.until - time.perf_counter()
                request.timeout_s = max(1e-3, min(left, request.timeout_s or left))
            return request

        name = (asked.bucket, told.model_name, told.model_version or None)
        answer, request = await self._front.infer(name, decode, asked.headers, asked.entry)
        if sum(array.nbytes for array in answer.outputs.values()) > _LARGE_BYTES:
            return await asyncio.to_thread(response_to, answer, request)
        return response_to(answer, request)


def _id_of(content: bytes) -> str:
    """The id of a prediction that failed, as far as it can be read."""
    try:
        return str(InferMessage(content).without_tensors().id)
    except Problem:
        return ""


def _entry(headers: Mapping[str, str], name: str, peer: str) -> Entry:
    entry = Entry(request_id(headers), "gRPC", name, _NAME)
    entry.client = peer
    entry.trace = headers.get("traceparent", "")
    return entry
