"""The gRPC methods: each reads its message, asks the parts that HTTP asks too, and writes its answer.

Who may is decided before a message is read, so that nobody without a key can fill the server's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from kindler.errors import KindlerError
from kindler.serve.auth import Resource, Wanted, bare_name, bucket_of, check_limits, covers
from kindler.serve.grpc_api.messages import HEALTH, INFERENCE, message, methods
from kindler.serve.grpc_api.tensors import request_from, response_to
from kindler.serve.http_errors import Problem
from kindler.serve.predict_app import PREDICTS, Front
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

__all__ = ["Admission", "handlers"]

_NAME = "grpc"
_LARGE_BYTES = 1 << 20  # of a message whose tensors are not handled on the event loop
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
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

# What the admission of a call found, for the method that answers it in the same task.
_admitted: ContextVar[tuple[dict[str, str], Key | None]] = ContextVar("kindler_admitted")

Context: TypeAlias = Any  # grpc.aio.ServicerContext
Method: TypeAlias = Callable[["_Asked", Any], Awaitable[Any]]


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the right key before their message is read.

    Args:
        front: Knows the keys, and writes down what was refused.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The method that answers; one that refuses if the key is not good for it."""
        name = details.method.rpartition("/")[2]
        headers = _headers(details.invocation_metadata)
        started = time.perf_counter()
        try:
            _admitted.set((headers, await self._front.gate.admit(headers, _NEEDS.get(name, _ADMIN))))
        except (Problem, KindlerError) as exc:
            entry = _entry(headers, name, "")
            problem = self._front.problem_of(exc, entry)
            entry.status = problem.status

            async def refuse(_: Any, context: Context) -> None:
                entry.client = context.peer()
                self._front.note(entry, time.perf_counter() - started)
                await _abort(context, problem, entry)

            # A method with streams, as only they are called before there is a message.
            return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(details)


class _Asked:
    """One call: its headers, its key and what is known of it."""

    __slots__ = ("bucket", "context", "entry", "headers", "key")

    def __init__(self, headers: Mapping[str, str], key: Key | None, context: Context, entry: Entry) -> None:
        self.headers = headers
        self.context = context
        self.entry = entry
        self.key = key
        self.bucket = bucket_of(headers, None)
        entry.bucket = self.bucket
        entry.key = None if key is None else key.id

    def check(self, name: str) -> None:
        """Check that the key is for a model."""
        check_limits(self.key, Resource(self.bucket, "models", bare_name(name)))

    def sees(self, shelf: str, name: str) -> bool:
        """Whether the key is for a name."""
        return covers(self.key, Resource(self.bucket, shelf, name))


def handlers(front: Front, parts: Parts) -> list[Any]:
    """The services, as gRPC's server takes them."""
    service = _Service(front, parts)
    return [
        _handler(service, INFERENCE),
        _handler(service, HEALTH),
    ]


def _handler(service: _Service, name: str) -> Any:
    made = {}
    for method, descriptor in methods(name).items():
        taken, given = message(descriptor.input_type.full_name), message(descriptor.output_type.full_name)
        coding = {"request_deserializer": taken.FromString, "response_serializer": given.SerializeToString}
        if method == "ModelStreamInfer":
            made[method] = grpc.stream_stream_rpc_method_handler(service.stream, **coding)
        else:
            made[method] = grpc.unary_unary_rpc_method_handler(service.unary(method, given), **coding)
    return grpc.method_handlers_generic_handler(name, made)


class _Service:
    def __init__(self, front: Front, parts: Parts) -> None:
        self._front = front
        self._parts = parts
        self._methods: dict[str, Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "ModelInfer": self._infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "Check": self._check,
        }

    def unary(self, name: str, given: Any) -> Any:
        """A method with one message and one answer."""
        method, changes = self._methods[name], name in ("RepositoryModelLoad", "RepositoryModelUnload")

        async def answer(sent: Any, context: Context) -> Any:
            started = time.perf_counter()
            headers, key = _admitted.get()
            entry = _entry(headers, name, context.peer())
            entry.changes = changes
            entry.bytes_in = sent.ByteSize()
            try:
                reply = await method(_Asked(headers, key, context, entry), sent)
                reply = given(**reply) if isinstance(reply, dict) else reply
                entry.status, entry.bytes_out = 200, reply.ByteSize()
                context.set_trailing_metadata(((REQUEST_ID, entry.id),))
                return reply
            except asyncio.CancelledError:
                entry.status = 499
                raise
            except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
                problem = self._front.problem_of(exc, entry)
                entry.status = problem.status
                await _abort(context, problem, entry)
            finally:
                self._front.note(entry, time.perf_counter() - started)

        return answer

    async def stream(self, messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        """Predictions one after the other; one that fails is an answer too, and does not end the stream."""
        reply = message("inference.ModelStreamInferResponse")
        headers, _ = _admitted.get()
        async for sent in messages:
            started = time.perf_counter()
            entry = _entry(headers, "ModelStreamInfer", context.peer())
            entry.bytes_in = sent.ByteSize()
            try:
                key = await self._front.gate.admit(headers, PREDICTS)  # it may have been removed meanwhile
                asked = _Asked(headers, key, context, entry)
                answer = reply(infer_response=await self._infer(asked, sent))
                entry.status, entry.bytes_out = 200, answer.ByteSize()
            except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
                problem = self._front.problem_of(exc, entry)
                entry.status = problem.status
                answer = reply(error_message=problem.message)
                answer.infer_response.id = sent.id
            self._front.note(entry, time.perf_counter() - started)
            yield answer

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

    async def _infer(self, asked: _Asked, sent: Any) -> Any:
        asked.check(sent.model_name)
        large = asked.entry.bytes_in > _LARGE_BYTES

        async def decode(_: Any) -> InferRequest:
            request = await asyncio.to_thread(request_from, sent) if large else request_from(sent)
            left = asked.context.time_remaining()
            if left is not None:
                request.timeout_s = max(1e-3, min(left, request.timeout_s or left))
            return request

        with self._front.bodies.holding(asked.entry.bytes_in):
            name = (asked.bucket, sent.model_name, sent.model_version or None)
            answer, request = await self._front.infer(name, decode, asked.headers, asked.entry)
            if sum(array.nbytes for array in answer.outputs.values()) > _LARGE_BYTES:
                return await asyncio.to_thread(response_to, answer, request)
            return response_to(answer, request)


async def _abort(context: Context, problem: Problem, entry: Entry) -> None:
    trailing = [(REQUEST_ID, entry.id)]
    trailing += [(name, value) for name, value in problem.headers.items() if name == "retry-after"]
    code = _CODES.get(problem.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, problem.message, tuple(trailing))


def _headers(metadata: Any) -> dict[str, str]:
    return {key.lower(): value for key, value in metadata or () if isinstance(value, str)}


def _entry(headers: Mapping[str, str], name: str, peer: str) -> Entry:
    entry = Entry(request_id(headers), "gRPC", name, _NAME)
    entry.client = peer
    entry.trace = headers.get("traceparent", "")
    return entry
