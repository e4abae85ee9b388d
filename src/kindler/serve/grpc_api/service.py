"""The gRPC methods: each reads its message, asks the parts that HTTP asks too, and writes its answer.

Who may is decided before a message is read. Methods that need no key read none at all: grpcio has one limit
for the messages of all methods, and takes a message in whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from kindler.errors import KindlerError
from kindler.serve.auth import Access, bucket_of
from kindler.serve.grpc_api.limits import Shares, Upload, Uploads
from kindler.serve.grpc_api.messages import INFERENCE, descriptors, message, methods
from kindler.serve.grpc_api.tensors import InferMessage, TooManyFields, parsed, request_from, response_to
from kindler.serve.http_errors import Problem
from kindler.serve.model_views import (
    check_load_parameters,
    model_metadata,
    server_metadata,
    triton_config,
    triton_index,
    triton_statistics,
)
from kindler.serve.predictions import LARGE_BYTES, MOST_TEXTS, Predictions, problem_of
from kindler.serve.predictions import SCOPES as PREDICT
from kindler.serve.protocols.v2 import TooManyTexts
from kindler.serve.request_log import REQUEST_ID, Entry, request_id
from kindler.serve.requests import InferRequest
from kindler.store.keys import SCOPES

_NAME = "grpc"
_HEALTH = "grpc.health.v1.Health"
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
_SPARE_BYTES = 1 << 20  # of a message around its tensors
_SMALL_BYTES = 64 << 10  # of a message that has no tensors
_HERE_BYTES, _THREAD_BYTES = 16 << 10, 1 << 18  # of a message without its raw tensors: where it is read
_FEW_FIELDS = 256  # of a message that is looked through on the event loop
_MOST_CALLS = 1024  # at a time, of those with a key and of those without one
_CALLS_OF_A_KEY, _CALLS_OF_A_CONNECTION = 512, 100
_AT_HAND_S = 0.05  # a message that takes longer is watched
_WATCH_S = 5.0  # between two looks at the server's health
_MOST_TEXT = 4000
_OPEN: tuple[str, ...] = ()
_MODEL, _ADMIN = ("predict", "read"), ("admin",)
_Code = grpc.StatusCode
_CODES = {
    **dict.fromkeys((400, 415, 422), _Code.INVALID_ARGUMENT),
    401: _Code.UNAUTHENTICATED,
    403: _Code.PERMISSION_DENIED,
    404: _Code.NOT_FOUND,
    409: _Code.ALREADY_EXISTS,
    **dict.fromkeys((408, 504), _Code.DEADLINE_EXCEEDED),
    **dict.fromkeys((413, 429), _Code.RESOURCE_EXHAUSTED),
    499: _Code.CANCELLED,
    501: _Code.UNIMPLEMENTED,
    503: _Code.UNAVAILABLE,
}

_Refusal: TypeAlias = tuple[Problem, float] | BaseException  # what to say after how long, or what to raise
Answer: TypeAlias = Callable[["_Call", Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Method:
    """A method of a service.

    Attributes:
        scopes: Who may call it.
        answer: What answers its message; a stream's reads its messages itself.
        request: The class of its message; bytes if it is not parsed here, None if it is not read.
        response: The class of its answer.
    """

    name: str
    scopes: tuple[str, ...]
    answer: Answer
    request: Any = None
    response: Any = None


class _Call:
    """One call: its headers, its key and what it holds until it is over."""

    __slots__ = ("_ending", "_releases", "access", "context", "entry", "headers", "peer", "until")

    def __init__(self, context: Any, name: str) -> None:
        self.context = context
        self.headers = _headers(context.invocation_metadata())
        self.peer: str = context.peer()
        self.access = Access(None, "default")
        left = context.time_remaining()
        self.until = None if left is None else time.perf_counter() + left
        self.entry = _entry(self, name)
        self._releases: list[Callable[[], None]] = []
        # Not the context's own callbacks: with one, it would be kept, and what it has not sent, until Python
        # looks for garbage.
        running = asyncio.current_task()
        assert running is not None
        running.add_done_callback(self._over)
        context.set_trailing_metadata(((REQUEST_ID, self.entry.id),))

    @property
    def client(self) -> str:
        """Who sends it: a key, or a connection where no keys are needed."""
        return self.access.key_id or self.peer

    def holds(self, give_back: Callable[[], None]) -> None:
        """It holds something until its answer was sent."""
        self._releases.append(give_back)

    def let_go(self, *, keep: int = 0) -> None:
        """Give back what it holds, but for the first of it."""
        while len(self._releases) > keep:
            self._releases.pop()()

    def end(self, problem: Problem) -> None:
        """End it while it waits for something."""
        self.entry.status = problem.status
        self._ending = asyncio.get_running_loop().create_task(self.refuse(problem))

    async def refuse(self, problem: Problem) -> BaseException:
        """End it with an error; what then has to be raised."""
        more = [(key, value) for key, value in problem.headers.items() if key == "retry-after"]
        trailing = ((REQUEST_ID, self.entry.id), *more)
        code = _CODES.get(problem.status, _Code.INTERNAL)
        try:
            await self.context.abort(code, problem.message[:_MOST_TEXT], trailing)
        except grpc.aio.AbortError as exc:
            ended: BaseException = exc.with_traceback(None)  # the context has it, and its frames the context
            return ended
        except grpc.aio.BaseError:
            pass  # grpcio has ended the call itself: its message was too large, or its client has gone
        return asyncio.CancelledError()

    def name(self, name: str, version: str = "") -> tuple[str, str, str | None]:
        """A model that its key covers, as `ModelRegistry` names it."""
        self.access.check("models", name)
        return self.access.bucket, name, version or None

    def _over(self, _: Any) -> None:
        self.let_go()


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers calls; `most_bytes` is the largest message."""

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        self._models = predictions.models
        settings = predictions.settings
        self._timeout_s = settings.timeout_s
        self.most_bytes = settings.body_bytes + _SPARE_BYTES
        self._lobby = Shares(_MOST_CALLS, _CALLS_OF_A_CONNECTION, "calls without a key")
        self._calls = Shares(_MOST_CALLS, _CALLS_OF_A_KEY, "calls")
        most = settings.queue_bytes
        self._answers = Shares(most, most // 2, "bytes of answers that are still unread")
        self._uploads = Uploads(most, lambda: predictions.bodies.held_bytes)
        self._reflection = reflection.ReflectionServicer((INFERENCE, _HEALTH, _REFLECTION), _pool())
        self._handlers = self._made()

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call; None for an unknown method."""
        return self._handlers.get(handler_call_details.method)

    def _made(self) -> dict[str, Any]:
        known: dict[str, tuple[tuple[str, ...], Answer]] = {
            "ServerLive": (_OPEN, self._live),
            "ServerReady": (_OPEN, self._ready),
            "ServerMetadata": (_OPEN, self._server),
            "ModelReady": (_MODEL, self._model_ready),
            "ModelMetadata": (_MODEL, self._metadata),
            "ModelConfig": (_MODEL, self._config),
            "ModelStatistics": (_MODEL, self._statistics),
            "ModelInfer": (PREDICT, self._infer),
            "RepositoryIndex": (("read",), self._index),
            "RepositoryModelLoad": (_ADMIN, self._load),
            "RepositoryModelUnload": (_ADMIN, self._unload),
        }
        described = methods(INFERENCE)
        made = {}
        for name, (scopes, answer) in known.items():
            request = message(described[name].input_type.full_name) if scopes else None
            request = bytes if name == "ModelInfer" else request
            response = message(described[name].output_type.full_name)
            method = _Method(name, scopes, answer, request, response)
            made[f"/{INFERENCE}/{name}"] = _unary(self._answer, method)
        check = _Method("Check", _OPEN, self._check, None, health_pb2.HealthCheckResponse)
        made[f"/{_HEALTH}/Check"] = _unary(self._answer, check)
        streams = {
            f"/{INFERENCE}/ModelStreamInfer": (PREDICT, self._infers),
            f"/{_HEALTH}/Watch": (SCOPES, self._watch),
            f"/{_REFLECTION}/ServerReflectionInfo": (SCOPES, self._reflect),
            f"/{_REFLECTION.replace('v1alpha', 'v1')}/ServerReflectionInfo": (SCOPES, self._reflect),
        }
        for path, (scopes, answer) in streams.items():
            method = _Method(path.rpartition("/")[2], scopes, answer)
            made[path] = grpc.stream_stream_rpc_method_handler(partial(self._stream, method))
        return made

    async def _answer(self, method: _Method, _: Any, context: Any) -> bytes:
        """Answer a call of one message."""
        started = time.perf_counter()
        call = _Call(context, method.name)
        try:
            return await self._answered(call, method)
        except asyncio.CancelledError:
            call.entry.status = 499
            raise
        except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
            refusal = self._refusal(call, exc, started)
        finally:
            if call.entry.status:
                self._predictions.note(call.entry, time.perf_counter() - started)
        error = await self._refused(call, refusal)
        del call, context, _  # the context has the error, whose frame this is
        raise error

    async def _answered(self, call: _Call, method: _Method) -> bytes:
        await self._admit(call, method.scopes)
        sent = None if method.request is None else await self._sent(call, method)
        reply = await method.answer(call, sent)
        answer = reply if isinstance(reply, bytes) else method.response(**reply).SerializeToString()
        call.entry.status, call.entry.bytes_out = 200, len(answer)
        return answer

    async def _stream(self, method: _Method, _: Any, context: Any) -> None:
        """Answer a call of many messages; each prediction is noted by itself."""
        started = time.perf_counter()
        call = _Call(context, method.name)
        try:
            await self._admit(call, method.scopes)
            await method.answer(call, None)
            return
        except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
            refusal = self._refusal(call, exc, started)
            if call.entry.status:
                self._predictions.note(call.entry, time.perf_counter() - started)
        error = await self._refused(call, refusal)
        del call, context, _
        raise error

    def _refusal(self, call: _Call, error: Exception, started: float) -> _Refusal:
        """What to do about an error. Without the error itself, which holds all that the call has read."""
        if isinstance(error, grpc.aio.AbortError):  # the client was told
            ended: BaseException = error.with_traceback(None)
            return ended
        if isinstance(error, grpc.aio.BaseError):  # the client has gone
            call.entry.status = 499
            return asyncio.CancelledError()
        problem = problem_of(error, call.entry)
        call.entry.status = problem.status
        call.let_go()
        seconds = time.perf_counter() - started
        pause_s = self._predictions.bodies.pause_after(error, call.entry.bytes_in, seconds)
        return Problem(problem.status, problem.message, problem.headers), pause_s

    async def _refused(self, call: _Call, refusal: _Refusal) -> BaseException:
        """Tell the client; what then has to be raised."""
        if not isinstance(refusal, tuple):
            return refusal
        problem, pause_s = refusal
        await asyncio.sleep(pause_s)
        return await call.refuse(problem)

    async def _admit(self, call: _Call, scopes: tuple[str, ...]) -> None:
        call.holds(self._lobby.take(call.peer))
        await self._authorize(call, scopes)
        if scopes:
            call.let_go()
            call.holds(self._calls.take(call.client))

    async def _authorize(self, call: _Call, scopes: tuple[str, ...]) -> None:
        entry = call.entry
        entry.bucket = bucket_of(call.headers, None)
        authorizer = self._predictions.authorizer
        call.access = await authorizer.authorize(call.headers, entry.bucket, scopes, limited=True)
        entry.key = call.access.key_id

    async def _message(self, call: _Call, *, waits: bool = False) -> bytes | None:
        """The next message of a call that was admitted; None if there is none."""
        until = None if waits else time.monotonic() + self._timeout_s
        upload = Upload(call.client, call.end, until)
        timer = asyncio.get_running_loop().call_later(_AT_HAND_S, self._uploads.add, upload)
        try:
            content = await call.context.read()
        finally:
            timer.cancel()
            self._uploads.remove(upload)
        return None if content is grpc.aio.EOF else content

    async def _sent(self, call: _Call, method: _Method) -> Any:
        content = await self._message(call)
        if content is None:
            raise Problem(400, "the call has no message.")
        call.entry.bytes_in = len(content)
        call.entry.changes = method.scopes is _ADMIN
        return content if method.request is bytes else _small(method.request, content)

    async def _infers(self, call: _Call, _: Any) -> None:
        """Predictions one after the other; one that fails is an answer too, and does not end the stream."""
        reply = message("inference.ModelStreamInferResponse")
        while (content := await self._message(call, waits=True)) is not None:
            started = time.perf_counter()
            call.entry = entry = _entry(call, "ModelStreamInfer")
            entry.bytes_in = len(content)
            try:
                await self._authorize(call, PREDICT)  # the key may have been removed
                packed = await self._infer(call, content, in_stream=True)
                entry.status, entry.bytes_out = 200, len(packed)
                await call.context.write(packed)
            except grpc.aio.BaseError:
                raise  # its client has gone
            except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
                problem = problem_of(exc, entry)
                entry.status = problem.status
                answer = reply(error_message=problem.message)
                answer.infer_response.id = _id_of(content)
                seconds = time.perf_counter() - started
                await asyncio.sleep(self._predictions.bodies.pause_after(exc, len(content), seconds))
                await call.context.write(answer.SerializeToString())
            finally:
                call.let_go(keep=1)  # its place among the calls
                if entry.status:
                    self._predictions.note(entry, time.perf_counter() - started)

    async def _watch(self, call: _Call, _: Any) -> None:
        """The server's health, and then each change of it."""
        asked = _small(health_pb2.HealthCheckRequest, await self._message(call) or b"")
        last = None
        while True:
            status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if asked.service in ("", INFERENCE):
                status = await self._status()
            if status != last:
                await call.context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
            last = status
            await asyncio.sleep(_WATCH_S)

    async def _reflect(self, call: _Call, _: Any) -> None:
        async def requests() -> AsyncIterator[Any]:
            while (content := await self._message(call, waits=True)) is not None:
                yield _small(reflection_pb2.ServerReflectionRequest, content)

        async for response in self._reflection.ServerReflectionInfo(requests(), None):
            await call.context.write(response.SerializeToString())

    async def _live(self, call: _Call, sent: Any) -> Any:
        return {"live": True}

    async def _ready(self, call: _Call, sent: Any) -> Any:
        return {"ready": await self._status() == health_pb2.HealthCheckResponse.SERVING}

    async def _server(self, call: _Call, sent: Any) -> Any:
        return server_metadata()

    async def _check(self, call: _Call, _: Any) -> Any:
        """Health: of the server as a whole for who has no key, whose message is not read."""
        try:
            await self._authorize(call, SCOPES)
        except Problem:
            return {"status": await self._status()}
        service = _small(health_pb2.HealthCheckRequest, await self._message(call) or b"").service
        if service not in ("", INFERENCE):
            raise Problem(404, f"unknown service {service[:100]!r}.")
        return {"status": await self._status()}

    async def _status(self) -> Any:
        try:
            await self._models.check_ready()
        except (KindlerError, Problem):
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING

    async def _model_ready(self, call: _Call, sent: Any) -> Any:
        name = call.name(sent.name, sent.version)
        try:
            return {"ready": not (await self._models.find(name)).batcher.is_stuck}
        except Problem:
            return {"ready": False}

    async def _metadata(self, call: _Call, sent: Any) -> Any:
        return await model_metadata(self._models, call.name(sent.name, sent.version))

    async def _config(self, call: _Call, sent: Any) -> Any:
        return {"config": await triton_config(self._models, call.name(sent.name, sent.version))}

    async def _statistics(self, call: _Call, sent: Any) -> Any:
        access = call.access
        if sent.name:
            call.name(sent.name)
        version = sent.version or None
        return await triton_statistics(self._models, access.bucket, access.covers, sent.name, version)

    async def _index(self, call: _Call, sent: Any) -> Any:
        listed = partial(triton_index, self._models, call.access.bucket, call.access.covers, ready=sent.ready)
        return {"models": await asyncio.to_thread(listed)}

    async def _load(self, call: _Call, sent: Any) -> Any:
        bucket, name, _ = call.name(sent.model_name)
        check_load_parameters(sent.parameters)
        await self._models.load(bucket, name)
        return {}

    async def _unload(self, call: _Call, sent: Any) -> Any:
        bucket, name, _ = call.name(sent.model_name)
        await self._models.unload(bucket, name)
        return {}

    async def _infer(self, call: _Call, content: bytes, *, in_stream: bool = False) -> bytes:
        with self._predictions.bodies.holding(content):
            return await self._inferred(call, content, in_stream=in_stream)

    async def _inferred(self, call: _Call, content: bytes, *, in_stream: bool) -> bytes:
        try:
            sent = InferMessage(content, _FEW_FIELDS)
        except TooManyFields:
            sent = await asyncio.to_thread(InferMessage, content)
        size = len(sent.rest)
        if size <= _THREAD_BYTES:
            fields = await asyncio.to_thread(sent.parsed) if size > _HERE_BYTES else sent.parsed()
        else:
            fields = sent.without_tensors()
        name = call.name(fields.model_name, fields.model_version)

        async def decode(_: Any) -> InferRequest:
            try:
                if size > _THREAD_BYTES:
                    raise TooManyTexts
                if size > _HERE_BYTES or len(content) > LARGE_BYTES:
                    request = await asyncio.to_thread(request_from, fields, sent.raw, most_texts=MOST_TEXTS)
                else:
                    request = request_from(fields, sent.raw, most_texts=MOST_TEXTS)
            except TooManyTexts:
                request = await self._predictions.readers.message(content)
            if call.until is not None:
                left = call.until - time.perf_counter()
                request.timeout_s = max(1e-3, min(left, request.timeout_s or left))
            return request

        answer, request = await self._predictions.infer(name, decode, call.headers, call.entry)
        size = sum(array.nbytes for array in answer.outputs.values())
        if size > _SMALL_BYTES:
            call.holds(self._answers.take(call.client, size))
        if size > LARGE_BYTES:
            return await asyncio.to_thread(response_to, answer, request, in_stream=in_stream)
        return response_to(answer, request, in_stream=in_stream)


def _id_of(content: bytes) -> str:
    """The id of a prediction that failed, as far as it can be read."""
    try:
        return str(InferMessage(content).without_tensors().id)
    except Problem:
        return ""


def _entry(call: _Call, name: str) -> Entry:
    entry = Entry(request_id(call.headers), "gRPC", name, _NAME, counted=True)
    entry.client = unquote(call.peer).partition(":")[2].rpartition(":")[0].strip("[]")  # "ipv6:%5B::1%5D:50"
    entry.trace = call.headers.get("traceparent", "")
    return entry


def _headers(metadata: Any) -> Mapping[str, str]:
    """Header fields by name, without those of bytes; several of one name are joined."""
    headers: dict[str, str] = {}
    for name, value in metadata:
        if isinstance(value, str):
            headers[name] = f"{headers[name]},{value}" if name in headers else value
    return headers


def _small(kind: Any, content: bytes) -> Any:
    if len(content) > _SMALL_BYTES:
        raise Problem(413, f"the message has {len(content)} bytes; at most {_SMALL_BYTES} are allowed.")
    return parsed(kind, content)


def _unary(answer: Callable[..., Awaitable[bytes]], method: _Method) -> Any:
    """A handler that reads its message itself: grpcio would read one before it asks who sends it."""
    return grpc.stream_unary_rpc_method_handler(partial(answer, method))


def _pool() -> Any:
    """The messages of all services."""
    pool = descriptors()
    for described in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(described.serialized_pb)
    return pool
