"""How the next token of an answer is chosen, and how prompts share slots where steps overlap."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kindler.frameworks.torch import slots
from kindler.frameworks.torch.generation import answered, engine_of
from kindler.frameworks.torch.prompts import Choice, Prompt
from kindler.frameworks.torch.schemas import matcher_of, vocabulary_of
from kindler.types import Sampling
from tests.torch.tiny_text import (
    continued,
    ending_tokenizer,
    generator,
    json_tokenizer,
    json_writer,
    sentences,
)


def test_tokens_are_drawn_with_the_probabilities_that_the_sampling_asks_for() -> None:
    logits = torch.tensor([0.0, 1.0, 2.5, -1.0, 0.5])
    expected = (logits / 2).softmax(0).numpy()

    def drawn(**options: Any) -> np.ndarray:
        prompts = [
            Prompt.of(0, [1, 2, 3], Sampling(max_new_tokens=1, seed=seed, **options), context=None)
            for seed in range(2000)
        ]
        tokens = Choice(prompts, torch.device("cpu"))(logits.expand(2000, -1)).tokens
        return np.bincount(tokens, minlength=5) / 2000

    assert np.abs(drawn(temperature=2.0) - expected).max() < 4 * math.sqrt(0.25 / 2000)
    assert set(np.flatnonzero(drawn(temperature=2.0, top_k=3)).tolist()) == {1, 2, 4}
    # 0.48 and 0.23 of them
    assert set(np.flatnonzero(drawn(temperature=2.0, top_p=0.6)).tolist()) == {1, 2}
    assert set(np.flatnonzero(drawn()).tolist()) == {2}


def test_each_prompt_is_drawn_as_its_own_sampling_says_whatever_is_beside_it() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn((40, 30), generator=random)
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5}]

    def prompts() -> list[Prompt]:
        return [Prompt.of(i, [i], Sampling(**kinds[i % 4]), context=None) for i in range(40)]

    together = Choice(prompts(), torch.device("cpu"))(logits).tokens.tolist()
    alone = [
        Choice([prompt], torch.device("cpu"))(row.unsqueeze(0)).tokens.item()
        for prompt, row in zip(prompts(), logits, strict=True)
    ]
    assert together == alone
    assert together[::4] == logits[::4].argmax(-1).tolist()
    assert together[1::4] != logits[1::4].argmax(-1).tolist()


class _Replayed:
    """Runs again what a CUDA graph would have captured: the same call, on the same tensors."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.replay = compute


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_answers_are_the_same_where_the_next_step_begins_before_tokens_have_arrived(
    kind: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = generator(kind), ending_tokenizer()
    texts = sentences(60, seed=3)["text"]
    monkeypatch.setattr(slots, "_WIDTHS", 8)
    engine: Any = engine_of(model, nullcontext)
    engine._on_gpu, engine._ahead, engine._can_capture = True, 1, captured
    engine._affordable = lambda width: 12

    def capture(key: Any, compute: Callable[[], Any]) -> Any:
        return engine._graphs.setdefault(key, _Replayed(compute))

    engine._capture = capture
    sampling = Sampling(max_new_tokens=20)
    prompts = [Prompt.of(i, words(t)["input_ids"], sampling, context=64) for i, t in enumerate(texts)]
    done = {prompt.number: prompt.answer for prompt in answered(engine, iter(prompts))}
    assert [done[i] for i in range(60)] == [continued(model, text, 20)[1] for text in texts]
    assert bool(engine._graphs) == captured


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", ["slots", "overlapping", "batches"])
def test_prompts_beside_those_that_follow_a_schema_are_answered_as_alone(
    where: str, temperature: float
) -> None:
    pytest.importorskip("llguidance")
    rules = {"repetition_penalty": 1.2} if where == "batches" else {}
    model, words = json_writer("llama", **rules), json_tokenizer()
    vocabulary = vocabulary_of(words)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    free = Sampling(max_new_tokens=30, temperature=temperature)
    bound = Sampling(
        max_new_tokens=30, temperature=temperature, schema={**schema, "additionalProperties": False}
    )

    def prompts(samplings: Sequence[Sampling]) -> list[Prompt]:
        return [
            Prompt.of(
                i,
                words(text)["input_ids"],
                sampling,
                context=512,
                matcher=matcher_of(sampling, vocabulary, {0}),
            )
            for i, (text, sampling) in enumerate(zip(sentences(16)["text"], samplings, strict=True))
        ]

    def answers(samplings: Sequence[Sampling]) -> list[list[int]]:
        engine: Any = engine_of(model, nullcontext)
        if where == "overlapping":
            engine._on_gpu, engine._ahead, engine._can_capture = True, 1, False
            engine._affordable = lambda width: 6
        done = {prompt.number: prompt for prompt in answered(engine, iter(prompts(samplings)))}
        assert not any(prompt.problem for prompt in done.values())
        return [done[i].answer for i in range(16)]

    alone, mixed = answers([free] * 16), answers([free, bound] * 8)
    assert mixed[::2] == alone[::2]
    assert mixed[1::2] == answers([bound] * 16)[1::2]
    texts = [words.decode(tokens, skip_special_tokens=True) for tokens in mixed[1::2]]
    assert any(text.endswith("}") for text in texts)
    for text in texts:
        assert re.fullmatch(r'\{"a": -?[0-9]*\}?', text)


def test_an_answer_that_cannot_go_on_is_an_error_and_not_an_answer() -> None:
    pytest.importorskip("llguidance")
    model, words = json_writer("llama"), json_tokenizer()
    sampling = Sampling(max_new_tokens=9, schema={"const": "abc"})
    matcher = matcher_of(sampling, vocabulary_of(words), {0})
    prompt = Prompt.of(0, [5], sampling, context=512, matcher=matcher)
    engine = engine_of(model, nullcontext)
    engine.join([prompt])
    assert matcher is not None
    matcher.add(words.convert_tokens_to_ids("}"))
    engine.step()
    assert "cannot follow the schema" in str(prompt.problem)
    assert engine.running == 0


def test_a_prompt_that_is_stopped_makes_room_and_changes_no_other_answer() -> None:
    model, words = generator("llama"), ending_tokenizer()
    texts = sentences(20, seed=5)["text"]
    engine = engine_of(model, nullcontext)
    prompts = [
        Prompt.of(i, words(t)["input_ids"], Sampling(max_new_tokens=12), context=64)
        for i, t in enumerate(texts)
    ]
    assert engine.join(prompts) == []
    engine.step()
    prompts[3].stopped = prompts[11].stopped = True
    assert engine.room == 64 - sum(not prompt.done for prompt in prompts)
    while engine.running:
        engine.step()
    assert [p.answer for i, p in enumerate(prompts) if i not in (3, 11)] == [
        continued(model, text, 12)[1] for i, text in enumerate(texts) if i not in (3, 11)
    ]


def test_heads_of_a_group_as_rows_attend_as_those_of_transformers() -> None:
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(shape, generator=random) for shape in ((3, 8, 1, 16), (3, 2, 10, 16)))
    mask = torch.rand((3, 1, 1, 10), generator=random) > 0.3
    module: Any = SimpleNamespace(num_key_value_groups=4, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, 2 * key, mask, scaling=0.2)
    found, _ = slots.grouped_attention(module, query, key, 2 * key, mask, scaling=0.2, dropout=0.0)
    torch.testing.assert_close(found, expected)
