"""`kindler serve` answers OpenAI's own client: completions, chats, streams and embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import httpx
import numpy as np
import pytest
import torch
from pydantic import BaseModel, Field

from kindler import Estimator, Store
from kindler.store.keys import Keys
from kindler.types import Lora, Sampling
from tests.serve.served import Served, serving

pytest.importorskip("transformers")
openai = pytest.importorskip("openai")

from tiny_text import (  # noqa: E402
    ending_tokenizer,
    generator,
    json_tokenizer,
    json_writer,
    moved,
    sentences,
    tokenizer,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast  # noqa: E402

pytestmark = pytest.mark.torch

TEXTS = sentences(40)["text"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}the"
ANSWERS = 4  # at the same time
ENDLESS = 7900  # tokens


def byte_tokenizer() -> Any:
    """Each byte is a token, so most letters are several."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def endless() -> Any:
    model = generator("llama", eos_token_id=None)
    model.config.eos_token_id = None
    model.config.max_position_embeddings = 8192
    return model


def texts_of_bytes() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes, **ends)).eval()


@pytest.fixture(scope="module")
def estimators() -> dict[str, Estimator]:
    chatting = ending_tokenizer()
    writing = json_tokenizer()
    chatting.chat_template = writing.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert = BertModel(BertConfig(vocab_size=18, max_position_embeddings=32, **sizes))

    def made(model: Any, tokens: Any, task: Any = "text-generation", adapter: Any = None) -> Estimator:
        return Estimator.from_huggingface(model, tokens, task=task, adapter=adapter, workers=1, device="cpu")

    def adapted(seed: int) -> Estimator:
        return moved(made(generator("llama"), ending_tokenizer(), adapter=Lora(rank=2)), seed)

    return {
        "gpt": made(generator("gpt2"), ending_tokenizer()),
        "llama": made(generator("llama"), chatting),
        "json": made(json_writer("llama"), writing),
        "t5": made(generator("t5"), ending_tokenizer(), "text2text-generation"),
        "bytes": made(texts_of_bytes(), byte_tokenizer()),
        "endless": made(endless(), ending_tokenizer()),
        "tuned-1": adapted(1),
        "tuned-2": adapted(2),
        "vectors": made(bert, tokenizer(), "embedding"),
    }


@pytest.fixture(scope="module")
def store(estimators: dict[str, Estimator], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "store"
    om = Store(folder)
    for name, est in estimators.items():
        om.models.put(est, name, tag="prod")
    om.close()
    return folder


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Served]:
    limits = (
        "--answers",
        str(ANSWERS),
        "--queue-answers",
        "200",
        "--answer-tokens",
        "50000",
        "--timeout-s",
        "300",
    )
    with serving(store, *limits) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def generated(est: Estimator, prompts: list[str], **options: Any) -> Any:
    return est.generate({"prompt": prompts}, sampling=Sampling(**options), verbose=0)["generated"].tolist()


def streamed(chunks: Any) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.text or "")
    return texts


def gauge(server: Served, name: str, model: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    label = f'kindler_{name}{{model="{model}"'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(label))


async def until(true: Any) -> None:
    """Ask again until something is so, for at most a minute."""
    with anyio.fail_after(60):
        while not await asyncio.to_thread(true):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("model", ["gpt", "llama", "t5", "tuned-1", "tuned-2"])
def test_completions_are_those_of_generate(client: Any, estimators: dict[str, Estimator], model: str) -> None:
    reply = client.completions.create(model=model, prompt=TEXTS[:6], max_tokens=9, temperature=0)
    assert [choice.text for choice in reply.choices] == generated(
        estimators[model], TEXTS[:6], max_new_tokens=9
    )
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    reply = client.completions.create(model=f"{model}@prod", prompt=TEXTS[:6], max_tokens=9, **drawn)
    assert [choice.text for choice in reply.choices] == generated(
        estimators[model], TEXTS[:6], max_new_tokens=9, **drawn
    )
    assert reply.system_fingerprint == f"{model}@1"
    tokens = ending_tokenizer()
    assert reply.usage.prompt_tokens == sum(len(tokens(text)["input_ids"]) for text in TEXTS[:6])
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_thirty_two_clients_at_once_each_get_their_own_answer(
    server: Served, estimators: dict[str, Estimator]
) -> None:
    sizes = [3 + 5 * (i % 7) for i in range(32)]
    expected = [
        generated(estimators["gpt"], [text], max_new_tokens=size)[0]
        for text, size in zip(TEXTS, sizes, strict=False)
    ]

    async def one(asking: Any, text: str, size: int, stream: bool) -> str:
        asked = {"model": "gpt", "prompt": text, "max_tokens": size, "temperature": 0}
        if not stream:
            return str((await asking.completions.create(**asked)).choices[0].text)
        return "".join(
            [c.choices[0].text async for c in await asking.completions.create(**asked, stream=True)]
        )

    async def everyone() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as asking:
            pairs = zip(TEXTS, sizes, strict=False)
            return await asyncio.gather(
                *(one(asking, text, size, bool(i % 2)) for i, (text, size) in enumerate(pairs))
            )

    assert asyncio.run(everyone()) == expected
    assert gauge(server, "running_answers", "gpt") == gauge(server, "waiting_answers", "gpt") == 0


def test_a_chat_is_the_completion_of_its_template(client: Any, estimators: dict[str, Estimator]) -> None:
    said = [
        {"role": "system", "content": "the film"},
        {"role": "user", "content": [{"type": "text", "text": "was"}, {"type": "text", "text": " dull"}]},
    ]
    [expected] = generated(estimators["llama"], ["system the film user was dull the"], max_new_tokens=7)
    asked = {"model": "llama", "messages": said, "max_completion_tokens": 7, "temperature": 0}
    reply = client.chat.completions.create(**asked)
    assert reply.choices[0].message.content == expected
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == reply.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        client.chat.completions.create(model="gpt", messages=said)


def test_chats_that_follow_a_schema_and_others_are_answered_together(client: Any, server: Served) -> None:
    pytest.importorskip("llguidance")

    class Review(BaseModel):
        title: Annotated[str, Field(max_length=6)]
        stars: Literal[1, 2, 3]

    asked = {"model": "json", "temperature": 0, "max_completion_tokens": 60}
    said = [[{"role": "user", "content": text}] for text in TEXTS[:8]]
    alone = [client.chat.completions.create(messages=one, **asked).choices[0] for one in said]

    async def everyone() -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as asking:
            chats = asking.chat.completions
            return await asyncio.gather(
                *(
                    chats.parse(messages=one, response_format=Review, **asked)
                    if i % 2
                    else chats.create(messages=one, **asked)
                    for i, one in enumerate(said)
                )
            )

    for i, reply in enumerate(asyncio.run(everyone())):
        [choice] = reply.choices
        if i % 2:
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Review)
        else:
            assert choice.message.content == alone[i].message.content

    form = {"response_format": {"type": "json_object"}, "messages": said[0]}
    chunks = list(client.chat.completions.create(**{**asked, **form}, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.startswith("{")
    assert text == client.chat.completions.create(**{**asked, **form}).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length" or json.loads(text) is not None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"schema": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"schema": {"not": {}}}, "Unimplemented keys"),
        ({"schema": {"enum": ["x" * 40_000]}}, "longer than 32768 letters"),
        ({"schema": []}, "schema"),
        ({"schema": {}, "stop": "x"}, "stop: cannot be combined"),
        ({"schema": {}, "model": "llama"}, "does not support this tokenizer"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_a_clear_error(
    client: Any, more: dict[str, Any], said: str
) -> None:
    pytest.importorskip("llguidance")
    more = dict(more)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": more.pop("schema")}}
    asked = {"model": "json", "messages": [{"role": "user", "content": "a"}], "response_format": form, **more}
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(**asked)


def test_without_a_limit_a_chat_ends_where_the_model_does(client: Any) -> None:
    asked = [{"role": "user", "content": "a film"}]
    reply = client.chat.completions.create(model="llama", messages=asked, temperature=0)
    assert reply.usage.total_tokens <= 64
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_log_probabilities_are_those_of_generate(client: Any, estimators: dict[str, Estimator]) -> None:
    told = estimators["gpt"].generate(
        {"prompt": TEXTS[:1]}, sampling=Sampling(max_new_tokens=5), details=True, verbose=0
    )
    asked = {"model": "gpt", "prompt": TEXTS[0], "max_tokens": 5, "temperature": 0, "logprobs": 2}
    [choice] = client.completions.create(**asked).choices
    np.testing.assert_allclose(choice.logprobs.token_logprobs, told["generated_logprobs"][0], atol=1e-4)
    assert choice.logprobs.tokens == [ending_tokenizer().decode([t]) for t in told["generated_tokens"][0]]
    assert all(len(top) == 2 and max(top.values()) <= 0 for top in choice.logprobs.top_logprobs)
    chunks = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert [t for c in chunks for t in (c.logprobs.tokens if c.logprobs else [])] == choice.logprobs.tokens


def test_several_answers_differ_and_come_with_their_prompt_if_that_is_wanted(client: Any) -> None:
    asked = {"model": "gpt", "prompt": TEXTS[:2], "max_tokens": 12, "n": 3, "seed": 1, "echo": True}
    reply = client.completions.create(**asked)
    texts = [choice.text for choice in reply.choices]
    assert [text.startswith(TEXTS[i // 3]) for i, text in enumerate(texts)] == [True] * 6
    assert len(set(texts)) == 6
    assert streamed(client.completions.create(**asked, stream=True)) == dict(enumerate(texts))


def test_a_stream_ends_with_its_usage_and_done(server: Served) -> None:
    asked = {"model": "gpt", "prompt": "a", "max_tokens": 3, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=300)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 1
    assert all(json.loads(one)["usage"] is None for one in events[:-2])


def test_letters_of_several_tokens_are_never_torn(client: Any, estimators: dict[str, Estimator]) -> None:
    prompts = ["naïve", "日本", "🎬"]
    for seed in range(3):
        drawn = {"temperature": 1.0, "seed": seed}
        expected = generated(estimators["bytes"], prompts, max_new_tokens=80, **drawn)
        asked = {"model": "bytes", "prompt": prompts, "max_tokens": 80, **drawn}
        assert streamed(client.completions.create(**asked, stream=True)) == dict(enumerate(expected))


def test_a_stop_text_may_span_tokens_and_no_part_of_it_is_sent(
    client: Any, estimators: dict[str, Estimator]
) -> None:
    asked = {"model": "gpt", "prompt": TEXTS[0], "temperature": 0}
    [whole] = generated(estimators["gpt"], [TEXTS[0]], max_new_tokens=20)
    words = whole.split(" ")
    stop = [f"{words[5]} {words[6][:2]}", "never said"]
    expected = whole[: whole.index(stop[0])]
    chunks = list(client.completions.create(**asked, max_tokens=20, stop=stop, stream=True))
    assert streamed(chunks) == {0: expected}
    reply = client.completions.create(**asked, max_tokens=20, stop=stop)
    assert reply.choices[0].text == expected
    assert chunks[-1].choices[0].finish_reason == reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens < 10
    assert [expected] == generated(estimators["gpt"], [TEXTS[0]], max_new_tokens=20, stop=stop)


def test_embeddings_are_those_of_embed_in_the_order_of_the_inputs(
    client: Any, estimators: dict[str, Estimator]
) -> None:
    expected = estimators["vectors"].embed({"text": TEXTS}, verbose=0)["embedding"]
    for form in ("float", "base64"):
        reply = client.embeddings.create(model="vectors", input=TEXTS, encoding_format=form)
        rows = [
            np.frombuffer(base64.b64decode(one.embedding), np.float32)
            if isinstance(one.embedding, str)
            else one.embedding
            for one in reply.data
        ]
        np.testing.assert_allclose(np.array(rows), expected, atol=1e-5)
    ids = tokenizer()(TEXTS)["input_ids"]
    assert reply.usage.prompt_tokens == sum(map(len, ids))
    reply = client.embeddings.create(model="vectors", input=ids)
    np.testing.assert_allclose([one.embedding for one in reply.data], expected, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="a text has 40 tokens; the model takes at most 32"):
        client.embeddings.create(model="vectors", input=["a", "film " * 40])


def test_a_client_that_leaves_makes_room_for_the_next_one(server: Served) -> None:
    asked = {"model": "endless", "max_tokens": ENDLESS, "temperature": 0, "stream": True}

    async def run() -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as asking:
            streams = [await asking.completions.create(prompt=TEXTS[i], **asked) for i in range(ANSWERS)]
            for stream in streams:
                await anext(aiter(stream))
            assert await asyncio.to_thread(gauge, server, "running_answers", "endless") == ANSWERS
            short = {**asked, "max_tokens": 3, "stream": False, "prompt": "a film"}
            waiting = asyncio.create_task(asking.completions.create(**short))
            await until(lambda: gauge(server, "waiting_answers", "endless") == 1)
            assert not waiting.done()
            await streams[0].close()
            assert (await waiting).choices[0].finish_reason == "length"
            assert await asyncio.to_thread(gauge, server, "running_answers", "endless") == ANSWERS - 1
            for stream in streams[1:]:
                await stream.close()
            leaving = asyncio.create_task(asking.completions.create(**{**asked, "stream": False}, prompt="a"))
            await until(lambda: gauge(server, "running_answers", "endless") == 1)
            leaving.cancel()
            await until(lambda: gauge(server, "running_answers", "endless") == 0)

    asyncio.run(run())


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children(child)]
    return found


def test_a_stream_ends_with_an_error_if_the_process_of_the_model_dies(server: Served, client: Any) -> None:
    asked = {"model": "endless", "prompt": "a", "max_tokens": ENDLESS, "temperature": 0}
    stream = client.completions.create(**asked, stream=True)
    next(iter(stream))
    before = gauge(server, "process_restarts_total", "endless")
    # The one that computes has used the most time since.
    busy = max(children(server.process.pid), key=_ticks)
    os.kill(busy, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="its process was ended by SIGKILL"):
        for _ in stream:
            pass
    assert gauge(server, "process_restarts_total", "endless") == before + 1
    assert gauge(server, "running_answers", "endless") == 0
    reply = client.completions.create(**{**asked, "max_tokens": 2})
    assert reply.usage.completion_tokens == 2


def _ticks(pid: int) -> int:
    first = _used(pid)
    for _ in range(20000):
        pass
    return _used(pid) - first + (_used(pid) if _running(pid) else 0)


def _used(pid: int) -> int:
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    except OSError:
        return 0


def _running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "none"}, 404, "there is no model"),
    ({"model": "vectors"}, 400, "generates no text"),
    ({"prompt": ""}, 400, "the text has no tokens"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [19]}, 400, "not one of the model's tokens"),
    ({"prompt": "a " * 64}, 400, "has 64 tokens; at most 63"),
    ({"n": 100_000_000}, 400, "n: "),
    ({"n": True}, 400, "n: "),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 60_000}, 400, "at most 50000 are allowed"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"seed": 1 << 70}, 400, "seed"),
    ({"stop": ["x"] * 1000}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": "x" * 10_000}, 400, "stop"),
    ({"logit_bias": {"3": 1}}, 400, "logit_bias: is not supported"),
    ({"presence_penalty": 1}, 400, "presence_penalty: is not supported"),
    ({"suffix": "x"}, 400, "suffix: is not supported"),
    ({"tools": []}, 400, "tools: is not supported"),
    ({"best_of": 2}, 400, "best_of: is not supported"),
    ({"echo": True, "logprobs": 1}, 400, "echo"),
]


@pytest.mark.parametrize(("wrong", "status", "text"), WRONG, ids=[str(i) for i in range(len(WRONG))])
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_refused_in_the_form_of_openai(
    server: Served, wrong: dict[str, Any], status: int, text: str, stream: bool
) -> None:
    asked = {"model": "gpt", "prompt": "a", "max_tokens": 2, "stream": stream, **wrong}
    reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=300)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert text in error["message"]
    assert {"message", "type", "param", "code"} == set(error)


def test_bodies_that_are_no_requests_are_refused(server: Served) -> None:
    deep = b'{"model":"gpt","prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    for body in (
        b"",
        b"[]",
        b"{",
        deep,
        b'{"model":"gpt","prompt":"\\ud800"}',
        b'{"model":"gpt","prompt":"\xff"}',
        b'{"model":"gpt","prompt":{"a":1}}',
        b'{"model":"gpt","prompt":"a","temperature":NaN}',
        b'{"model":"../gpt","prompt":"a"}',
    ):
        reply = httpx.post(f"{server.url}/v1/completions", content=body, timeout=300)
        assert reply.status_code in (400, 404), (body[:60], reply.text)
        assert reply.json()["error"]["message"]
    large = json.dumps({"model": "gpt", "prompt": "a " * 3_000_000})
    assert httpx.post(f"{server.url}/v1/completions", content=large, timeout=300).status_code == 413
    assert httpx.get(f"{server.url}/v1/completions").json()["error"]["type"] == "invalid_request_error"
    nul = {"model": "gpt", "prompt": "a\0film", "max_tokens": 2, "stop": "\0"}
    assert httpx.post(f"{server.url}/v1/completions", json=nul, timeout=300).status_code == 200


def test_too_many_prompts_are_refused_until_there_is_room(server: Served, client: Any) -> None:
    many = {"model": "endless", "prompt": ["a"] * 100, "max_tokens": 400}
    with (
        httpx.Client(timeout=300) as other,
        other.stream("POST", f"{server.url}/v1/completions", json={**many, "stream": True}) as stream,
    ):
        reading = stream.iter_bytes()  # the stream is closed if nothing has it
        next(reading)
        asked = {**many, "prompt": ["a"] * 128, "max_tokens": 3}
        with pytest.raises(openai.RateLimitError, match="too many prompts are queued for this model"):
            client.completions.create(**asked)
    # The server may hear a little later that the other client has left.
    assert len(client.with_options(max_retries=9).completions.create(**asked).choices) == 128


def test_text_models_are_listed_with_what_they_count(server: Served, client: Any) -> None:
    assert [model.id for model in client.models.list()] == sorted(
        ["gpt", "json", "llama", "t5", "bytes", "endless", "tuned-1", "tuned-2", "vectors"]
    )
    before = gauge(server, "generated_tokens_total", "llama"), gauge(server, "prompt_tokens_total", "llama")
    client.completions.create(model="llama", prompt="a film was", max_tokens=1, temperature=0)
    assert gauge(server, "generated_tokens_total", "llama") == before[0] + 1
    assert gauge(server, "prompt_tokens_total", "llama") == before[1] + 3
    assert gauge(server, "first_token_seconds_count", "llama") > 0
    assert gauge(server, "answers_total", "llama") > 0


def test_keys_and_limits_hold_without_isolation_too(store: Path, tmp_path: Path) -> None:
    copied = tmp_path / "store"
    shutil.copytree(store, copied)
    om = Store(copied)
    keys = Keys(om.store.url)
    _, token = keys.add(["predict", "read"], names={"models": ["gp*", "endless"]})
    _, reading = keys.add(["read"])
    keys.close()
    om.close()
    with serving(
        copied,
        "--trusted",
        "--isolation",
        "none",
        "--answer-s",
        "1",
        "--timeout-s",
        "300",
        "--answer-tokens",
        "8000",
    ) as served:
        url = f"{served.url}/v1"

        def asking(key: str) -> Any:
            return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)

        asked = {"model": "gpt", "prompt": "a", "max_tokens": 2, "temperature": 0}
        with asking(token) as client:
            assert client.completions.create(**asked).usage.completion_tokens == 2
            assert [model.id for model in client.models.list()] == ["endless", "gpt"]
            with pytest.raises(openai.PermissionDeniedError, match="has no access to models/llama"):
                client.completions.create(**{**asked, "model": "llama"})
            slow = {**asked, "model": "endless", "max_tokens": 7900}
            with pytest.raises(openai.InternalServerError, match="not complete within 1 s"):
                client.completions.create(**slow)
            with pytest.raises(openai.APIError, match="not complete within 1 s"):
                list(client.completions.create(**slow, stream=True))
        with asking("wrong") as client, pytest.raises(openai.AuthenticationError, match="unknown or expired"):
            client.completions.create(**asked)
        with asking(reading) as client, pytest.raises(openai.PermissionDeniedError, match="needs predict"):
            client.completions.create(**asked)
