"""Answers that follow a JSON schema: which tokens may come next in each, as llguidance says."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError, MissingExtraError, first_line
from kindler.types import Sampling

# As json.dumps writes it. Where any white space is allowed, small models write it without end.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
_TRIED = 32  # tokens of an answer that is tried before workers start
_END = "<|end of the answer|>"  # llguidance wants one token for it; models have several, or none


class Matcher:
    """One answer. `problem` is why it cannot follow its schema, if it cannot."""

    def __init__(self, schema: str, vocabulary: str, ends: Iterable[int]) -> None:
        self._matcher, self._ends = _compiled(schema, vocabulary).deep_copy(), list(ends)
        self._none = int(vocabulary[: vocabulary.index("\n")])
        self.problem: str | None = None

    def allowed(self) -> Array:
        """A bit for each token that may come next, the lowest of each byte first."""
        bits: Array = np.frombuffer(self._matcher.compute_bitmask(), np.uint8).copy()
        complete = self._matcher.is_accepting()
        if self._matcher.is_stopped() and not complete:
            self._fail("the tokenizer has no token that could come next")
        for token, may in ((self._none, False), *((end, complete) for end in self._ends)):
            if token < 8 * len(bits):
                bit = 1 << token % 8
                bits[token // 8] = bits[token // 8] & (255 ^ bit) | (bit if may else 0)
        return bits

    def add(self, token: int) -> bool:
        """Whether the answer is complete with this token, or cannot be completed."""
        if self.problem is None and not self._matcher.consume_token(token):
            self._fail("no token was possible")
        return self.problem is not None or bool(self._matcher.is_stopped())

    def _fail(self, otherwise: str) -> None:
        said = (self._matcher.get_error() or otherwise).splitlines()[0]
        self.problem = f"cannot follow the schema: {said}."


def matcher_of(sampling: Sampling, vocabulary: str, ends: Iterable[int]) -> Matcher | None:
    return Matcher(str(sampling.schema), vocabulary, ends) if sampling.schema else None


def vocabulary_of(tokenizer: Any) -> str:
    """What a `Matcher` needs of a tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"Sampling(schema=...) needs a fast tokenizer; received {type(tokenizer).__name__}.\n"
            "Hint: AutoTokenizer.from_pretrained(..., use_fast=True)."
        )
    own = copy(tokenizer.backend_tokenizer)
    own.no_padding()
    own.no_truncation()
    own.add_special_tokens([_END])
    # Answers do not begin with the space that prompts do.
    text = own.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false')
    return f"{own.token_to_id(_END)}\n{text}"


def check_schema(schema: str, vocabulary: str) -> None:
    """Reject what no answer can be made to follow."""
    error = _library().LLMatcher.validate_grammar(_grammar(schema))
    if error:
        raise ConfigError(
            f"Sampling(schema=...) cannot be followed: {' '.join(error.split())[:300]}.\n"
            "Hint: llguidance supports most of JSON Schema, but not 'not', 'if' and 'uniqueItems'."
        )
    matcher = Matcher(schema, vocabulary, ())
    for _ in range(_TRIED):
        if matcher.add(int(np.unpackbits(matcher.allowed(), bitorder="little").argmax())):
            break
    if matcher.problem is not None:
        raise ConfigError(
            f"the answers of this tokenizer {matcher.problem}\n"
            "Hint: use a tokenizer that has all letters of JSON, such as one of bytes."
        )


@lru_cache(maxsize=8)
def _compiled(schema: str, vocabulary: str) -> Any:
    return _library().LLMatcher(_tokenizer(vocabulary), _grammar(schema), log_level=0)


@lru_cache(maxsize=2)
def _tokenizer(vocabulary: str) -> Any:
    end, _, text = vocabulary.partition("\n")
    try:
        return _library().LLTokenizer(text, eos_token=int(end))
    except ValueError as exc:
        raise ConfigError(
            f"Sampling(schema=...) does not support this tokenizer: {first_line(exc)}.\n"
            "Hint: use one of bytes (as of GPT-2, Llama 3 or Qwen) or of SentencePiece."
        ) from exc


def _grammar(schema: str) -> str:
    grammar: str = _library().LLMatcher.grammar_from_json_schema(schema, overrides=_WRITTEN)
    return grammar


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError(
            what="Sampling(schema=...)", package="llguidance", extra="structured"
        ) from None
    return llguidance
