"""Conversations in a column: what they are as prompts, and what is learned of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kindler import Estimator
from kindler.errors import ConfigError, DataError
from kindler.types import Sampling
from tests.torch.tiny_text import ending_tokenizer, generator

PLAIN = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %} {% else %}{{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TALK = [
    {"role": "user", "content": "the film"},
    {"role": "assistant", "content": "was great"},
    {"role": "user", "content": "and its music"},
    {"role": "assistant", "content": "quite dull"},
]


def made(template: str | None, **options: Any) -> Estimator:
    words = ending_tokenizer()
    words.chat_template = template
    return Estimator.from_huggingface(
        generator("llama"), words, task="text-generation", **{"workers": 1, **options}
    )


def ids(text: str) -> list[int]:
    return list(ending_tokenizer()(text)["input_ids"])


def test_conversations_and_prompts_with_a_system_text_are_asked_by_the_template() -> None:
    model, talk = generator("llama"), TALK[:3]
    prompts = [json.dumps(talk), "the film [ was ]", json.dumps(TALK[:1]), "[1, 2]"]
    spoken = "user the film assistant was great user and its music assistant"
    expected = []
    for text in (spoken, "the film [ was ]", "user the film assistant", "[1, 2]"):
        asked = torch.tensor([ids(text)])
        out = model.generate(input_ids=asked, max_new_tokens=8, do_sample=False)
        expected.append(out[0, asked.shape[1] :].tolist())
    est, sampling = made(PLAIN), Sampling(max_new_tokens=8)
    found = est.generate({"prompt": prompts}, sampling=sampling, details=True, verbose=0)
    assert found["generated_tokens"].tolist() == expected

    told = est.generate(
        {"prompt": ["the film"]}, sampling=sampling, system="quite poor", details=True, verbose=0
    )
    same = [{"role": "system", "content": "quite poor"}, TALK[0]]
    again = est.generate({"prompt": [json.dumps(same)]}, sampling=sampling, details=True, verbose=0)
    assert told["generated_tokens"].tolist() == again["generated_tokens"].tolist()
    assert told["generated_tokens"].tolist() != expected[2:3]


def test_what_the_template_marks_is_learned_or_else_the_last_answer() -> None:
    text = json.dumps(TALK)
    whole = ids("user the film assistant was great user and its music assistant quite dull")
    last = made(PLAIN)._prepare.collate([{"text": text}])
    assert last["input_ids"][0].tolist() == whole
    assert last["labels"][0].tolist() == [*[-100] * 11, *ids("quite dull")]
    marked = made(MARKED)._prepare.collate([{"text": text}])
    answers = [*[-100] * 4, *ids("was great"), *[-100] * 5, *ids("quite dull")]
    assert marked["labels"][0].tolist() == answers

    est = made(PLAIN, workers=2)
    est.fit({"text": [text, "a story"] * 8}, epochs=2, batch_size=8, feature_cols="text", verbose=0)
    assert est.history["loss"][1] < est.history["loss"][0]


def test_conversations_that_cannot_be_used_are_said() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        made(None).generate({"prompt": ["the film"]}, system="a", verbose=0)
    with pytest.raises(DataError, match=r"(?s)no chat template.*row 0"):
        made(None).generate({"prompt": [json.dumps(TALK)]}, verbose=0)
    with pytest.raises(DataError, match="row 1: does not end with a message of the assistant"):
        made(PLAIN).fit({"text": ["a", json.dumps(TALK[:3])]}, batch_size=2, feature_cols="text", verbose=0)
    long = json.dumps([{"role": "user", "content": " ".join(["film"] * 62)}])
    with pytest.raises(DataError, match="row 0: has 64 tokens, more than max_length=20"):
        made(PLAIN, max_length=20).generate({"prompt": [long]}, verbose=0)
