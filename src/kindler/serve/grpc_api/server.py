"""The gRPC server beside the HTTP server: its port, its limits and its methods.

Each method reads its message, asks the parts that HTTP asks too, and writes its answer. Who may is decided
before a message is read. Methods that need no key read none at all: grpcio has one limit for the messages of
all methods, and takes a message in whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what clients do wrong is no news; must be set before grpc

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from kindler.errors import ConfigError, KindlerError
from kindler.serve.auth import Access
from kindler.serve.grpc_api.limits import Shares, Upload, Uploads
from kindler.serve.grpc_api.messages import (
    INFERENCE,
    InferMessage,
    TooManyFields,
    descriptors,
    message,
    parsed,
    request_from,
    response_to,
)
from kindler.serve.http_errors import Problem
from kindler.serve.model_views import (
    check_load_parameters,
    model_metadata,
    server_metadata,
    triton_config,
    triton_index,
    triton_statistics,
)
from kindler.serve.predictions import LARGE_BYTES, MOST_TEXTS, Predictions, in_thread_if, problem_of
from kindler.serve.predictions import SCOPES as PREDICT
from kindler.serve.protocols import InferRequest
from kindler.serve.protocols.v2 import TooManyTexts
from kindler.serve.request_log import REQUEST_ID, Entry
from kindler.serve.settings import Tls
from kindler.store.keys import SCOPES

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
_OPTIONS = {
    "grpc.max_send_message_length": -1,
    "grpc.max_metadata_size": 64 << 10,
    "grpc.so_reuseport": 0,  # two servers on one port would be a mistake
    "grpc.max_concurrent_streams": 100,  # calls of one connection at a time; clients keep others waiting
    "grpc.http.overload_protection": 0,  # it refuses calls of clients that keep to the limit
    "grpc.http2.lookahead_bytes": 64 << 10,  # what a call may send before it is known who sends it
    "grpc.http2.bdp_probe": 0,  # it would widen the windows of those who are not known yet
    "grpc.server_handshake_timeout_ms": 20_000,
    "grpc.max_connection_idle_ms": 300_000,
    "grpc.max_connection_age_ms": 3_600_000,  # until a connection takes no more calls,
    "grpc.max_connection_age_grace_ms": 3_600_000,  # and then of its last ones
    "grpc.keepalive_time_ms": 60_000,  # without a word before a client is asked whether it is there,
    "grpc.keepalive_timeout_ms": 60_000,  # and after
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,
    "grpc.http2.max_ping_strikes": 2,
}
_CONNECTIONS = 4096  # or a quarter of the files that the process may open
_THREADS, _NICE = ("event_engine", "lifeguard", "grpc_"), 10  # which start others of their own kind

Answer: TypeAlias = Callable[["_Call", Any], Awaitable[Any]]


@dataclass(slots=True)
class _Method:
    """A method of a service.

    Attributes:
        scopes: Who may call it.
        answer: What answers its message; a stream's reads and writes messages itself.
        request: The class of its message; bytes if it is not parsed here, None if it is not read.
        response: The class of its answer; None for a stream.
    """

    name: str
    scopes: tuple[str, ...]
    answer: Answer
    request: Any = None
    response: Any = None


class _Call:
    """One call: its headers, its key and what it holds until it is over."""

    __slots__ = ("_ending", "_method", "_releases", "access", "context", "entry", "headers", "peer", "until")

    def __init__(self, context: Any, method: str) -> None:
        self.context = context
        self.headers: dict[str, str] = {}
        for name, value in context.invocation_metadata():
            if isinstance(value, str):  # not the fields of bytes
                self.headers[name] = f"{self.headers[name]},{value}" if name in self.headers else value
        self.peer: str = context.peer()
        self.access = Access(None, "default")
        left = context.time_remaining()
        self.until = None if left is None else time.perf_counter() + left
        self._method = method
        self.entry = self.new_entry()
        self._releases: list[Callable[[], None]] = []
        # Not the context's own callbacks: with one, it would be kept, and what it has not sent, until Python
        # looks for garbage.
        running = asyncio.current_task()
        assert running is not None
        running.add_done_callback(lambda _: self.let_go())
        context.set_trailing_metadata(((REQUEST_ID, self.entry.id),))

    @property
    def client(self) -> str:
        """Who sends it: a key, or a connection where no keys are needed."""
        return self.access.key_id or self.peer

    def new_entry(self) -> Entry:
        client = unquote(self.peer).partition(":")[2].rpartition(":")[0].strip("[]")  # "ipv6:%5B::1%5D:50"
        entry = Entry.of(self.headers, "gRPC", self._method, "grpc", client)
        entry.counted = True
        return entry

    def holds(self, give_back: Callable[[], None]) -> None:
        """It holds something until its answer was sent."""
        self._releases.append(give_back)

    def let_go(self, *, keep: int = 0) -> None:
        """Give back what it holds, but for the first of it."""
        while len(self._releases) > keep:
            self._releases.pop()()

    def end(self, problem: Problem) -> None:
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


class GrpcServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers gRPC on a port of its own, on the event loop of the HTTP server."""

    def __init__(self, predictions: Predictions, host: str, port: int, tls: Tls | None = None) -> None:
        self._predictions = predictions
        self._models = predictions.models
        self._settings = predictions.settings
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._tls = tls
        self._server: Any = None
        self.port = port
        self._lobby = Shares(_MOST_CALLS, _CALLS_OF_A_CONNECTION, "calls without a key")
        self._calls = Shares(_MOST_CALLS, _CALLS_OF_A_KEY, "calls")
        most = self._settings.queue_bytes
        self._answers = Shares(most, most // 2, "bytes of unread responses")
        self._uploads = Uploads(most, lambda: predictions.bodies.held_bytes)
        pool = descriptors()
        for described in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            pool.AddSerializedFile(described.serialized_pb)
        self._reflection = reflection.ReflectionServicer((INFERENCE, _HEALTH, _REFLECTION), pool)
        self._handlers = self._methods()

    async def start(self) -> None:
        # A call whose client has gone is not worth a traceback; what goes wrong is logged here.
        logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: record.exc_info is None)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connections = max(16, files // 4) if files > 0 else _CONNECTIONS
        limits = {
            "grpc.max_receive_message_length": self._settings.body_bytes + _SPARE_BYTES,
            "grpc.max_allowed_incoming_connections": min(_CONNECTIONS, connections),
        }
        self._server = grpc.aio.server(options=[*_OPTIONS.items(), *limits.items()])
        self._server.add_generic_rpc_handlers((self,))
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, _credentials(self._tls))
        except RuntimeError as exc:
            raise ConfigError(f"cannot listen on {self._address} for gRPC: {exc}.") from exc
        await self._server.start()
        _let_others_go_first()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those that run end within so many seconds."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    def _methods(self) -> dict[str, Any]:
        known: dict[tuple[str, str], tuple[tuple[str, ...], Answer]] = {
            (INFERENCE, "ServerLive"): (_OPEN, self._live),
            (INFERENCE, "ServerReady"): (_OPEN, self._ready),
            (INFERENCE, "ServerMetadata"): (_OPEN, self._metadata_of_server),
            (INFERENCE, "ModelReady"): (_MODEL, self._model_ready),
            (INFERENCE, "ModelMetadata"): (_MODEL, self._metadata),
            (INFERENCE, "ModelConfig"): (_MODEL, self._config),
            (INFERENCE, "ModelStatistics"): (_MODEL, self._statistics),
            (INFERENCE, "ModelInfer"): (PREDICT, self._infer),
            (INFERENCE, "ModelStreamInfer"): (PREDICT, self._infers),
            (INFERENCE, "RepositoryIndex"): (("read",), self._index),
            (INFERENCE, "RepositoryModelLoad"): (_ADMIN, self._load),
            (INFERENCE, "RepositoryModelUnload"): (_ADMIN, self._unload),
            (_HEALTH, "Check"): (_OPEN, self._check),
            (_HEALTH, "Watch"): (SCOPES, self._watch),
            (_REFLECTION, "ServerReflectionInfo"): (SCOPES, self._reflect),
        }
        # All read their messages themselves: grpcio would read one before it asks who sends it.
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {}
        for (service, name), (scopes, answer) in known.items():
            described = descriptors().FindMethodByName(f"{service}.{name}")
            method = _Method(name, scopes, answer)
            if not described.server_streaming:
                sent = None if not scopes else message(described.input_type.full_name)
                method.request = bytes if name == "ModelInfer" else sent
                method.response = message(described.output_type.full_name)
            handlers[f"/{service}/{name}"] = (unary if method.response else stream)(
                partial(self._serve, method)
            )
        path = f"/{_REFLECTION}/ServerReflectionInfo"
        return {**handlers, path.replace("v1alpha", "v1"): handlers[path]}

    async def _serve(self, method: _Method, _: Any, context: Any) -> bytes | None:
        """Answer a call; the predictions of a stream are noted one by one."""
        started = time.perf_counter()
        call = _Call(context, method.name)
        try:
            return await self._answered(call, method)
        except asyncio.CancelledError:
            call.entry.status = 499 if method.response else 0  # which is how most streams end
            raise
        except Exception as exc:  # noqa: BLE001 - the edge: whatever happened, the client is told
            refusal = self._refusal(call, exc, started)
        finally:
            if call.entry.status:
                self._predictions.note(call.entry, time.perf_counter() - started)
        if refusal is None:
            raise asyncio.CancelledError
        problem, pause_s = refusal
        await asyncio.sleep(pause_s)
        error = await call.refuse(problem)
        del call, context, _  # the context has the error, whose frame this is
        raise error

    async def _answered(self, call: _Call, method: _Method) -> bytes | None:
        call.holds(self._lobby.take(call.peer))
        await self._authorize(call, method.scopes)
        if method.scopes:
            call.let_go()
            call.holds(self._calls.take(call.client))
        sent = None if method.request is None else await self._sent(call, method)
        reply = await method.answer(call, sent)
        if method.response is None:
            return None
        answer: bytes = reply if isinstance(reply, bytes) else method.response(**reply).SerializeToString()
        call.entry.status, call.entry.bytes_out = 200, len(answer)
        return answer

    def _refusal(self, call: _Call, error: Exception, started: float) -> tuple[Problem, float] | None:
        """What the client is told, and after how long; None if it has gone, or knows.

        Without the error itself, which holds all that the call has read.
        """
        if isinstance(error, grpc.aio.BaseError):
            call.entry.status = call.entry.status or 499
            return None
        problem = problem_of(error, call.entry)
        call.entry.status = problem.status
        call.let_go()
        seconds = time.perf_counter() - started
        pause_s = self._predictions.bodies.pause_after(error, call.entry.bytes_in, seconds)
        return Problem(problem.status, problem.message, problem.headers), pause_s

    async def _authorize(self, call: _Call, scopes: tuple[str, ...]) -> None:
        authorizer = self._predictions.authorizer
        call.access = await authorizer.authorize(call.entry, call.headers, None, scopes, limited=True)

    async def _message(self, call: _Call, *, waits: bool = False) -> bytes | None:
        """The next message of a call that was admitted; None if there is none."""
        until = None if waits else time.monotonic() + self._settings.timeout_s
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
        while (content := await self._message(call, waits=True)) is not None:
            started, entry = time.perf_counter(), call.entry
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
                answer = message("inference.ModelStreamInferResponse")(error_message=problem.message)
                with suppress(Problem):  # as far as it can be read
                    answer.infer_response.id = InferMessage(content).without_tensors().id
                seconds = time.perf_counter() - started
                await asyncio.sleep(self._predictions.bodies.pause_after(exc, len(content), seconds))
                await call.context.write(answer.SerializeToString())
            finally:
                call.let_go(keep=1)  # its place among the calls
                if entry.status:
                    self._predictions.note(entry, time.perf_counter() - started)
                call.entry = call.new_entry()

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

    async def _metadata_of_server(self, call: _Call, sent: Any) -> Any:
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
            try:
                sent = InferMessage(content, _FEW_FIELDS)
            except TooManyFields:
                sent = await asyncio.to_thread(InferMessage, content)
            size = len(sent.rest)
            if size <= _THREAD_BYTES:
                fields = await in_thread_if(size > _HERE_BYTES, sent.parsed)
            else:
                fields = sent.without_tensors()
            name = call.name(fields.model_name, fields.model_version)

            async def decode(_: Any) -> InferRequest:
                try:
                    if size > _THREAD_BYTES:
                        raise TooManyTexts
                    large = size > _HERE_BYTES or len(content) > LARGE_BYTES
                    request = await in_thread_if(large, request_from, fields, sent.raw, MOST_TEXTS)
                except TooManyTexts:
                    request = await self._predictions.bodies.message(content)
                if call.until is not None:
                    left = call.until - time.perf_counter()
                    request.timeout_s = max(1e-3, min(left, request.timeout_s or left))
                return request

            answer, request = await self._predictions.infer(name, decode, call.headers, call.entry)
            size_out = sum(array.nbytes for array in answer.outputs.values())
            if size_out > _SMALL_BYTES:
                call.holds(self._answers.take(call.client, size_out))
            return await in_thread_if(size_out > LARGE_BYTES, response_to, answer, request, in_stream)


def _small(kind: Any, content: bytes) -> Any:
    if len(content) > _SMALL_BYTES:
        raise Problem(413, f"the message has {len(content)} bytes; at most {_SMALL_BYTES} are allowed.")
    return parsed(kind, content)


def _let_others_go_first() -> None:
    """Where processors are short, HTTP and the models come before what strangers send to grpcio's threads."""
    for folder in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended, or the system has no such thing
            if (folder / "comm").read_text().startswith(_THREADS):
                os.setpriority(os.PRIO_PROCESS, int(folder.name), _NICE)


def _credentials(tls: Tls) -> Any:
    roots = None if tls.client_ca is None else Path(tls.client_ca).read_bytes()
    return grpc.ssl_server_credentials(
        [(Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())],
        root_certificates=roots,
        require_client_auth=roots is not None,
    )
