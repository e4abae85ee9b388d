"""Answers to prompts. Rows that are done make room for the next prompts, between steps.

An `Engine` takes prompts and adds a token to each of their answers at a time: `generated` drives it for the
rows of a frame, and a model's process for the requests of a server.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from kindler.collective import Array
from kindler.errors import DataError
from kindler.frameworks.contract import Scored
from kindler.frameworks.torch.prompts import Choice, Prompt, context_of, ends_of
from kindler.frameworks.torch.schemas import matcher_of
from kindler.types import Sampling

SAMPLING = "kindler.sampling"  # the input that says how to answer a prompt
_ROWS = 64  # prompts that `model.generate` answers at the same time
_NO_TOKEN = -1
# What `model.generate` would do to each step's logits besides choosing from them.
_OWN_RULES = (
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *(
        "sequence_bias",
        "exponential_decay_length_penalty",
        "encoder_repetition_penalty",
        "watermarking_config",
    ),
)


def generated(
    model: Any,
    batches: Iterable[tuple[Array, ...]],
    names: Sequence[str],
    precision: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Scored]:
    """For each batch of prompts: the answers' tokens, whether they came to an end, and, if details are asked
    for, the logarithms of the tokens' probabilities."""
    sizes: deque[tuple[int, int]] = deque()  # first number and rows of the batches that are not given back

    context, ends = context_of(model), ends_of(model)

    def prompts() -> Iterator[Prompt]:
        number = 0
        for batch in batches:
            columns = dict(zip(names, batch, strict=True))
            sizes.append((number, len(batch[0])))
            given = (columns[name] for name in ("input_ids", "attention_mask", SAMPLING))
            for ids, mask, told in zip(*given, strict=True):
                sampling, details, vocabulary = _asked(told)
                tokens, matcher = ids[mask.astype(bool)].tolist(), matcher_of(sampling, vocabulary, ends)
                yield Prompt.of(number, tokens, sampling, context=context, details=details, matcher=matcher)
                number += 1

    answers: dict[int, Prompt] = {}
    for prompt in answered(engine_of(model, precision), prompts()):
        answers[prompt.number] = prompt
        while sizes and all(number in answers for number in range(sizes[0][0], sum(sizes[0]))):
            first, rows = sizes.popleft()
            done = [answers.pop(first + row) for row in range(rows)]
            if problems := [(row, prompt.problem) for row, prompt in enumerate(done) if prompt.problem]:
                raise DataError(f"an answer {problems[0][1]}", positions=[row for row, _ in problems])
            yield Scored(rows, _outputs(done), None)


@lru_cache(maxsize=4)
def _asked(told: str) -> tuple[Sampling, bool, str]:
    """How to answer a prompt, whether details are asked for, and the vocabulary that a schema needs."""
    sampling, _, vocabulary = told.partition("\n")
    fields = json.loads(sampling)
    details = fields.pop("details")
    return Sampling(**fields), details, vocabulary


def answered(engine: Engine, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
    waiting = next(prompts, None)
    while waiting is not None or engine.running:
        room = engine.room
        if waiting is not None and (room >= engine.enough or not engine.running):
            joining: list[Prompt] = []
            while waiting is not None and len(joining) < room:
                joining.append(waiting)
                waiting = next(prompts, None)
            yield from engine.join(joining)
        else:
            yield from engine.step()


def _outputs(prompts: Sequence[Prompt]) -> list[Array]:
    width = max(len(prompt.answer) for prompt in prompts)
    tokens = np.full((len(prompts), width), _NO_TOKEN, np.int64)
    chances = np.full((len(prompts), width), np.nan, np.float32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.answer)] = prompt.answer
        chances[row, : len(prompt.answer)] = prompt.chances
    return [tokens, np.array([prompt.stopped for prompt in prompts]), chances]


class Engine(Protocol):
    """Answers prompts together, a token at a time. `join` and `step` return the prompts that are done since;
    setting `stopped` of one makes its room free."""

    @property
    def running(self) -> int:
        """How many prompts are being answered."""

    @property
    def room(self) -> int:
        """How many prompts may join now."""

    @property
    def enough(self) -> int:
        """Room that is worth a pass of other prompts, while these wait."""

    def join(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Begin answering prompts."""

    def step(self) -> list[Prompt]:
        """Add a token to each answer."""


def engine_of(model: Any, precision: Callable[[], AbstractContextManager[Any]]) -> Engine:
    """An engine; models that others cannot join answer a batch of prompts whole in `join`."""
    from kindler.frameworks.torch.slots import Slots  # which imports transformers

    rules = model.generation_config
    own = any(getattr(rules, name, None) not in (None, False, 0, 1.0, []) for name in _OWN_RULES)
    return (None if own else Slots.of(model, precision)) or _InBatches(model, precision)


class _InBatches:
    """Models that others cannot join: prompts are answered by `model.generate`, some at a time."""

    def __init__(self, model: Any, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._precision, self._ends = model, precision, ends_of(model)

    running, room, enough = 0, _ROWS, 1

    def join(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        context = context_of(self._model)
        longest = max(len(prompt.tokens) for prompt in prompts) + max(prompt.most for prompt in prompts)
        # Together, rows that are done would go on past the model's last position.
        alone = context is not None and longest > context
        for some in [[prompt] for prompt in prompts if prompt.most] if alone else [list(prompts)]:
            self._answer(some)
        return list(prompts)

    def step(self) -> list[Prompt]:
        return []

    def _answer(self, prompts: list[Prompt]) -> None:
        decoder = not self._model.config.is_encoder_decoder
        width = max(len(prompt.tokens) for prompt in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            place = slice(width - len(prompt.tokens), width) if decoder else slice(0, len(prompt.tokens))
            ids[row, place], mask[row, place] = torch.tensor(prompt.tokens), 1
        choose = _Processor(Choice(prompts, self._model.device), self._ends)
        with torch.inference_mode(), self._precision():
            self._model.generate(
                input_ids=ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=max(prompt.most for prompt in prompts),
                do_sample=False,
                num_beams=1,
                logits_processor=[choose],
                stopping_criteria=[_all_done(prompts)],
            )


def _all_done(prompts: Sequence[Prompt]) -> Callable[..., torch.Tensor]:
    """Answers also end without a token that says so, where a schema has no continuation."""
    return lambda ids, scores, **_: torch.tensor([prompt.done for prompt in prompts], device=ids.device)


class _Processor:
    """A logits processor that leaves the token of each prompt as the only choice."""

    def __init__(self, choice: Choice, ends: set[int]) -> None:
        self._choice, self._ends = choice, ends

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self._choice(scores)
        chosen.add(self._ends)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen.tokens.unsqueeze(1), 0.0)
