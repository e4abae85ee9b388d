"""Text models of Hugging Face: reading them, tokenising a text column, and what their outputs become."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from kindler.collective import Array
from kindler.errors import ConfigError, DataError, MissingExtraError
from kindler.frameworks.torch import adapters
from kindler.frameworks.torch.generation import SAMPLING
from kindler.frameworks.torch.schemas import check_schema, vocabulary_of
from kindler.frameworks.torch.tagging import entities, tagged
from kindler.types import GENERATING, Sampling, TextTask

_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "regression": "AutoModelForSequenceClassification",
    "embedding": "AutoModel",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
}
_IGNORED = -100  # what the losses of transformers leave out
_MOST_TOKENS = 1 << 20  # tokenizers without a limit give a huge number


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Collates rows of text to the model's inputs, padded to the longest of the batch.

    For models that classify, a second text column is the other text of a pair; for models that generate, it
    is what to answer to the first. `sampling` is set where prompts are answered; `system` then makes
    conversations of them. JSON text of messages is one already.
    """

    tokenizer: Any
    task: TextTask
    labels: Mapping[int, str]
    max_length: int
    several: bool = False
    prefix: str = ""
    lower: bool = False
    sampling: str | None = None
    system: str | None = None

    @property
    def hint_for_labels(self) -> str:
        return f"number the classes, as the model does: {dict(list(self.labels.items())[:5])}."

    def described(self) -> dict[str, Any]:
        """As JSON, the same for equal ones."""
        vocabulary = json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return {
            "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "task": self.task,
            "labels": {str(number): name for number, name in self.labels.items()},
            "max_length": self.max_length,
            "several": self.several,
            "prefix": self.prefix,
            "lower": self.lower,
            "sampling": self.sampling or "",
        }

    def keys(self, columns: Sequence[Any]) -> list[Any]:
        """What equal rows have in common: the text, or all texts of the row."""
        texts = [
            [text if isinstance(text, str) else tuple(text) for text in _texts(values)] for values in columns
        ]
        return texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if self.task == "token-classification":
            return tagged(rows, self.tokenizer, self.labels, self.max_length)
        names = [name for name, value in rows[0].items() if isinstance(value, str)]
        if not 1 <= len(names) <= 2:
            raise ConfigError(
                f"this model takes a column of text, or two; received {list(rows[0])}, of which {names} are"
                " text.\nHint: name the column in feature_cols."
            )
        texts = [[self.cleaned(row[name]) for row in rows] for name in names]
        if self.task not in GENERATING:
            return self._encoded(*texts)
        if self.sampling is not None:
            return self._prompts(texts[0])
        return self._answered(*texts)

    def scored(
        self, names: tuple[str, ...] | None
    ) -> tuple[tuple[str, ...] | None, Callable[[list[Array]], list[Array]] | None]:
        """The columns that `predict` adds, and how they are made of the model's outputs."""
        if self.task in GENERATING:
            raise ConfigError(f"a model for {self.task} answers prompts.\nHint: use generate(...).")
        if self.task == "token-classification":
            if names is not None and len(names) != 1:
                raise ConfigError(
                    f"token-classification predicts one column, entities; received output_cols={list(names)}."
                )
            return names or ("entities",), self._tagged
        if self.task != "text-classification":
            return names, None
        if names is not None and len(names) != 2:
            raise ConfigError(
                "text-classification predicts two columns, the label and its score; received"
                f" output_cols={list(names)}."
            )
        return names or (("labels", "scores") if self.several else ("label", "score")), self._labelled

    def embedded(self, dtype: str, *, normalize: bool) -> Callable[[list[Array]], list[Array]]:
        return functools.partial(_embedded, dtype=dtype, normalize=normalize)

    def asking(self, sampling: Sampling, *, details: bool, system: str | None) -> Tokens:
        if system is not None:
            self._template()
        if sampling.schema is not None:
            check_schema(str(sampling.schema), self.vocabulary)
        told = {**asdict(sampling), "stop": list(sampling.stop), "details": details}
        return replace(self, sampling=json.dumps(told), system=system)

    def answers(self, outputs: list[Array], *, stop: Sequence[str], details: bool) -> list[Array]:
        """The columns of `generate`, of what `generated` returns."""
        tokens, ended, chances = outputs
        rows = [row[row >= 0].tolist() for row in tokens]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        reasons = ["stop" if end else "length" for end in ended.tolist()]
        for row, text in enumerate(texts):
            if places := [place for place in map(text.find, stop) if place >= 0]:
                texts[row], reasons[row] = text[: min(places)], "stop"
        if not details:
            return [objects(texts)]
        logprobs = [row[: len(kept)].tolist() for row, kept in zip(chances, rows, strict=True)]
        return [objects(texts), objects(rows), objects(reasons), objects(logprobs)]

    @functools.cached_property
    def vocabulary(self) -> str:
        return vocabulary_of(self.tokenizer)

    def cleaned(self, text: str) -> str:
        text = self.prefix + text
        return text.lower() if self.lower else text

    def _encoded(self, *texts: list[str]) -> dict[str, Any]:
        return dict(
            self.tokenizer(
                *texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="np"
            )
        )

    def _prompts(self, texts: list[str]) -> dict[str, Any]:
        talks = [self._messages(text) for text in texts]
        tokens = self._tokens(texts) if not any(talks) else []
        for row, (text, talk) in enumerate(zip(texts, talks, strict=True) if not tokens else ()):
            tokens.append(self._tokens([text])[0] if talk is None else self._spoken(talk, row)["input_ids"])
        ids, mask = _padded(tokens, self._pad, left=self.task == "text-generation")
        empty = np.flatnonzero(~mask.any(1))
        if len(empty):
            raise DataError("has no tokens, so there is nothing to continue", positions=empty.tolist())
        told = f"{self.sampling}\n{self.vocabulary if json.loads(self.sampling or '')['schema'] else ''}"
        return {"input_ids": ids, "attention_mask": mask, SAMPLING: objects([told] * len(ids))}

    def _answered(self, texts: list[str], answers: list[str] | None = None) -> dict[str, Any]:
        """Inputs and the labels of the loss: all tokens, or those of the answers."""
        if self.task == "text2text-generation":
            if answers is None:
                raise ConfigError(
                    "a model for text2text-generation learns from two columns of text, what it is given and"
                    " what it is to answer.\nHint: fit(feature_cols=['question', 'answer'])."
                )
            ids, mask = _padded(self._tokens(texts), self._pad, left=False)
            target = self.tokenizer(text_target=answers, truncation=True, max_length=self.max_length)
            labels, _ = _padded(target["input_ids"], _IGNORED, left=False)
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}
        talks = [self._messages(text) if answers is None else None for text in texts]
        prompts = self._tokens(texts)
        end = self.tokenizer.eos_token_id
        if answers is None:
            rests: list[list[int]] = [[] for _ in prompts]
        else:
            rests = self.tokenizer(answers, add_special_tokens=False)["input_ids"]
        rests = [[*rest, *([] if end is None else [end])] for rest in rests]
        pairs = list(zip(prompts, rests, strict=True))
        tokens = [[*prompt, *rest][: self.max_length] for prompt, rest in pairs]
        learned = list(tokens)
        if answers is not None:
            learned = [[*[_IGNORED] * len(prompt), *rest][: self.max_length] for prompt, rest in pairs]
        for row, talk in enumerate(talks):
            if talk is not None:
                tokens[row], learned[row] = self._learned(talk, row)
        ids, mask = _padded(tokens, self._pad, left=False)
        return {"input_ids": ids, "attention_mask": mask, "labels": _padded(learned, _IGNORED, left=False)[0]}

    def _messages(self, text: str) -> list[dict[str, Any]] | None:
        """The conversation that a text is, or is to become."""
        made: Any = None
        if text.lstrip()[:1] == "[":
            with suppress(ValueError):
                made = json.loads(text)
        if made and all(isinstance(each, dict) and {"role", "content"} <= set(each) for each in made):
            self._template()
            return list(made)
        if self.system is None:
            return None
        return [{"role": "system", "content": self.system}, {"role": "user", "content": text}]

    def _template(self) -> str:
        template = getattr(self.tokenizer, "chat_template", None)
        if not template:
            raise ConfigError(
                "this tokenizer has no chat template, so messages cannot become a prompt.\n"
                "Hint: use the tokenizer of a model that was trained on conversations, or set"
                " tokenizer.chat_template."
            )
        return str(template)

    def _spoken(self, messages: list[dict[str, Any]], row: int, *, asks: bool = True, **more: Any) -> Any:
        made = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=asks, tokenize=True, return_dict=True, **more
        )
        if asks and len(made["input_ids"]) > self.max_length:
            raise _at(row, f"has {len(made['input_ids'])} tokens, more than max_length={self.max_length}")
        return made

    def _learned(self, messages: list[dict[str, Any]], row: int) -> tuple[list[int], list[int]]:
        """Tokens and labels: those that the template marks as the assistant's, or else the last answer."""
        if re.search(r"\{%-?\s*generation", self._template()):
            made = self._spoken(messages, row, asks=False, return_assistant_tokens_mask=True)
            tokens, own = made["input_ids"], made["assistant_masks"]
        else:
            if messages[-1]["role"] != "assistant" or len(messages) < 2:
                raise _at(row, "does not end with a message of the assistant, so there is nothing to learn")
            tokens = self._spoken(messages, row, asks=False)["input_ids"]
            asked = self._spoken(messages[:-1], row)["input_ids"]
            if tokens[: len(asked)] != asked:
                raise _at(row, "is changed by its last answer in the chat template, so it cannot be learned")
            own = [0] * len(asked) + [1] * (len(tokens) - len(asked))
        learned = [token if mine else _IGNORED for token, mine in zip(tokens, own, strict=True)]
        return tokens[: self.max_length], learned[: self.max_length]

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        tokens: list[list[int]] = self.tokenizer(texts, truncation=True, max_length=self.max_length)[
            "input_ids"
        ]
        return tokens

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    def _tagged(self, outputs: list[Array]) -> list[Array]:
        return [objects(entities(outputs, self.labels))]

    def _labelled(self, outputs: list[Array]) -> list[Array]:
        logits = torch.from_numpy(np.ascontiguousarray(outputs[0], np.float32))
        names = [self.labels.get(i, str(i)) for i in range(logits.shape[1])]
        if self.several:
            chances = logits.sigmoid().numpy()
            chosen = [[names[i] for i in np.flatnonzero(row > 0.5)] for row in chances]
            return [objects(chosen), chances]
        chance, best = logits.softmax(-1).max(-1)
        return [objects([names[i] for i in best.tolist()]), chance.numpy()]


def _at(row: int, problem: str) -> DataError:
    return DataError(problem, positions=[row])


def objects(values: Sequence[Any]) -> Array:
    """One object per row, also where the objects are lists of the same length."""
    made = np.empty(len(values), object)
    made[:] = list(values)
    return made


def _texts(values: Any) -> list[Any]:
    return values.rows() if hasattr(values, "rows") else list(values)


def _padded(rows: Sequence[Sequence[int]], fill: int, *, left: bool) -> tuple[Array, Array]:
    width = max(1, *(len(row) for row in rows)) if len(rows) > 1 else max(1, len(rows[0]))
    ids, mask = np.full((len(rows), width), fill, np.int64), np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def _embedded(outputs: list[Array], *, dtype: str, normalize: bool) -> list[Array]:
    [vectors] = outputs
    if normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, 1e-12)
    if dtype == "int8":
        return [np.round(vectors * 127).astype(np.int8)]
    return [vectors.astype(dtype, copy=False)]


class SentenceEncoder(torch.nn.Module):
    """An encoder, the pooling of its tokens, and what follows, as sentence-transformers computes them."""

    def __init__(
        self,
        encoder: torch.nn.Module,
        *,
        pooling: Sequence[str] = ("mean",),
        dense: Sequence[torch.nn.Module] = (),
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.dense = encoder, torch.nn.Sequential(*dense)
        self.pooling, self.normalize = tuple(pooling), normalize
        if unknown := set(pooling) - set(_POOLINGS):
            raise ConfigError(
                f"this model's pooling, {', '.join(sorted(unknown))}, is not one of {', '.join(_POOLINGS)}."
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **types).last_hidden_state
        pooled = [_POOLINGS[name](tokens, attention_mask.to(tokens.dtype)) for name in self.pooling]
        vectors = self.dense(torch.cat(pooled, 1))
        return {"embedding": torch.nn.functional.normalize(vectors) if self.normalize else vectors}


def _mean(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(tokens, mask) / mask.sum(1, keepdim=True).clamp(min=1e-9)


def _sum(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btd,bt->bd", tokens, mask)


def _root(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(tokens, mask) / mask.sum(1, keepdim=True).clamp(min=1e-9).sqrt()


def _max(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tokens.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(1)


def _first(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(tokens), device=tokens.device)
    return tokens[rows, mask.to(torch.int64).argmax(1)]


def _last(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows, width = torch.arange(len(tokens), device=tokens.device), mask.shape[1]
    return tokens[rows, width - 1 - mask.flip(1).to(torch.int64).argmax(1)]


def _weighted(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _mean(tokens, mask * torch.arange(1, mask.shape[1] + 1, device=mask.device))


_POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _root,
    "weightedmean": _weighted,
    "lasttoken": _last,
}


@dataclass(frozen=True)
class TextModel:
    """What `Estimator.from_huggingface` makes of its arguments."""

    model: torch.nn.Module | Callable[..., torch.nn.Module]
    tokens: Tokens

    @property
    def loss(self) -> Literal["model"] | None:
        return None if self.tokens.task == "embedding" else "model"

    @property
    def optimizer(self) -> Any:
        return None if self.loss is None else functools.partial(torch.optim.AdamW, lr=5e-5)

    @classmethod
    def read(
        cls,
        model: Any,
        tokenizer: Any,
        task: TextTask,
        *,
        config: Mapping[str, Any],
        max_length: int | None,
        adapter: Any = None,
        seed: int = 0,
        device: str = "auto",
    ) -> TextModel:
        if task not in _CLASSES:
            raise ConfigError(f"task must be one of {', '.join(_CLASSES)}; received {task!r}.")
        try:
            import transformers
        except ImportError:
            raise MissingExtraError(
                what="from_huggingface", package="transformers", extra="huggingface"
            ) from None
        own: dict[str, Any] = {}
        adapting = None if adapter is None else adapters.config_of(adapter, task)
        place: adapters.Place | None = None
        if bits := getattr(adapter, "base_bits", None):
            named = isinstance(model, str | PathLike)
            config = {**config, **adapters.quantized(bits, device=device, from_place=named)}
        if hasattr(model, "encode") and hasattr(model, "save_pretrained") and task == "embedding":
            with TemporaryDirectory(prefix="kindler-") as folder:  # a SentenceTransformer
                model.save_pretrained(folder)
                return cls.read(folder, tokenizer, task, config=config, max_length=max_length)
        if isinstance(model, str | PathLike):
            path = Path(fspath(model))
            if task == "embedding" and (path / "modules.json").is_file():
                model, own = _sentence_encoder(path, config)
                tokenizer = path if tokenizer is None else tokenizer
            else:
                tokenizer = model if tokenizer is None else tokenizer
                more = {"problem_type": "regression", "num_labels": 1} if task == "regression" else {}
                place = adapters.Place(_CLASSES[task], fspath(model), {**more, **config})
                model = place.read(seeded=adapting is not None)
        elif config:
            raise ConfigError("config changes what is read from a folder or a hub; a model was passed.")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                "model must be a folder, the name of a model on the Hugging Face hub, or a model; received"
                f" {model!r}."
            )
        if task == "embedding" and not isinstance(model, SentenceEncoder):
            model = SentenceEncoder(model, normalize=True)
        if tokenizer is None:
            raise ConfigError("a model that is passed as an object needs its tokenizer=.")
        if isinstance(tokenizer, str | PathLike):
            tokenizer = transformers.AutoTokenizer.from_pretrained(fspath(tokenizer))
        tokens = _tokens(model, tokenizer, task, {**own, "max_length": max_length or own.get("max_length")})
        return cls(model if adapting is None else adapters.above(model, place, adapting, seed), tokens)


def _tokens(model: torch.nn.Module, tokenizer: Any, task: TextTask, own: Mapping[str, Any]) -> Tokens:
    config = getattr(model, "config", None) or getattr(getattr(model, "encoder", None), "config", None)
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    longest = own["max_length"] or min((int(n) for n in limits if n and 0 < n < _MOST_TOKENS), default=None)
    if not isinstance(longest, int | type(None)) or (longest is not None and longest < 1):
        raise ConfigError(f"max_length must be a number of tokens from 1; received {longest!r}.")
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    labels = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    known = {name: own[name] for name in ("prefix", "lower") if name in own}
    return Tokens(
        tokenizer=tokenizer,
        task=task,
        labels=labels,
        max_length=longest or _MOST_TOKENS,
        several=several,
        **known,
    )


def _sentence_encoder(folder: Path, config: Mapping[str, Any]) -> tuple[SentenceEncoder, dict[str, Any]]:
    """From a folder of sentence-transformers, with how it cuts and prefixes texts."""
    from transformers import AutoModel

    parts: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    order = []
    for module in _json(folder / "modules.json"):
        kind, place = str(module["type"]).rpartition(".")[2], folder / str(module["path"])
        parts.setdefault(kind, []).append((place, _json(place / "config.json")))
        order.append(kind)
    rest = order[2:-1] if order[-1] == "Normalize" else order[2:]
    if order[:2] != ["Transformer", "Pooling"] or set(rest) - {"Dense"}:
        raise ConfigError(
            f"{folder}: modules.json lists {', '.join(order)}; a Transformer, its Pooling, Dense"
            " layers and a Normalize at the end can be read."
        )
    place, pool = parts["Transformer"][0][0], parts["Pooling"][0][1]
    if pool.get("include_prompt") is False:
        raise ConfigError(f"{folder}: pooling without the prompt is not supported.")
    told = _json(place / "sentence_bert_config.json")
    prompts = _json(folder / "config_sentence_transformers.json")
    default = prompts.get("default_prompt_name")
    own = {
        "max_length": told.get("max_seq_length"),
        "lower": bool(told.get("do_lower_case")),
        "prefix": (prompts.get("prompts") or {}).get(default, "") if default else "",
    }
    encoder = SentenceEncoder(
        AutoModel.from_pretrained(place, **config),
        pooling=_poolings(pool),
        dense=[layer for place, facts in parts.get("Dense", []) for layer in _dense(place, facts)],
        normalize=order[-1] == "Normalize",
    )
    return encoder, own


def _poolings(told: Mapping[str, Any]) -> list[str]:
    if "pooling_mode" in told:
        mode = told["pooling_mode"]
        return [mode] if isinstance(mode, str) else list(mode)
    flags = {
        "cls": "cls_token",
        "max": "max_tokens",
        "mean": "mean_tokens",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "weightedmean": "weightedmean_tokens",
        "lasttoken": "lasttoken",
    }
    return [name for name, flag in flags.items() if told.get(f"pooling_mode_{flag}")]


def _dense(folder: Path, told: Mapping[str, Any]) -> list[torch.nn.Module]:
    from safetensors.torch import load_file

    activation = str(told.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    layers = {
        name: getattr(torch.nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
    }
    if activation not in layers:
        raise ConfigError(f"{folder}: the activation {activation!r} is not one of {', '.join(layers)}.")
    linear = torch.nn.Linear(told["in_features"], told["out_features"], bias=told.get("bias", True))
    weights = load_file(folder / "model.safetensors")
    linear.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in weights.items()})
    return [linear, layers[activation]()]


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else {}
