"""The HTTP side of predictions, and the door that everything else passes on its way to FastAPI.

Predictions do not go through a framework's routes: a name may have slashes, errors look as each protocol
wants them, and the time counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from kindler.models.predictor import Predictor
from kindler.models.signature import SIGNATURE_METHOD, Arrays, Signature, fit, from_columns, rows_of
from kindler.omega import Omega
from kindler.serve.auth import (
    Gate,
    Resource,
    Scopes,
    Wanted,
    bare_name,
    bucket_of,
    check_datasets,
    check_limits,
)
from kindler.serve.batching import Ticket
from kindler.serve.body_readers import Readers, where_read
from kindler.serve.cors import Cors
from kindler.serve.datasets import read_inputs
from kindler.serve.deadlines import within
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.loaded_models import Name, Resident, Residents, shown_name
from kindler.serve.protocols import Codec, Sent
from kindler.serve.protocols.mlflow import Mlflow
from kindler.serve.protocols.omega import OmegaCodec
from kindler.serve.protocols.tfserving import TfServing
from kindler.serve.protocols.v2 import V2, TooManyTexts
from kindler.serve.request_body import Bodies, ClientGoneError, Receive
from kindler.serve.request_log import REQUEST_ID, Entry, RequestLog, request_id
from kindler.serve.requests import Answer, InferRequest, Reply, Target, check_rows
from kindler.serve.routes import Parts
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.tasks import wants_later
from kindler.serve.traffic import Traffic
from kindler.store.keys import Key

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = logging.getLogger("kindler.serve")
MOST_TEXTS = 1 << 18  # bytes of texts that are taken apart here; more of them hold Python's lock for long
_V2, _TFS, _MLFLOW, _OMEGA = V2(MOST_TEXTS), TfServing(), Mlflow(), OmegaCodec()
_PATIENCE_S = 0.05  # before a request is watched for a client that goes away
_LINGER_S = 5.0  # for a client that goes on sending what was refused, and would not hear why
_CLOSES = ("connection", "close")
_STOPS = "the server is being stopped, and the request did not end in time."
_STOPPED = {"connection": "close", "retry-after": "5"}
_LARGE_BYTES = 1 << 20  # of arrays that are not handled on the event loop
PREDICTS = Wanted(("predict",), filtered=True)  # what the key is for is checked when the model is known

Decode: TypeAlias = Callable[[Signature], Awaitable[InferRequest]]


def codec_of(path: str) -> Codec:
    """The protocol that a path belongs to, whose way of saying what is wrong is used."""
    if path.startswith("/v2"):
        return _V2
    if path.startswith("/v1/"):
        return _TFS
    if path.endswith("/invocations"):
        return _MLFLOW
    return _OMEGA


class Front:
    """An ASGI application: predictions here, the rest by another one.

    Args:
        rest: The application for everything that is no prediction.
        omega: The store.
        residents: The models.
        gate: Who may.
        scopes: What the routes of `rest` need.
        settings: The limits.
        stats: The counters.
        looks: Where the store is asked what takes no time.
        reads: Where datasets are read.
        readers: What reads large bodies.
        traffic: Which version answers.
        log: Where requests are written down.
        cors: Which pages of other sites may ask.
        parts: What the routes of `rest` use.
    """

    def __init__(
        self,
        rest: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        omega: Omega,
        residents: Residents,
        gate: Gate,
        scopes: Scopes,
        settings: ServeSettings,
        stats: Stats,
        looks: Executor,
        reads: Executor,
        readers: Readers,
        traffic: Traffic,
        log: RequestLog,
        cors: Cors,
        parts: Parts,
    ) -> None:
        self.parts = parts
        self._rest = rest
        self._traffic = traffic
        self._log = log
        self._cors = cors
        self._omega = omega
        self._residents = residents
        self.readers = readers
        self.gate = gate
        self._scopes = scopes
        self._settings = settings
        self.bodies = Bodies(settings, readers.decompressed)
        self._stats = stats
        self._looks = looks
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the server's start and stop."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._rest(scope, receive, send)
            return
        started = time.perf_counter()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        codec = codec_of(scope["path"])
        entry = Entry(request_id(headers), scope["method"], scope["path"], codec.name)
        entry.client = (scope.get("client") or ("",))[0]
        entry.trace = headers.get("traceparent", "")
        noted = _Noted(send, entry, self._cors.headers(headers.get("origin")))
        try:
            await self._answered(scope, receive, noted, codec, headers, entry)
        except ClientGoneError:
            entry.status = 499
        except asyncio.CancelledError:  # the server stops, and waits no longer
            if not entry.status:
                reply = self._refused(codec, Problem(503, _STOPS, _STOPPED), entry)
                await _send(noted, reply)
        seconds = time.perf_counter() - started
        self.note(entry, seconds, counted=noted.predicts)

    def note(self, entry: Entry, seconds: float, *, counted: bool = True) -> None:
        """Count a request that was answered, and write it down."""
        if counted:
            self._stats.answered(entry.protocol, entry.status, seconds, entry.model, entry.version)
        self._log.add(entry, seconds)

    async def _answered(
        self,
        scope: Scope,
        receive: Receive,
        send: _Noted,
        codec: Codec,
        headers: Mapping[str, str],
        entry: Entry,
    ) -> None:
        """Answer a request: a prediction and a refusal here, the rest by the other application."""
        started = time.perf_counter()
        pause_s = 0.0
        try:
            reply = await self._replied(scope, receive, send, codec, headers, entry)
        except ClientGoneError:
            raise
        except Exception as exc:  # noqa: BLE001 - the HTTP edge: whatever happened, the client is told
            reply = self._refused(codec, exc, entry)
            pause_s = self.bodies.pause_after(exc, entry.bytes_in, time.perf_counter() - started)
        if reply is None:
            return
        if pause_s:
            await asyncio.sleep(pause_s)
        send.predicts = True
        await (_send_and_linger(send, receive, reply) if _CLOSES in reply.headers else _send(send, reply))

    async def _replied(
        self,
        scope: Scope,
        receive: Receive,
        send: _Noted,
        codec: Codec,
        headers: Mapping[str, str],
        entry: Entry,
    ) -> Reply | None:
        """The reply to a request; None if the other application has sent it."""
        method, path = scope["method"], scope["path"]
        reply = self._cors.preflight(method, headers)
        if reply is not None:
            return reply
        target = codec.target(method, path)
        entry.changes = target is None and method not in ("GET", "HEAD", "OPTIONS")
        query = _query(scope["query_string"]) if scope["query_string"] else {}
        entry.bucket = bucket = bucket_of(headers, query.get("bucket"))
        wanted = PREDICTS if target else self._scopes.of(method, path)
        key = await self.gate.admit(headers, wanted, wanted.resource(bucket))
        entry.key = None if key is None else key.id
        if target and target.name:
            check_limits(key, Resource(bucket, "models", bare_name(target.name)))
        body = b"" if method in ("GET", "HEAD") else await self.bodies.read(receive, headers)
        try:
            entry.bytes_in = len(body)
            if target is None or (codec is _OMEGA and wants_later(headers, scope["query_string"])):
                scope["kindler.bucket"] = bucket
                await self._passed_on(scope, _replayed(body, receive), send, key, entry)
                return None
            return await self._predicted(codec, target, Sent(body, headers, query), receive, key, entry)
        finally:
            self.bodies.let_go(body)

    async def _passed_on(
        self, scope: Scope, receive: Receive, send: Send, key: Key | None, entry: Entry
    ) -> None:
        scope["kindler.key"] = key
        try:
            await self._rest(scope, receive, send)
        except Exception:  # noqa: BLE001 - the HTTP edge; it has answered already, with 500
            _log.exception("%s failed (request %s)", scope["path"][:200], entry.id)

    async def _predicted(
        self, codec: Codec, target: Target, sent: Sent, receive: Receive, key: Key | None, entry: Entry
    ) -> Reply:
        dataset = sent.query.get("datax") if codec is _OMEGA else None
        if dataset is not None:
            check_datasets(key, entry.bucket, dataset)

        async def decode(signature: Signature) -> InferRequest:
            if dataset is not None:
                return await self._from_dataset(entry.bucket, dataset, target)
            return await self._decoded(codec, sent, signature, target)

        name = target.name
        if not name:
            name = await self._default_model()
            check_limits(key, Resource(entry.bucket, "models", bare_name(name)))
        answer, request = await self.infer(
            (entry.bucket, name, target.version), decode, sent.headers, entry, receive
        )
        encoding = (answer, request, sent, target)
        large = sum(array.nbytes for array in answer.outputs.values()) > _LARGE_BYTES
        reply = await asyncio.to_thread(codec.encode, *encoding) if large else codec.encode(*encoding)
        return replace(reply, headers=(*reply.headers, ("x-model-version", str(answer.version))))

    async def infer(
        self,
        name: Name,
        decode: Decode,
        headers: Mapping[str, str],
        entry: Entry,
        receive: Receive | None = None,
    ) -> tuple[Answer, InferRequest]:
        """Answer a prediction, whatever its protocol.

        Args:
            name: The model.
            decode: Makes the request, once it is known what the model takes.
            headers: The request's headers.
            entry: What is known of the request; says afterwards which version answered.
            receive: Says when the client has gone away; None if that cancels this call.

        Raises:
            Problem, KindlerError: It cannot be answered.
        """
        split = self._traffic.split_of(name)
        resident = None if split is None else self._traffic.canary(split, headers)
        resident = resident or self._residents.at_hand(name) or await self._residents.find(name)
        entry.model, entry.version = shown_name(resident.version), resident.version.number
        request = await decode(resident.servable.signature)
        outputs, entry.rows = await self._called(resident, request, receive)
        answer = Answer(resident.version.name, resident.version.number, _wanted(outputs, request), entry.rows)
        if split is not None and split.shadow:

            async def call(shadow: Resident) -> Arrays:
                return (await self._called(shadow, request, None))[0]

            called = self._traffic.shadow(split, outputs, call)
            if called:
                entry.notes["shadow"] = called
        return answer, request

    async def _decoded(self, codec: Codec, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        where = where_read(sent)
        if where == "process":
            return await self.readers.request(codec, sent, signature, target)
        try:
            if where == "thread":
                return await asyncio.to_thread(codec.decode, sent, signature, target)
            return codec.decode(sent, signature, target)
        except TooManyTexts:
            return await self.readers.request(codec, sent, signature, target)

    async def _called(
        self, resident: Resident, request: InferRequest, receive: Receive | None
    ) -> tuple[Arrays, int]:
        servable = resident.servable
        if request.method not in servable.methods:
            raise Problem(
                400, f"the model has no method {request.method}; available: {', '.join(servable.methods)}."
            )
        signature, method = servable.signature, request.method
        if request.signature is not None:
            signature, method = _asked_signature(servable, request.signature)
        check_rows(request, self._settings.rows)  # before they are made what the model takes, and larger
        large = sum(array.nbytes for array in request.inputs.values()) > _LARGE_BYTES
        inputs = (
            await asyncio.to_thread(_fitted, signature, request) if large else _fitted(signature, request)
        )
        rows = rows_of(inputs)
        timeout_s = min(self._settings.timeout_s, request.timeout_s or self._settings.timeout_s)
        ticket = resident.batcher.submit(inputs, method, rows=rows, timeout_s=timeout_s, batch=request.batch)
        patience = min(_PATIENCE_S, timeout_s)
        watch = _Watch(ticket, timeout_s - patience, receive)
        timer = asyncio.get_running_loop().call_later(patience, watch.start)
        try:
            return await ticket.future, rows
        finally:
            timer.cancel()
            watch.stop()
            ticket.leave()

    async def _from_dataset(self, bucket: str, name: str, target: Target) -> InferRequest:
        loop = asyncio.get_running_loop()
        inputs, columns = await loop.run_in_executor(
            self._reads,
            lambda: read_inputs(
                self._omega[bucket].datasets,
                name,
                most_rows=self._settings.rows,
                most_bytes=self._settings.queue_bytes,
            ),
        )
        return InferRequest(inputs=inputs, columns=columns, method=target.action)

    async def _default_model(self) -> str:
        if self._settings.model is not None:
            return self._settings.model
        loop = asyncio.get_running_loop()
        names = await loop.run_in_executor(self._looks, self._omega.models.list)
        if len(names) != 1:
            raise Problem(
                404,
                f"the store has {len(names)} models, and the server has no default model."
                " Hint: start it with --model NAME, or use /models/NAME/invocations.",
            )
        return names[0]

    def _refused(self, codec: Codec, error: Exception, entry: Entry) -> Reply:
        problem = self.problem_of(error, entry)
        reply = codec.problem(problem.status, problem.message)
        return Reply(reply.body, reply.content_type, tuple(problem.headers.items()), problem.status)

    @staticmethod
    def problem_of(error: Exception, entry: Entry) -> Problem:
        """What the client of a request is told of an error."""
        problem = as_problem(error)
        if problem is None:
            _log.error("%s failed (request %s)", entry.path[:200], entry.id, exc_info=error)
            problem = Problem(500, f"internal server error; the server's log has it as request {entry.id}.")
        return problem


class _Noted:
    """Sends a response, adds the headers that all have, and notes what was sent."""

    __slots__ = ("_entry", "_headers", "_send", "predicts")

    def __init__(self, send: Send, entry: Entry, headers: Sequence[tuple[str, str]]) -> None:
        self._send = send
        self._entry = entry
        self._headers = [(REQUEST_ID.encode(), entry.id.encode())]
        self._headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self.predicts = False  # whether the server's counters have it

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._entry.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        else:
            self._entry.bytes_out += len(message.get("body", b""))
        await self._send(message)


class _Watch:
    """Over a request that takes longer than most: its client may go away, and its time runs out."""

    __slots__ = ("_receive", "_seconds", "_task", "_ticket")

    def __init__(self, ticket: Ticket, seconds: float, receive: Receive | None) -> None:
        self._ticket = ticket
        self._seconds = seconds
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        try:
            with within(self._seconds):
                receive = self._receive or _silence
                while (await receive())["type"] != "http.disconnect":
                    pass
            self._ticket.leave(Problem(499, "the client disconnected."))
        except TimeoutError:
            self._ticket.leave(Problem(504, "the model did not answer in time."))


async def _silence() -> MutableMapping[str, Any]:
    """Hear nothing of the client, for as long as it takes."""
    await asyncio.get_running_loop().create_future()
    return {}


def _fitted(signature: Signature, request: InferRequest) -> Arrays:
    columns = request.columns or (
        len(request.inputs) > 1 and request.inputs.keys() == set(signature.columns or ())
    )
    given = from_columns(signature, request.inputs) if columns else request.inputs
    return fit(signature, given)


def _asked_signature(servable: Predictor, name: str) -> tuple[Signature, str]:
    """A signature by its name, and the method that it is called by."""
    known = servable.signatures
    if name not in known:
        shown = ", ".join(map(repr, known))
        raise Problem(400, f"the model has no signature {name[:80]!r}; available: {shown}.")
    if known[name] is servable.signature:
        return servable.signature, servable.methods[0]
    return known[name], f"{SIGNATURE_METHOD}{name}"


def _wanted(outputs: Arrays, request: InferRequest) -> Mapping[str, Any]:
    if not request.outputs:
        return outputs
    missing = [name for name in request.outputs if name not in outputs]
    if missing:
        raise Problem(
            400, f"the model has no output {missing[0]!r}; available: {', '.join(map(repr, outputs))}."
        )
    return {name: outputs[name] for name in request.outputs}


def _query(text: bytes) -> dict[str, str]:
    return dict(parse_qsl(text.decode("latin-1"), keep_blank_values=True))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The messages of a request whose body was read already."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return again


async def _send(send: Send, reply: Reply, *, more: bool = False) -> None:
    headers = [
        (b"content-type", reply.content_type.encode("latin-1")),
        (b"content-length", str(len(reply.body)).encode("latin-1")),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers),
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": more})


async def _send_and_linger(send: Send, receive: Receive, reply: Reply) -> None:
    """Answer, and drop what still comes: a client in the middle of its body would see a reset only."""
    await _send(send, reply, more=True)
    try:
        with within(_LINGER_S):
            message: Mapping[str, Any] = {"more_body": True}
            while message.get("more_body"):
                message = await receive()
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
