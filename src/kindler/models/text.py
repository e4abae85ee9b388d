"""Text models for requests: texts to vectors, and prompts that join and leave a running batch.

This is the side of the model's process. What a request may ask for, who waits and who goes first, is the
server's business (`serve/answers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kindler.errors import ConfigError, DataError, MissingExtraError
from kindler.frameworks.torch.generation import answered, engine_of
from kindler.frameworks.torch.huggingface import Tokens
from kindler.frameworks.torch.prompts import Prompt, context_of, ends_of
from kindler.frameworks.torch.schemas import check_schema, matcher_of
from kindler.models._configurations import names_something, read_json
from kindler.models.kind import Meta, require_trust
from kindler.models.predictor import Predictor
from kindler.models.safety import objects_in
from kindler.models.signature import Arrays, Signature, TensorSpec
from kindler.registry import imported
from kindler.types import GENERATING, Sampling

_NOT_FACTS = ("tokenizer", "sampling")
_TEXTS = 64  # that are embedded at a time
_HALF_A_LETTER = "\ufffd"


def text_predictor(tokens: Tokens, model: Any, device: str) -> Predictor | None:
    """What serves a model for this task; None for tasks whose rows are those of any other model."""
    if tokens.task == "embedding":
        return EmbeddingPredictor(tokens, model, device)
    return GeneratingPredictor(tokens, model, device) if tokens.task in GENERATING else None


def write_tokens(tokens: Tokens, folder: Path) -> dict[str, Any] | None:
    """Write a tokenizer as data; returns the rest as JSON. None if it is of a class of somebody else's."""
    if not type(tokens.tokenizer).__module__.startswith("transformers."):
        return None
    tokens.tokenizer.save_pretrained(folder)
    return {one.name: getattr(tokens, one.name) for one in fields(tokens) if one.name not in _NOT_FACTS}


def read_tokens(folder: Path, facts: Meta, *, trusted: bool) -> Tokens:
    """The tokens that `write_tokens` wrote. Whatever names code or other files needs trust."""
    configs = [read_json(path) for path in sorted(folder.glob("*config.json"))]
    parts = [part for config in configs for part in objects_in(config)]
    if named := sorted({key for part in parts for key, value in part.items() if names_something(key, value)}):
        require_trust(
            trusted,
            what="a tokenizer of Hugging Face",
            reason=f"its configuration has {', '.join(named[:5])}, which may name code or files that would be"
            " loaded",
        )
    transformers = imported("transformers", what="a text model", extra="huggingface")
    known = {one.name: facts[one.name] for one in fields(Tokens) if one.name in facts}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        labels = {int(number): str(name) for number, name in known.pop("labels").items()}
        return Tokens(tokenizer=tokenizer, labels=labels, **known)
    except Exception as exc:  # of transformers: it says why
        raise ConfigError(f"the stored tokenizer cannot be rebuilt: {exc}") from exc


class _TextPredictor(Predictor):
    def __init__(self, tokens: Tokens, model: Any, device: str) -> None:
        self._tokens, self._model, self._device = tokens, model.eval().to(device), device
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        encoder = getattr(model, "encoder", model)
        self._words = encoder.get_input_embeddings().num_embeddings

    def _ids(self, text: Any, *, special: bool = True, cut: bool = False) -> list[int]:
        """The tokens of a text, all of them unless `cut`; tokens as they are."""
        if isinstance(text, str):
            tokens, limit = self._tokens, {"truncation": True, "max_length": self._tokens.max_length}
            text = tokens.cleaned(text) if special else text
            ids = tokens.tokenizer(text, add_special_tokens=special, **(limit if cut else {}))
            found: list[int] = ids["input_ids"]
        else:
            found = list(text)
            if wrong := [
                number for number in found if type(number) is not int or not 0 <= number < self._words
            ]:
                raise DataError(f"{wrong[0]!r} is not one of the model's tokens, 0 to {self._words - 1}.")
        if not found:
            raise DataError("the text has no tokens.")
        return found


class EmbeddingPredictor(_TextPredictor):
    """Vectors of texts. `embed` also takes tokens, counts them, and cuts nothing."""

    methods = ("predict", "embed")
    joins = True

    def __init__(self, tokens: Tokens, model: Any, device: str) -> None:
        super().__init__(tokens, model, device)
        self.signature = Signature((TensorSpec("text", "object", (None,)),))
        self.text = {"task": tokens.task, "context": tokens.max_length, "chat": False}

    def call(self, inputs: Arrays, method: str) -> Arrays:
        most = self._tokens.max_length
        rows = [self._ids(text, cut=method == "predict") for text in inputs["text"].tolist()]
        longest = max(rows, key=len)
        if len(longest) > most:
            raise DataError(f"a text has {len(longest)} tokens; the model takes at most {most}.")
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        vectors: list[Any] = [None] * len(rows)
        for start in range(0, len(order), _TEXTS):
            some = order[start : start + _TEXTS]
            for row, vector in zip(some, self._vectors([rows[row] for row in some]), strict=True):
                vectors[row] = vector
        outputs = {"embedding": np.stack(vectors)}
        return outputs if method == "predict" else {**outputs, "tokens": np.array([len(row) for row in rows])}

    def _vectors(self, rows: list[list[int]]) -> Any:
        padded = self._tokens.tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        inputs = {name: padded[name].to(self._device) for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            return self._model(**inputs)["embedding"].float().cpu().numpy()


class GeneratingPredictor(_TextPredictor):
    """Answers to prompts. `predict` gives those of `generate` without settings; `step` adds a token to each
    of the answers that the server has begun."""

    joins = False

    def __init__(self, tokens: Tokens, model: Any, device: str) -> None:
        super().__init__(tokens, model, device)
        self.signature = Signature((TensorSpec("prompt", "object", (None,)),))
        self._context = context_of(model)
        self._engine = engine_of(model, nullcontext)
        self._rows: dict[int, _Row] = {}
        self._most = min(tokens.max_length, self._context or tokens.max_length)
        self.text = {
            "task": tokens.task,
            "context": self._most,
            "chat": bool(getattr(tokens.tokenizer, "chat_template", None)),
        }

    def call(self, inputs: Arrays, method: str) -> Arrays:
        texts = inputs["prompt"].tolist()
        prompts = [
            Prompt.of(row, self._ids(text, cut=True), Sampling(), context=self._context)
            for row, text in enumerate(texts)
        ]
        for _ in answered(engine_of(self._model, nullcontext), iter(prompts)):
            pass
        made = np.empty(len(prompts), object)
        made[:] = [_decoded(self._tokens.tokenizer, prompt.answer) for prompt in prompts]
        return {"generated": made}

    def step(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Let prompts join or leave, or else add a token to each answer; returns what is new."""
        for number in asked["leave"]:
            if (row := self._rows.pop(number, None)) is not None:
                row.prompt.stopped = True
        began, failed = [], []
        joining: list[Prompt] = []
        for one in asked["join"]:
            try:
                row = self._row(one)
            except (ConfigError, DataError, MissingExtraError) as exc:
                failed.append([one["number"], str(exc)])
                continue
            self._rows[one["number"]] = row
            joining.append(row.prompt)
            began.append([one["number"], len(row.prompt.tokens)])
        try:
            if joining:
                self._engine.join(joining)
        except (MemoryError, RuntimeError) as exc:  # there is no room for them; the others go on
            for prompt in joining:
                prompt.stopped = True
                del self._rows[prompt.number]
                failed.append([prompt.number, f"the prompt and its answer are too long: {exc}"])
        try:
            if self._rows:
                self._engine.step()
            for number, row in list(self._rows.items()):
                if row.prompt.problem is not None:
                    failed.append([number, f"the answer {row.prompt.problem}"])
                    del self._rows[number]
            told = [new for row in self._rows.values() if (new := row.told()) is not None]
        except BaseException:
            for row in self._rows.values():
                row.prompt.stopped = True
            self._rows.clear()
            raise
        self._rows = {number: row for number, row in self._rows.items() if not row.prompt.done}
        if not self._rows:
            self._engine.step()  # which gives the memory of those that are done back
        return {"began": began, "failed": failed, "told": told}

    def _row(self, asked: Mapping[str, Any]) -> _Row:
        if (messages := asked.get("messages")) is not None:
            tokens = self._ids(self._tokens_of_chat(messages), special=False)
        else:
            tokens = self._ids(asked["prompt"])
        most = min(self._most - (not self._model.config.is_encoder_decoder), asked["most_prompt"])
        if len(tokens) > most:
            raise DataError(f"the prompt has {len(tokens)} tokens; at most {most} are allowed.")
        sampling = Sampling(**asked["sampling"])
        vocabulary = self._tokens.vocabulary if sampling.schema else ""
        if sampling.schema:
            check_schema(str(sampling.schema), vocabulary)
        matcher = matcher_of(sampling, vocabulary, ends_of(self._model))
        prompt = Prompt.of(
            asked["number"],
            tokens,
            sampling,
            context=self._context,
            details=asked["top"] is not None,
            top=asked["top"] or 0,
            matcher=matcher,
        )
        return _Row(prompt, self._tokens.tokenizer, stream=asked["stream"])

    def _tokens_of_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        tokenizer = self._tokens.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the model's tokenizer has no chat template, so it cannot answer messages; use"
                " /v1/completions, or set tokenizer.chat_template before the model is stored."
            )
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as exc:  # of the template, which says why
            raise DataError(f"the model's chat template rejects these messages: {exc}") from exc
        return text


class _Row:
    """An answer as text: what of it is certain, and where it stops."""

    def __init__(self, prompt: Prompt, tokenizer: Any, *, stream: bool) -> None:
        self.prompt, self._tokenizer, self._stream = prompt, tokenizer, stream
        self._seen = 0  # tokens that were read
        self._first, self._read = 0, 0  # those whose text the next ones are seen beside, and are in `_text`
        self._text = ""
        self._sent = 0  # letters of it
        self._is_cut = False

    def told(self) -> list[Any] | None:
        """What is new: number, text, how many tokens, why it ended, and tokens with probabilities."""
        prompt = self.prompt
        new, self._seen = len(prompt.answer) - self._seen, len(prompt.answer)
        if new:
            self._read_on()
            self._stop()
        if not new and not prompt.done:
            return None
        reason = None
        if prompt.done:
            whole = self._whole()
            reason = "stop" if self._is_cut or prompt.stopped else "length"
            if whole.startswith(self._text[: self._sent]):
                text = whole[self._sent :]
            else:
                text = self._text[self._sent :]
        else:
            text = self._certain()
        return [prompt.number, text, new, reason, self._probabilities(new)]

    def _read_on(self) -> None:
        """Add the text of new tokens, unless it ends within a letter. They are decoded beside the ones before
        them, as spaces depend on these."""
        answer = self.prompt.answer
        before = _decoded(self._tokenizer, answer[self._first : self._read])
        now = _decoded(self._tokenizer, answer[self._first :])
        if len(now) > len(before) and not now.endswith(_HALF_A_LETTER) and now.startswith(before):
            self._text += now[len(before) :]
            self._first, self._read = self._read, len(answer)

    def _stop(self) -> None:
        stop = self.prompt.sampling.stop
        first = self._sent
        if places := [place for place in (self._text.find(text, first) for text in stop) if place >= 0]:
            self._text, self._is_cut = self._text[: min(places)], True
            self.prompt.stopped = True

    def _certain(self) -> str:
        """What can be sent: all but what a stop text may begin with."""
        if not self._stream:
            return ""
        end = len(self._text)
        for stop in self.prompt.sampling.stop:
            for size in range(min(len(stop) - 1, len(self._text) - self._sent), 0, -1):
                if self._text.endswith(stop[:size]):
                    end = min(end, len(self._text) - size)
                    break
        text, self._sent = self._text[self._sent : end], end
        return text

    def _whole(self) -> str:
        """The answer as `generate` gives it."""
        text = _decoded(self._tokenizer, self.prompt.answer)
        if places := [place for place in map(text.find, self.prompt.sampling.stop) if place >= 0]:
            self._is_cut, text = True, text[: min(places)]
        return text

    def _probabilities(self, new: int) -> list[Any] | None:
        prompt = self.prompt
        if not prompt.details:
            return None
        first = len(prompt.answer) - new
        return [
            [
                self._named(prompt.answer[at]),
                prompt.chances[at],
                [[self._named(token), chance] for token, chance in prompt.tops[at]] if prompt.top else [],
            ]
            for at in range(first, len(prompt.answer))
        ]

    def _named(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    [text] = tokenizer.batch_decode([list(tokens)], skip_special_tokens=True)
    return str(text)
