"""Answers to prompts. Rows that are done make room for the next prompts, between steps."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from kindler.collective import Array
from kindler.frameworks.contract import Scored
from kindler.types import Sampling

SAMPLING = "kindler.sampling"  # the input that says how to answer a prompt
_ROWS = 64  # prompts that are answered at the same time
_JOIN = 8  # free rows that are worth another prompt's own pass
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


@dataclass(eq=False)
class _Prompt:
    number: int
    tokens: list[int]
    sampling: Sampling
    details: bool
    noise: torch.Generator | None
    most: int  # tokens of its answer
    answer: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    stopped: bool = False

    @classmethod
    def of(cls, number: int, tokens: list[int], told: bytes, context: int | None = None) -> _Prompt:
        asked = json.loads(told)
        details = asked.pop("details")
        sampling, noise = Sampling(**asked), None
        if sampling.temperature:
            # By its content: the same prompt is answered alike in any partition, batch or order.
            digest = hashlib.sha256(json.dumps([sampling.seed, tokens]).encode()).digest()
            noise = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        most = sampling.max_new_tokens
        most = most if context is None else max(0, min(most, context - len(tokens)))
        return cls(number, tokens, sampling, details, noise, most)

    @property
    def done(self) -> bool:
        return self.stopped or len(self.answer) >= self.most


def generated(
    model: Any,
    batches: Iterable[tuple[Array, ...]],
    names: Sequence[str],
    precision: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Scored]:
    """For each batch of prompts: the answers' tokens, whether they came to an end, and, if details are asked
    for, the logarithms of the tokens' probabilities."""
    sizes: deque[tuple[int, int]] = deque()  # first number and rows of the batches that are not given back

    context = _context(model)

    def prompts() -> Iterator[_Prompt]:
        number = 0
        for batch in batches:
            columns = dict(zip(names, batch, strict=True))
            sizes.append((number, len(batch[0])))
            given = (columns[name] for name in ("input_ids", "attention_mask", SAMPLING))
            for ids, mask, told in zip(*given, strict=True):
                tokens = ids[mask.astype(bool)].tolist()
                yield _Prompt.of(number, tokens, told.tobytes(), context)
                number += 1

    answers: dict[int, _Prompt] = {}
    answered = (_Padded if _joins_batches(model) else _InBatches)(model, precision)
    for prompt in answered(prompts()):
        answers[prompt.number] = prompt
        while sizes and all(number in answers for number in range(sizes[0][0], sum(sizes[0]))):
            first, rows = sizes.popleft()
            yield Scored(rows, _outputs([answers.pop(first + row) for row in range(rows)]), None)


def _outputs(prompts: Sequence[_Prompt]) -> list[Array]:
    width = max(len(prompt.answer) for prompt in prompts)
    tokens = np.full((len(prompts), width), _NO_TOKEN, np.int64)
    chances = np.full((len(prompts), width), np.nan, np.float32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.answer)] = prompt.answer
        chances[row, : len(prompt.answer)] = prompt.chances
    return [tokens, np.array([prompt.stopped for prompt in prompts]), chances]


def _context(model: Any) -> int | None:
    """Tokens of a prompt and its answer together that a decoder was made for."""
    config = model.config
    limit = None if config.is_encoder_decoder else getattr(config, "max_position_embeddings", None)
    return None if limit is None or limit < 1 else int(limit)


def _ends(model: Any) -> set[int]:
    told = model.generation_config.eos_token_id
    told = model.config.eos_token_id if told is None else told
    return set(told) if isinstance(told, list | tuple) else {told} - {None}


@torch.inference_mode()
def _joins_batches(model: Any) -> bool:
    """Whether other prompts can join a batch: the model takes positions, keeps plain keys and values, and has
    no rules of its own about what to choose."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    config = model.config
    taken = inspect.signature(model.forward).parameters
    if getattr(config, "is_encoder_decoder", False) or not {"position_ids", "past_key_values"} <= set(taken):
        return False
    rules = model.generation_config
    if any(getattr(rules, name, None) not in (None, False, 0, 1.0, []) for name in _OWN_RULES):
        return False
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


@torch.inference_mode()
def _chosen(logits: torch.Tensor, prompts: Sequence[_Prompt], ends: set[int]) -> list[int]:
    """The next token of each prompt, which is added to its answer."""
    logits = logits.float()
    scores = logits
    if any(prompt.noise is not None for prompt in prompts):
        scores = torch.stack([_noisy(row, prompt) for row, prompt in zip(logits, prompts, strict=True)])
    tokens = scores.argmax(-1)
    wanted = any(prompt.details for prompt in prompts)
    chances = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).tolist() if wanted else ()
    chosen: list[int] = tokens.tolist()
    for row, (token, prompt) in enumerate(zip(chosen, prompts, strict=True)):
        if not prompt.done:
            prompt.answer.append(token)
            prompt.chances.append(chances[row] if wanted else float("nan"))
            prompt.stopped = token in ends
    return chosen


def _noisy(logits: torch.Tensor, prompt: _Prompt) -> torch.Tensor:
    """The largest of these is a draw from the distribution that the sampling asks for."""
    sampling = prompt.sampling
    if prompt.noise is None:
        return logits
    noise = -torch.empty(logits.shape).exponential_(generator=prompt.noise).log().to(logits.device)
    scaled = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scaled.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scaled = scaled.index_fill(0, order[before >= sampling.top_p], -torch.inf)
    return scaled + noise


class _Padded:
    """One batch with padding on the left, which prompts join and leave."""

    def __init__(self, model: Any, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._precision, self._ends = model, precision, _ends(model)
        self._rows: list[_Prompt] = []
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._mask = self._last = self._long([])
        self._last_position = (_context(model) or 1 << 40) - 1
        self._narrow = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, prompts: Iterator[_Prompt]) -> Iterator[_Prompt]:
        waiting: _Prompt | None = next(prompts, None)
        while waiting is not None or self._rows:
            done = sum(prompt.done for prompt in self._rows)
            room = _ROWS - len(self._rows) + done
            if waiting is not None and (room >= _JOIN or done == len(self._rows)):
                yield from self._leave()
                joining: list[_Prompt] = []
                while waiting is not None and len(joining) < room:
                    joining.append(waiting)
                    waiting = next(prompts, None)
                self._join(joining)
            elif done and (waiting is None and done * 4 >= len(self._rows)):
                yield from self._leave()
            else:
                self._step()

    def _long(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._model.device)

    def _leave(self) -> Iterator[_Prompt]:
        done = [prompt for prompt in self._rows if prompt.done]
        if not done:
            return
        left = [row for row, prompt in enumerate(self._rows) if not prompt.done]
        self._rows = [self._rows[row] for row in left]
        kept = self._long(left)
        self._mask, self._last = self._mask[kept], self._last[kept]
        first = int(self._mask.argmax(1).min()) if left else self._mask.shape[1]
        self._mask = self._mask[:, first:]
        self._cache = [(keys[kept, :, first:], values[kept, :, first:]) for keys, values in self._cache]
        yield from done

    def _join(self, prompts: list[_Prompt]) -> None:
        width = max(len(prompt.tokens) for prompt in prompts)
        ids, mask = (self._long([[0] * width] * len(prompts)) for _ in range(2))
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.tokens) :] = self._long(prompt.tokens)
            mask[row, width - len(prompt.tokens) :] = 1
        logits, cache = self._computed(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        last = self._long(_chosen(logits, prompts, self._ends))
        if self._rows:
            width = max(width, self._mask.shape[1])
            pairs = zip(self._cache, cache, strict=True)
            cache = [(_stacked(old[0], new[0], width), _stacked(old[1], new[1], width)) for old, new in pairs]
            mask = torch.cat([_widened(self._mask, width), _widened(mask, width)])
            last = torch.cat([self._last, last])
        self._rows, self._cache, self._mask, self._last = [*self._rows, *prompts], cache, mask, last

    def _step(self) -> None:
        # Rows that are done, and have not left, have no more positions; what they compute is not used.
        positions = self._mask.sum(1, keepdim=True).clamp(max=self._last_position)
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        logits, self._cache = self._computed(self._last.unsqueeze(1), self._mask, positions, self._cache)
        self._last = self._long(_chosen(logits, self._rows, self._ends))

    def _computed(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, before: Any
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(before or ()):
            cache.update(keys, values, layer)
        narrow = {"logits_to_keep": 1} if self._narrow else {}
        with torch.inference_mode(), self._precision():
            told = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **narrow,
            )
        return told.logits[:, -1], [(layer.keys, layer.values) for layer in told.past_key_values.layers]


def _widened(mask: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (width - mask.shape[1], 0))


def _stacked(old: torch.Tensor, new: torch.Tensor, width: int) -> torch.Tensor:
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, (0, 0, width - part.shape[2], 0)) for part in (old, new)])


class _InBatches:
    """Models that others cannot join: prompts are answered by `model.generate`, some at a time."""

    def __init__(self, model: Any, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._precision, self._ends = model, precision, _ends(model)

    def __call__(self, prompts: Iterator[_Prompt]) -> Iterator[_Prompt]:
        context = _context(self._model)
        while group := list(islice(prompts, _ROWS)):
            longest = max(len(prompt.tokens) for prompt in group) + max(prompt.most for prompt in group)
            # Together, rows that are done would go on past the model's last position.
            alone = context is not None and longest > context
            for some in [[prompt] for prompt in group if prompt.most] if alone else [group]:
                self._answer(some)
            yield from group

    def _answer(self, prompts: list[_Prompt]) -> None:
        decoder = not self._model.config.is_encoder_decoder
        width = max(len(prompt.tokens) for prompt in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            place = slice(width - len(prompt.tokens), width) if decoder else slice(0, len(prompt.tokens))
            ids[row, place], mask[row, place] = torch.tensor(prompt.tokens), 1
        choose = _Choice(prompts, self._ends)
        with torch.inference_mode(), self._precision():
            self._model.generate(
                input_ids=ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=max(prompt.most for prompt in prompts),
                do_sample=False,
                num_beams=1,
                logits_processor=[choose],
            )


class _Choice:
    """A logits processor that leaves the token of each prompt as the only choice."""

    def __init__(self, prompts: Sequence[_Prompt], ends: set[int]) -> None:
        self._prompts, self._ends = prompts, ends

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = torch.tensor(_chosen(scores, self._prompts, self._ends), device=scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)
