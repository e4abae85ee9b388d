"""Predictions, whatever their protocol: authorized, decoded, answered by a version of a model, encoded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from anyio import fail_after, sleep_forever

from kindler.models.predictor import Predictor
from kindler.models.signature import SIGNATURE_METHOD, Arrays, Signature, fit, from_columns, rows_of
from kindler.serve.auth import Access, Authorizer
from kindler.serve.batching import Ticket
from kindler.serve.bodies import Bodies, Receive
from kindler.serve.datasets import read_inputs
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.model_registry import LoadedModel, ModelRegistry, Name
from kindler.serve.protocols import Answer, Codec, ErrorFormat, InferRequest, RawRequest, Reply, Target
from kindler.serve.protocols.mlflow import Mlflow
from kindler.serve.protocols.omega import OmegaCodec
from kindler.serve.protocols.openai import PATHS, OpenAi
from kindler.serve.protocols.tfserving import TfServing
from kindler.serve.protocols.v2 import V2
from kindler.serve.request_log import Entry, RequestLog
from kindler.serve.stats import shown_name
from kindler.serve.traffic import Traffic
from kindler.store.splits import Split

_T = TypeVar("_T")
Decode: TypeAlias = Callable[[Signature], Awaitable[InferRequest]]
_log = logging.getLogger("kindler.serve")
MOST_TEXTS = 1 << 18  # bytes of texts that are taken apart here; more of them hold Python's lock for long
LARGE_BYTES = 1 << 20  # of arrays that are not handled on the event loop
_WATCH_AFTER_S = 0.05  # from then on a request is watched for a client that goes away
SCOPES = ("predict",)
_V2, _TFS, _MLFLOW, OMEGA = V2(MOST_TEXTS), TfServing(), Mlflow(), OmegaCodec()
_OPENAI = OpenAi()


def codec_of(path: str) -> Codec | ErrorFormat:
    """The protocol that a path belongs to, whose error format is used."""
    if path in PATHS:
        return _OPENAI
    if path.startswith("/v2"):
        return _V2
    if path.startswith("/v1/"):
        return _TFS
    if path.endswith("/invocations"):
        return _MLFLOW
    return OMEGA


class Predictions:
    def __init__(
        self,
        models: ModelRegistry,
        *,
        traffic: Traffic,
        authorizer: Authorizer,
        bodies: Bodies,
        log: RequestLog,
        dataset_threads: Executor,
    ) -> None:
        self.models = models
        self.settings = models.settings
        self.authorizer = authorizer
        self.bodies = bodies
        self._traffic = traffic
        self._log = log
        self._dataset_threads = dataset_threads

    async def predict(
        self,
        codec: Codec,
        target: Target,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        receive: Receive,
        entry: Entry,
    ) -> Reply:
        access = await self.authorizer.authorize(entry, headers, query.get("bucket"), SCOPES, limited=True)
        name = target.name or await self.models.default_name()
        access.check("models", name)
        body = await self.bodies.read(receive, headers)
        try:
            entry.bytes_in = len(body)
            sent = RawRequest(body, headers, query)
            decode = self._decoder(codec, sent, target, access)
            model = (access.bucket, name, target.version)
            answer, request = await self.infer(model, decode, headers, entry, receive)
            large = sum(array.nbytes for array in answer.outputs.values()) > LARGE_BYTES
            reply = await in_thread_if(large, codec.encode, answer, request, sent)
            return replace(reply, headers=(*reply.headers, ("x-model-version", str(answer.version))))
        finally:
            self.bodies.release(body)

    async def infer(
        self,
        name: Name,
        decode: Decode,
        headers: Mapping[str, str],
        entry: Entry,
        receive: Receive | None = None,
    ) -> tuple[Answer, InferRequest]:
        """Answer a prediction; `decode` makes the request, once the signature of the model is known.

        `receive` says when the client has gone away; None if that cancels this call.
        """
        loaded, split = await self.resolve(name, headers, entry)
        version = loaded.version
        request = await decode(loaded.predictor.signature)
        outputs, entry.rows = await self._call(loaded, request, receive, entry.id)
        answer = Answer(version.name, version.number, _selected(outputs, request), entry.rows)
        if split is not None and split.shadow:

            async def call(shadow: LoadedModel) -> Arrays:
                return (await self._call(shadow, request, None, entry.id))[0]

            called = self._traffic.shadow(split, outputs, call)
            if called:
                entry.notes["shadow"] = called
        return answer, request

    async def resolve(
        self, name: Name, headers: Mapping[str, str], entry: Entry
    ) -> tuple[LoadedModel, Split | None]:
        """The version that answers a request, and the split of its tag if it has one."""
        split = self._traffic.split_of(name)
        loaded = None if split is None else self._traffic.canary(split, headers)
        loaded = loaded or self.models.at_hand(name) or await self.models.find(name)
        entry.model, entry.version = shown_name(loaded.version), loaded.version.number
        return loaded, split

    def note(self, entry: Entry, seconds: float) -> None:
        """Count a request that was answered, and write it down."""
        if entry.counted:
            self.models.stats.answered(entry.protocol, entry.status, seconds, entry.model, entry.version)
        self._log.add(entry, seconds)

    def _decoder(self, codec: Codec, sent: RawRequest, target: Target, access: Access) -> Decode:
        dataset = sent.query.get("datax") if codec is OMEGA else None
        if dataset is None:
            return partial(self.bodies.decode, codec, sent, target)
        access.check_datasets(dataset)
        shelf, limits = self.models.storage[access.bucket].datasets, self.settings
        read = partial(read_inputs, shelf, dataset, most_rows=limits.rows, most_bytes=limits.queue_bytes)

        async def from_dataset(_: Signature) -> InferRequest:
            loop = asyncio.get_running_loop()
            inputs, columns = await loop.run_in_executor(self._dataset_threads, read)
            return InferRequest(inputs=inputs, columns=columns, method=target.action, stored=True)

        return from_dataset

    async def _call(
        self, loaded: LoadedModel, request: InferRequest, receive: Receive | None, request_id: str
    ) -> tuple[Arrays, int]:
        predictor = loaded.predictor
        if request.method not in predictor.methods:
            available = ", ".join(predictor.methods)
            raise Problem(400, f"the model has no method {request.method}; available: {available}.")
        signature, method = predictor.signature, request.method
        if request.signature is not None:
            signature, method = _signature_by_name(predictor, request.signature)
        request.check_rows(self.settings.rows)  # before they are made what the model takes, and larger
        large = sum(array.nbytes for array in request.inputs.values()) > LARGE_BYTES
        inputs = await in_thread_if(large, _fitted, signature, request)
        rows = rows_of(inputs)
        timeout_s = min(self.settings.timeout_s, request.timeout_s or self.settings.timeout_s)
        ticket = loaded.batcher.submit(inputs, method, rows=rows, timeout_s=timeout_s, batch=request.batch)
        outputs = await outputs_of(ticket, timeout_s, receive)
        watched = loaded.drift is not None or loaded.payloads is not None
        if watched and method == predictor.methods[0]:
            _keep(loaded, request, request_id, inputs, outputs, rows)
        return outputs, rows


async def outputs_of(ticket: Ticket, timeout_s: float, receive: Receive | None) -> Arrays:
    """Wait for the outputs of a request that was queued, or for its client to go away."""
    after = min(_WATCH_AFTER_S, timeout_s)
    watches: list[asyncio.Task[None]] = []
    timer = asyncio.get_running_loop().call_later(
        after, lambda: watches.append(asyncio.create_task(_watch(ticket, timeout_s - after, receive)))
    )
    try:
        return await ticket.future
    finally:
        timer.cancel()
        for watch in watches:
            watch.cancel()
        ticket.leave()


async def in_thread_if(large: bool, work: Callable[..., _T], *arguments: Any) -> _T:
    """What a function gives, which is called in a thread if it may take long."""
    return await asyncio.to_thread(work, *arguments) if large else work(*arguments)


def problem_of(error: Exception, entry: Entry) -> Problem:
    """What the client of a request is told of an error; the log has what is not for clients."""
    problem = as_problem(error)
    if problem is None:
        _log.error("%s failed (request %s)", entry.path[:200], entry.id, exc_info=error)
        problem = Problem(500, f"internal server error; see request {entry.id} in the server's log.")
    return problem


async def _watch(ticket: Ticket, seconds: float, receive: Receive | None) -> None:
    """Over a request that takes longer than most: its client may go away, and its time runs out."""
    try:
        with fail_after(seconds):
            if receive is None:
                return await sleep_forever()
            while (await receive())["type"] != "http.disconnect":
                pass
        ticket.leave(Problem(499, "the client disconnected."))
    except TimeoutError:
        ticket.leave(Problem(504, "the model did not answer in time."))


def _fitted(signature: Signature, request: InferRequest) -> Arrays:
    columns = request.columns or (
        len(request.inputs) > 1 and request.inputs.keys() == set(signature.columns or ())
    )
    inputs = from_columns(signature, request.inputs) if columns else request.inputs
    return fit(signature, inputs)


def _keep(
    loaded: LoadedModel, request: InferRequest, request_id: str, inputs: Arrays, outputs: Arrays, rows: int
) -> None:
    """Keep what is known of an answered request, which must not fail its answer."""
    try:
        if loaded.drift is not None:
            loaded.drift.add(inputs, outputs, rows)
        if loaded.payloads is not None and not request.stored:
            loaded.payloads.add(request_id, inputs, outputs, rows)
    except Exception:  # noqa: BLE001 - outputs of any form
        _log.exception("a request of %s cannot be kept (request %s)", loaded.version, request_id)


def _signature_by_name(predictor: Predictor, name: str) -> tuple[Signature, str]:
    """A signature by its name, and the method that it is called by."""
    known = predictor.signatures
    if name not in known:
        available = ", ".join(map(repr, known))
        raise Problem(400, f"the model has no signature {name[:80]!r}; available: {available}.")
    if known[name] is predictor.signature:
        return predictor.signature, predictor.methods[0]
    return known[name], f"{SIGNATURE_METHOD}{name}"


def _selected(outputs: Arrays, request: InferRequest) -> Mapping[str, Any]:
    if not request.outputs:
        return outputs
    missing = [name for name in request.outputs if name not in outputs]
    if missing:
        available = ", ".join(map(repr, outputs))
        raise Problem(400, f"the model has no output {missing[0]!r}; available: {available}.")
    return {name: outputs[name] for name in request.outputs}
