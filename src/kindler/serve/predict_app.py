"""The HTTP side of predictions, and the door that everything else passes on its way to FastAPI.

Predictions do not go through a framework's routes: a name may have slashes, errors look as each protocol
wants them, and the time counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import Executor
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from kindler.models.predictor import Predictor
from kindler.models.signature import SIGNATURE_METHOD, Arrays, Signature, fit, from_columns, rows_of
from kindler.omega import Omega
from kindler.serve.auth import Gate, Scopes
from kindler.serve.batching import Ticket
from kindler.serve.body_readers import Readers, where_read
from kindler.serve.datasets import read_inputs
from kindler.serve.deadlines import within
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.loaded_models import Resident, Residents, shown_name
from kindler.serve.protocols import Codec, Sent
from kindler.serve.protocols.mlflow import Mlflow
from kindler.serve.protocols.omega import OmegaCodec
from kindler.serve.protocols.tfserving import TfServing
from kindler.serve.protocols.v2 import V2
from kindler.serve.request_body import Bodies, ClientGoneError, Receive
from kindler.serve.requests import Answer, InferRequest, Reply, Target
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.tasks import wants_later
from kindler.store.keys import Key

__all__ = ["Front", "codec_of"]

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = logging.getLogger("kindler.serve")
_V2, _TFS, _MLFLOW, _OMEGA = V2(), TfServing(), Mlflow(), OmegaCodec()
_PATIENCE_S = 0.05  # before a request is watched for a client that goes away
_LINGER_S = 5.0  # for a client that goes on sending what was refused, and would not hear why
_CLOSES = ("connection", "close")
_LARGE_BYTES = 1 << 20  # of arrays that are not handled on the event loop


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
    ) -> None:
        self._rest = rest
        self._omega = omega
        self._residents = residents
        self._readers = readers
        self._gate = gate
        self._scopes = scopes
        self._settings = settings
        self._bodies = Bodies(settings)
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
        path: str = scope["path"]
        codec = codec_of(path)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        models: list[str] = []  # the model, once it is known
        body = b""
        try:
            target = codec.target(scope["method"], path)
            wanted = ("predict",) if target else self._scopes.of(scope["method"], path)
            key = await self._gate.admit(headers, wanted)
            if scope["method"] not in ("GET", "HEAD"):
                body = await self._bodies.read(receive, headers)
            if target is None or (codec is _OMEGA and wants_later(headers, scope["query_string"])):
                await self._passed_on(scope, _replayed(body, receive), send, key)
                return
            query = _query(scope["query_string"]) if scope["query_string"] else {}
            sent = Sent(body, headers, query)
            if codec is _OMEGA and "datax" in query:
                await self._gate.admit(headers, ("read",))
            reply = await self._predicted(codec, target, sent, receive, models)
        except ClientGoneError:
            return
        except Exception as exc:  # noqa: BLE001 - the HTTP edge: whatever happened, the client is told
            reply = self._refused(codec, exc, path)
        finally:
            self._bodies.let_go(body)
        if _CLOSES in reply.headers:
            await _send_and_linger(send, receive, reply)
        else:
            await _send(send, reply)
        model = models[0] if models else None
        self._stats.answered(codec.name, reply.status, time.perf_counter() - started, model)

    async def _passed_on(self, scope: Scope, receive: Receive, send: Send, key: Key | None) -> None:
        scope["kindler.key"] = key
        try:
            await self._rest(scope, receive, send)
        except Exception:  # noqa: BLE001 - the HTTP edge; it has answered already, with 500
            _log.exception("%s failed", scope["path"][:200])

    async def _predicted(
        self, codec: Codec, target: Target, sent: Sent, receive: Receive, models: list[str]
    ) -> Reply:
        name = target.name or await self._default_model()
        bucket = sent.headers.get("bucket") or sent.query.get("bucket") or "default"
        key = (bucket, name, target.version)
        resident = self._residents.at_hand(key) or await self._residents.find(key)
        models.append(shown_name(resident.version))
        if codec is _OMEGA and "datax" in sent.query:
            request = await self._from_dataset(bucket, sent.query["datax"], target)
        else:
            request = await self._decoded(codec, sent, resident.servable.signature, target)
        outputs, rows = await self._called(resident, request, receive)
        answer = Answer(resident.version.name, resident.version.number, _wanted(outputs, request), rows)
        encoding = (answer, request, sent, target)
        large = sum(array.nbytes for array in outputs.values()) > _LARGE_BYTES
        return await asyncio.to_thread(codec.encode, *encoding) if large else codec.encode(*encoding)

    async def _decoded(self, codec: Codec, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        where = where_read(sent)
        if where == "process":
            return await self._readers.request(codec, sent, signature, target)
        if where == "thread":
            return await asyncio.to_thread(codec.decode, sent, signature, target)
        return codec.decode(sent, signature, target)

    async def _called(
        self, resident: Resident, request: InferRequest, receive: Receive
    ) -> tuple[Arrays, int]:
        servable = resident.servable
        if request.method not in servable.methods:
            raise Problem(
                400, f"the model has no method {request.method}; available: {', '.join(servable.methods)}."
            )
        signature, method = servable.signature, request.method
        if request.signature is not None:
            signature, method = _asked_signature(servable, request.signature)
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

    def _refused(self, codec: Codec, error: Exception, path: str) -> Reply:
        problem = as_problem(error)
        if problem is None:
            _log.error("%s failed", path[:200], exc_info=error)
            problem = Problem(500, "internal server error; see the server's log.")
        reply = codec.problem(problem.status, problem.message)
        return Reply(reply.body, reply.content_type, tuple(problem.headers.items()), problem.status)


class _Watch:
    """Over a request that takes longer than most: its client may go away, and its time runs out."""

    __slots__ = ("_receive", "_seconds", "_task", "_ticket")

    def __init__(self, ticket: Ticket, seconds: float, receive: Receive) -> None:
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
                while (await self._receive())["type"] != "http.disconnect":
                    pass
            self._ticket.leave(Problem(499, "the client disconnected."))
        except TimeoutError:
            self._ticket.leave(Problem(504, "the model did not answer in time."))


def _fitted(signature: Signature, request: InferRequest) -> Arrays:
    given = from_columns(signature, request.inputs) if request.columns else request.inputs
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
