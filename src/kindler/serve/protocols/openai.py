"""OpenAI's protocol, as its own client speaks it: what requests may say, and how answers and errors look."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kindler.serve.answers import News
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import ErrorFormat, Reply
from kindler.serve.protocols.values import dumps

MOST_INPUTS = 2048
_SCHEMA_LETTERS = 32_768
PATHS = frozenset({"/v1/embeddings", "/v1/completions", "/v1/chat/completions"})
DONE = b"data: [DONE]\n\n"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class OpenAi(ErrorFormat):
    name = "openai"

    def problem(self, problem: Problem) -> Reply:
        body = dumps(error_body(problem), tokens=False)
        return Reply(body, headers=tuple(problem.headers.items()), status=_status(problem))


def error_body(problem: Problem) -> dict[str, Any]:
    status = _status(problem)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": problem.message, "type": kind, "param": None, "code": _CODES.get(status)}
    return {"error": error}


def _status(problem: Problem) -> int:
    return 400 if problem.status == 422 else problem.status


def event(content: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + dumps(content, tokens=False) + b"\n\n"


def _neutral(*values: Any) -> AfterValidator:
    """Accept a parameter only where it changes nothing."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError("is not supported by this server")
        return value

    return AfterValidator(check)


_Ignored = Annotated[Any, Field(description="Ignored")]
_Penalty = Annotated[float | None, _neutral(None, 0.0)]
_Text = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    user: _Ignored = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: _Ignored = None


class _Generating(_Body):
    """What completions and chats have in common."""

    max_tokens: Annotated[int | None, Field(ge=1, le=1 << 24)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=1, le=1 << 24)] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    logit_bias: Annotated[dict[str, float] | None, _neutral(None, {})] = None

    def sampling(self, most: int) -> dict[str, Any]:
        """The fields of `Sampling`, but for the seed."""
        stop = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        return {
            "max_new_tokens": most,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k,
            "stop": stop,
        }


_Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)]
Inputs = str | _Texts | _Tokens | Annotated[list[_Tokens], Field(min_length=1, max_length=MOST_INPUTS)]


class CompletionRequest(_Generating):
    """OpenAI's completions: a text, or tokens, to be continued."""

    prompt: Inputs
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Annotated[str | None, _neutral(None, "")] = None


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message as a chat template has it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ObjectFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_object"]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: _Ignored = None
    strict: _Ignored = None  # every answer follows its schema
    content: Annotated[dict[str, Any], Field(alias="schema")]


class SchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(_Generating):
    """OpenAI's chat completions: messages to be answered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=1 << 24)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: Annotated[
        TextFormat | ObjectFormat | SchemaFormat | None, Field(discriminator="type")
    ] = None
    modalities: Annotated[list[str] | None, _neutral(None, ["text"])] = None
    metadata: _Ignored = None
    store: Annotated[bool | None, _neutral(None, False)] = None
    service_tier: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None

    def sampling(self, most: int) -> dict[str, Any]:
        return {**super().sampling(most), "schema": self._schema()}

    def _schema(self) -> str | None:
        form = self.response_format
        if form is None or isinstance(form, TextFormat):
            return None
        if self.stop:
            raise Problem(400, "stop: cannot be combined with a response_format of JSON.")
        schema = form.json_schema.content if isinstance(form, SchemaFormat) else {"type": "object"}
        text = json.dumps(schema)
        if len(text) > _SCHEMA_LETTERS:
            raise Problem(400, f"response_format: the schema is longer than {_SCHEMA_LETTERS} letters.")
        return text


class EmbeddingRequest(_Body):
    """OpenAI's embeddings: texts, or tokens, to vectors."""

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1)] = None


def listed(inputs: Any) -> list[Any]:
    """A text, texts, tokens or lists of tokens as a list of texts or of tokens."""
    return inputs if isinstance(inputs, list) and not isinstance(inputs[0], int) else [inputs]


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def embeddings(model: str, vectors: Any, tokens: int, encoding: str) -> bytes:
    """The body of an answer."""
    vectors = np.ascontiguousarray(vectors, np.float32)
    rows = vectors if encoding == "float" else [base64.b64encode(row.tobytes()).decode() for row in vectors]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    counted = {"prompt_tokens": tokens, "total_tokens": tokens}
    return dumps({"object": "list", "model": model, "data": data, "usage": counted}, tokens=False)


class Completions:
    """How the answers of one request are written.

    `news` is what is new of an answer, or all of it. The first event of a chat says whose words follow.
    """

    kind, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, number: str, model: str, version: str) -> None:
        self._head = {"id": f"{self.kind}-{number}", "created": int(time.time()), "model": model}
        self._version = {"system_fingerprint": version}
        self._letters: dict[int, int] = {}  # of the text before, by the number of the answer

    def answer(self, all_news: Sequence[News], counted: Mapping[str, int]) -> dict[str, Any]:
        choices = [self.choice(index, news, whole=True) for index, news in enumerate(all_news)]
        return {
            **self._head,
            "object": self.whole,
            "choices": choices,
            "usage": counted,
            **self._version,
        }

    def chunks(
        self, news: Sequence[tuple[int, News]], counted: Mapping[str, int] | None, *, has_usage: bool = False
    ) -> list[dict[str, Any]]:
        """The events of a stream; `has_usage` is whether one at the end has it, and the others None."""
        head = {**self._head, "object": self.chunk, **self._version}
        more = {"usage": None} if has_usage else {}
        if counted is not None:
            return [{**head, "choices": [], "usage": counted}]
        return [{**head, "choices": [self.choice(index, one, whole=False)], **more} for index, one in news]

    def choice(self, index: int, news: News, *, whole: bool) -> dict[str, Any]:
        told = self._logprobs(index, news)
        return {"index": index, "text": news.text, "logprobs": told, "finish_reason": news.reason}

    def _logprobs(self, index: int, news: News) -> dict[str, Any] | None:
        if not news.tokens:
            return None
        offsets = []
        for text, _, _ in news.tokens:
            offsets.append(self._letters.get(index, 0))
            self._letters[index] = offsets[-1] + len(text)
        return {
            "tokens": [text for text, _, _ in news.tokens],
            "token_logprobs": [chance for _, chance, _ in news.tokens],
            "top_logprobs": [dict(top) for _, _, top in news.tokens],
            "text_offset": offsets,
        }


class Chats(Completions):
    kind, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, answers: int) -> list[dict[str, Any]]:
        """The events that begin a stream."""
        return [
            {
                **self._head,
                "object": self.chunk,
                "choices": [
                    {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                ],
                **self._version,
            }
            for i in range(answers)
        ]

    def choice(self, index: int, news: News, *, whole: bool) -> dict[str, Any]:
        text = {"content": news.text} if news.text or whole else {}
        said = {"message": {"role": "assistant", **text, "refusal": None}} if whole else {"delta": text}
        told = {"content": [_token(*one) for one in news.tokens]} if news.tokens else None
        return {"index": index, **said, "logprobs": told, "finish_reason": news.reason}


def _token(text: str, chance: float, top: Sequence[tuple[str, float]]) -> dict[str, Any]:
    def one(text: str, chance: float) -> dict[str, Any]:
        return {"token": text, "logprob": chance, "bytes": list(text.encode())}

    return {**one(text, chance), "top_logprobs": [one(*other) for other in top]}
