"""Prompts, their answers so far, and how each next token is chosen, on the model's device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kindler.frameworks.torch.schemas import Matcher
from kindler.types import Sampling


@dataclass(eq=False, kw_only=True)
class Prompt:
    """A prompt and its answer so far.

    Attributes:
        number: What its owner calls it.
        details: Whether `chances` has the logarithm of each token's probability.
        top: For so many of the likeliest tokens, too, which are in `tops`.
        noise: A number from 0 to 1 for each token that is drawn; None takes the likeliest.
        most: Tokens of its answer.
        matcher: Where the answer follows a schema.
        begun: Tokens that are computed, or are being computed.
        stopped: Whether the answer came to an end, or nobody wants more of it.
    """

    number: int
    tokens: list[int]
    sampling: Sampling
    details: bool = False
    top: int = 0
    noise: np.ndarray[Any, Any] | None
    most: int
    matcher: Matcher | None = None
    begun: int = 0
    answer: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    stopped: bool = False

    @classmethod
    def of(
        cls,
        number: int,
        tokens: list[int],
        sampling: Sampling,
        *,
        context: int | None,
        details: bool = False,
        top: int = 0,
        matcher: Matcher | None = None,
    ) -> Prompt:
        most = sampling.max_new_tokens
        most = most if context is None else max(0, min(most, context - len(tokens)))
        noise = None
        if sampling.temperature:
            # By its content: the same prompt is answered alike in any partition, batch or order.
            digest = hashlib.sha256(json.dumps([sampling.seed, tokens]).encode()).digest()
            noise = np.random.default_rng(int.from_bytes(digest[:16], "little")).random(most, np.float32)
        return cls(
            number=number,
            tokens=tokens,
            sampling=sampling,
            details=details,
            top=top,
            noise=noise,
            most=most,
            matcher=matcher,
        )

    @property
    def done(self) -> bool:
        return self.stopped or len(self.answer) >= self.most

    @property
    def problem(self) -> str | None:
        """Why there is no answer."""
        return None if self.matcher is None else self.matcher.problem


def context_of(model: Any) -> int | None:
    """Tokens of a prompt and its answer together that a decoder was made for."""
    config = model.config
    limit = None if config.is_encoder_decoder else getattr(config, "max_position_embeddings", None)
    return None if limit is None or limit < 1 else int(limit)


def ends_of(model: Any) -> set[int]:
    told = model.generation_config.eos_token_id
    told = model.config.eos_token_id if told is None else told
    return set(told) if isinstance(told, list | tuple) else {told} - {None}


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Without waiting for what the device computes."""
    made = torch.as_tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Choice:
    """Chooses the next token of each of some prompts from their rows of logits."""

    def __init__(self, prompts: Sequence[Prompt], device: torch.device) -> None:
        self.prompts, self._device = list(prompts), device
        self._details, self._top = any(p.details for p in prompts), max((p.top for p in prompts), default=0)
        self._drawn = any(prompt.noise is not None for prompt in prompts)
        if not self._drawn:
            return
        asked = [prompt.sampling for prompt in prompts]
        self._draws = on_device([[prompt.noise is not None] for prompt in prompts], device, torch.bool)
        self._heat = on_device([[each.temperature or 1.0] for each in asked], device, torch.float32)
        self._most = max(each.top_k or 0 for each in asked)
        self._top_k = on_device([[each.top_k or 0] for each in asked], device) if self._most else None
        narrow = any(each.top_p < 1 for each in asked)
        self._top_p = on_device([[each.top_p] for each in asked], device, torch.float32) if narrow else None

    def __call__(self, logits: torch.Tensor) -> Chosen:
        logits = logits[: len(self.prompts)].float()
        possible = self._possible(logits)
        tokens = possible.argmax(-1)
        if self._drawn:
            tokens = torch.where(self._draws, self._draw(possible), tokens.unsqueeze(1)).squeeze(1)
        chances = tops = None
        if self._details or self._top:
            spread = logits.log_softmax(-1)
            chances = spread.gather(1, tokens.unsqueeze(1)).squeeze(1)
            tops = spread.topk(min(self._top, spread.shape[1])) if self._top else None
        for prompt in self.prompts:
            prompt.begun += 1
        return Chosen(self.prompts, tokens, chances, tops)

    def _possible(self, logits: torch.Tensor) -> torch.Tensor:
        """Without the tokens that a row's schema does not allow."""
        bound = [(i, p.matcher) for i, p in enumerate(self.prompts) if p.matcher is not None and not p.done]
        if not bound:
            return logits
        packed = on_device(np.stack([each.allowed() for _, each in bound]), self._device, torch.uint8)
        bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=self._device) & 1
        rows = on_device([row for row, _ in bound], self._device)
        allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        masked = torch.full((len(bound), logits.shape[1]), -torch.inf, device=self._device)
        width = allowed.shape[1]  # models have more columns than their tokenizers have tokens, or fewer
        masked[:, :width] = logits[rows, :width].masked_fill(~allowed, -torch.inf)
        return logits.index_copy(0, rows, masked)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The token where the sum of probabilities exceeds a row's random number."""
        scaled = logits / self._heat
        if self._top_k is not None:
            least = scaled.topk(min(self._most, scaled.shape[1])).values
            wanted = self._top_k.clamp(1, least.shape[1]) - 1
            scaled = scaled.masked_fill((self._top_k > 0) & (scaled < least.gather(1, wanted)), -torch.inf)
        if self._top_p is not None:
            ordered, order = scaled.softmax(-1).sort(descending=True)
            out = (ordered.cumsum(-1) - ordered >= self._top_p) & (self._top_p < 1)
            scaled = scaled.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
        reached = scaled.softmax(-1).cumsum(-1)
        noise = [0.0 if p.noise is None else float(p.noise[min(p.begun, p.most - 1)]) for p in self.prompts]
        where = on_device(noise, self._device, torch.float32).unsqueeze(1) * reached[:, -1:]
        drawn = torch.searchsorted(reached, where, right=True).clamp_(max=reached.shape[1] - 1)
        # Sums are rounded: never a token that is not possible.
        return torch.where(scaled.gather(1, drawn).isfinite(), drawn, scaled.argmax(-1, keepdim=True))


@dataclass
class Chosen:
    """Tokens on their way from the device."""

    prompts: list[Prompt]
    tokens: torch.Tensor
    chances: torch.Tensor | None
    tops: Any

    def __post_init__(self) -> None:
        parts = [self.tokens, self.chances, *(self.tops or ())]
        self._parts = [None if part is None else _leaving(part) for part in parts]
        self._arrived: Any = None
        if self.tokens.is_cuda:
            self._arrived = torch.cuda.current_stream(self.tokens.device).record_event()

    def add(self, ends: set[int]) -> list[Prompt]:
        """Each token to its answer; the prompts that are done with it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        arrived: list[Any] = [None if part is None else part.tolist() for part in self._parts]
        tokens, chances, *tops = arrived
        done: list[Prompt] = []
        for row, prompt in enumerate(self.prompts):
            if prompt.done:
                continue
            prompt.answer.append(tokens[row])
            prompt.chances.append(float("nan") if chances is None else chances[row])
            prompt.stopped = tokens[row] in ends
            if prompt.matcher is not None and not prompt.stopped:
                prompt.stopped = prompt.matcher.add(tokens[row])
            if tops and prompt.top:
                prompt.tops.append(list(zip(tops[1][row], tops[0][row], strict=True))[: prompt.top])
            if prompt.done:
                done.append(prompt)
        return done


def _leaving(part: torch.Tensor) -> torch.Tensor:
    if not part.is_cuda:
        return part
    place = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return place.copy_(part, non_blocking=True)
