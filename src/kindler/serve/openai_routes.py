"""The routes of OpenAI's protocol: embeddings, completions and chats, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from anyio import move_on_after
from fastapi import APIRouter, Request
from fastapi.responses import Response

from kindler.serve.answers import Asked, News, TextRequest
from kindler.serve.auth import Access
from kindler.serve.bodies import ClientGoneError, Receive
from kindler.serve.endpoints import ENTRY, Authorized, Endpoint, Json, needs
from kindler.serve.http_errors import Problem
from kindler.serve.model_registry import LoadedModel
from kindler.serve.predictions import Predictions, in_thread_if, outputs_of, problem_of
from kindler.serve.protocols.openai import (
    DONE,
    ChatRequest,
    Chats,
    CompletionRequest,
    Completions,
    EmbeddingRequest,
    embeddings,
    error_body,
    event,
    listed,
    usage,
)
from kindler.serve.request_log import Entry
from kindler.types import GENERATING

_USUAL_TOKENS = 16  # of a completion that does not say how many
_LARGE_BYTES = 1 << 20
_MOST_BODY = 4 << 20  # which is read on the event loop
_SPARE_S = 5.0  # to be told that the time is over
_T = TypeVar("_T")


def openai_routes(predictions: Predictions) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["openai"], route_class=Endpoint)
    models, settings = predictions.models, predictions.settings

    async def found(request: Request, access: Access, name: str) -> LoadedModel:
        """The version that a request names, if its key covers it."""
        entry: Entry = request.scope[ENTRY]
        entry.counted = True
        name = name or await models.default_name()
        access.check("models", name)
        loaded, _ = await predictions.resolve((access.bucket, name, None), request.headers, entry)
        return loaded

    async def answered(
        request: Request,
        body: CompletionRequest | ChatRequest,
        loaded: LoadedModel,
        asked: Sequence[Asked],
        style: Completions,
        before: Sequence[str] = (),
    ) -> Response:
        """`before` is what each answer begins with."""
        answers, version = loaded.answers, loaded.version
        if answers is None:
            raise _wrong_task(loaded, "generates no text")
        most = sum(int(one.sampling["max_new_tokens"]) for one in asked)
        if most > settings.answer_tokens:
            limit = f"at most {settings.answer_tokens} are allowed"
            raise Problem(400, f"the request asks for {most} tokens over all its answers; {limit}.")
        text = answers.submit(asked)
        headers = {"x-model-version": str(version.number)}
        read = _Reader(text, style, before, answers=body.n or 1)
        if not body.stream:
            try:
                whole = await _until_gone(read.whole(), request.receive)
            finally:
                text.leave()
            return Json(whole, headers=headers)
        try:
            first = await _until_gone(text.news(), request.receive)
        except BaseException:
            text.leave()
            raise
        has_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = read.events(first, has_usage=has_usage, entry=request.scope[ENTRY])
        return EventStream(events, text.leave, settings.answer_s + _SPARE_S, headers)

    @routes.post("/completions")
    @needs("predict", filtered=True, most_bytes=_MOST_BODY)
    async def completions(body: CompletionRequest, request: Request, access: Authorized) -> Response:
        """Continue texts (OpenAI)."""
        loaded = await found(request, access, body.model)
        prompts, n = listed(body.prompt), body.n or 1
        if body.best_of not in (None, n):
            raise Problem(400, "best_of: is not supported by this server.")
        if body.echo and (body.logprobs is not None or not isinstance(prompts[0], str)):
            raise Problem(400, "echo: is supported for prompts of text, without logprobs.")
        sampling = body.sampling(body.max_tokens or _USUAL_TOKENS)
        seed = secrets.randbits(62) if body.seed is None else body.seed
        asked = [
            Asked(
                prompt=prompt,
                sampling={**sampling, "seed": seed + i},
                top=body.logprobs,
                stream=bool(body.stream),
            )
            for prompt in prompts
            for i in range(n)
        ]
        style = Completions(_id(request), body.model, str(loaded.version))
        before = [prompt for prompt in prompts for _ in range(n)] if body.echo else ()
        return await answered(request, body, loaded, asked, style, before)

    @routes.post("/chat/completions")
    @needs("predict", filtered=True, most_bytes=_MOST_BODY)
    async def chats(body: ChatRequest, request: Request, access: Authorized) -> Response:
        """Answer messages (OpenAI)."""
        loaded = await found(request, access, body.model)
        n, facts = body.n or 1, loaded.predictor.text or {}
        if body.top_logprobs and not body.logprobs:
            raise Problem(400, "top_logprobs: needs logprobs.")
        most = body.max_completion_tokens or body.max_tokens
        most = most or max(1, min(settings.answer_tokens // n, int(facts.get("context", 1))))
        sampling = body.sampling(most)
        seed = secrets.randbits(62) if body.seed is None else body.seed
        messages = [message.plain() for message in body.messages]
        asked = [
            Asked(
                messages=messages,
                sampling={**sampling, "seed": seed + i},
                top=(body.top_logprobs or 0) if body.logprobs else None,
                stream=bool(body.stream),
            )
            for i in range(n)
        ]
        style = Chats(_id(request), body.model, str(loaded.version))
        return await answered(request, body, loaded, asked, style)

    @routes.post("/embeddings")
    @needs("predict", filtered=True, most_bytes=_MOST_BODY)
    async def embed(body: EmbeddingRequest, request: Request, access: Authorized) -> Response:
        """Vectors of texts (OpenAI)."""
        loaded = await found(request, access, body.model)
        if (loaded.predictor.text or {}).get("task") != "embedding":
            raise _wrong_task(loaded, "embeds no texts")
        if body.dimensions is not None:
            raise Problem(400, "dimensions: is not supported by this server; the model decides.")
        inputs = listed(body.input)
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))  # of calls of similar lengths
        rows = np.empty(len(inputs), object)
        rows[:] = [inputs[i] for i in order]
        limit_s = settings.timeout_s
        ticket = loaded.batcher.submit({"text": rows}, "embed", rows=len(rows), timeout_s=limit_s)
        outputs = await outputs_of(ticket, limit_s, request.receive)
        vectors, tokens = outputs["embedding"], outputs["tokens"]
        if vectors.ndim != 2 or tokens.shape != (len(rows),) or tokens.dtype.kind != "i":
            raise Problem(500, "the model's outputs are not vectors.")
        entry: Entry = request.scope[ENTRY]
        entry.rows, count = len(rows), int(tokens.sum())
        models.stats.version(entry.model or "", loaded.version.number).model.prompt_tokens += max(0, count)
        made = np.empty_like(vectors)
        made[order] = vectors
        large = made.nbytes > _LARGE_BYTES
        content = await in_thread_if(large, embeddings, body.model, made, count, body.encoding_format)
        headers = {"x-model-version": str(loaded.version.number)}
        return Response(content, headers=headers, media_type="application/json")

    @routes.get("/models")
    @needs("read", filtered=True)
    def listing(access: Authorized) -> dict[str, Any]:
        """The models of a bucket: the names of all (TensorFlow Serving), and text models (OpenAI)."""
        shelf = models.storage[access.bucket].models
        versions = shelf.newest(kind="estimator")
        return {
            "models": [name for name in shelf.list() if access.covers("models", name)],
            "object": "list",
            "data": [
                {
                    "id": version.name,
                    "object": "model",
                    "created": int(version.created.timestamp()),
                    "owned_by": "kindler",
                }
                for version in versions
                if _task(version.meta) in (*GENERATING, "embedding") and access.covers("models", version.name)
            ],
        }

    return routes


class _Reader:
    """Reads the answers of a request; `answers` is how many there are of each prompt."""

    def __init__(self, text: TextRequest, style: Completions, before: Sequence[str], *, answers: int) -> None:
        self._text, self._style, self._before, self._answers = text, style, before, answers

    async def whole(self) -> dict[str, Any]:
        """The answers as one object."""
        said = [News(text) for text in self._before] or [News() for _ in self._text.rows]
        while any(one.reason is None for one in said):
            for index, news in await self._text.news():
                one = said[index]
                one.text, one.reason = one.text + news.text, news.reason
                one.tokens.extend(news.tokens)
        return self._style.answer(said, self._usage)

    async def events(
        self, news: list[tuple[int, News]], *, has_usage: bool, entry: Entry
    ) -> AsyncIterator[bytes]:
        """The answers as they come, after what was new first."""
        style, left = self._style, len(self._text.rows)
        opening = style.first(left) if isinstance(style, Chats) else []
        told = [(index, News(text)) for index, text in enumerate(self._before)]
        opening += style.chunks(told, None, has_usage=has_usage)
        yield b"".join(map(event, opening))
        try:
            while True:
                yield b"".join(event(chunk) for chunk in style.chunks(news, None, has_usage=has_usage))
                left -= sum(one.reason is not None for _, one in news)
                if not left:
                    break
                news = await self._text.news()
        except Problem as problem:
            entry.notes["failed"] = problem.status
            yield event(error_body(problem_of(problem, entry)))
            return
        if has_usage:
            yield b"".join(map(event, style.chunks((), self._usage)))
        yield DONE

    @property
    def _usage(self) -> Mapping[str, int]:
        return usage(sum(self._text.prompt_tokens[:: self._answers]), self._text.tokens)


class EventStream(Response):
    """A stream of events, until it ends, or its client goes away or reads too slowly; then it `leave`s."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        leave: Callable[[], None],
        limit_s: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._leave, self._limit_s = events, leave, limit_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with move_on_after(self._limit_s):
                await _until_gone(self._send(send), receive)
        finally:
            self._leave()

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for some in self._events:
            if some:
                await send({"type": "http.response.body", "body": some, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """What a coroutine returns; ClientGoneError if the client goes away before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _wrong_task(loaded: LoadedModel, what: str) -> Problem:
    task = (loaded.predictor.text or {}).get("task")
    known = f"it was made for {task}" if task else "it is not a text model of Estimator.from_huggingface"
    return Problem(400, f"the model {loaded.version} {what}: {known}.")


def _task(meta: Mapping[str, Any]) -> str | None:
    facts = meta.get("tokens")
    return facts.get("task") if isinstance(facts, Mapping) else None


def _id(request: Request) -> str:
    entry: Entry = request.scope[ENTRY]
    return entry.id
