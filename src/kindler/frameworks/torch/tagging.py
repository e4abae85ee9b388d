"""Token classification: labels of words become labels of tokens, and logits of tokens become entities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError, DataError

CARRIED = "kindler.carried"  # an input that the model does not get: it is among the outputs again
_IGNORED = -100


def tagged(
    rows: list[dict[str, Any]], tokenizer: Any, labels: Mapping[int, str], max_length: int
) -> dict[str, Any]:
    """Tokens of a text or of a list of words; with a second list, the label of each word as well."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"token-classification needs a fast tokenizer, which knows where tokens begin; received"
            f" {type(tokenizer).__name__}.\nHint: AutoTokenizer.from_pretrained(..., use_fast=True)."
        )
    names = list(rows[0])
    texts: list[Any] = [row[names[0]] for row in rows]
    if len(names) > 2 or (len(names) == 2 and isinstance(texts[0], str)):
        raise ConfigError(
            "token-classification learns from a column of words and a column with the label of each word;"
            f" received {names}.\nHint: fit(feature_cols='words', label_cols='tags'), both of them lists."
        )
    words = not isinstance(texts[0], str)
    texts = [list(text) for text in texts] if words else texts
    made = tokenizer(
        texts,
        is_split_into_words=words,
        padding=True,
        truncation=True,
        max_length=max_length,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_tensors="np",
    )
    spans, special = made.pop("offset_mapping"), made.pop("special_tokens_mask")
    inputs = dict(made)
    if len(names) == 2:
        numbers = {name: number for number, name in labels.items()}
        aligned = np.full(inputs["input_ids"].shape, _IGNORED, np.int64)
        for i, row in enumerate(rows):
            tags = _numbers(row[names[1]], len(texts[i]), numbers, i, names[1])
            before: int | None = None
            for place, word in enumerate(made.word_ids(i)):
                if word is not None and word != before:
                    aligned[i, place] = tags[word]
                before = word
        return {**inputs, names[1]: aligned}
    told = []
    for i, text in enumerate(texts):
        starts = np.cumsum([0, *(len(word) + 1 for word in text)]) if words else None
        ids = made.word_ids(i)
        places = [
            [-1, -1] if special[i, k] else (span + (0 if starts is None else starts[ids[k]])).tolist()
            for k, span in enumerate(spans[i])
        ]
        told.append(json.dumps([" ".join(text) if words else text, places]).encode())
    width = max(map(len, told))
    carried = np.frombuffer(b"".join(each.ljust(width) for each in told), np.uint8)
    return {**inputs, CARRIED: carried.reshape(len(rows), width)}


def _numbers(tags: Any, words: int, known: Mapping[str, int], row: int, column: str) -> list[int]:
    made: list[Any] = [known.get(tag, tag) if isinstance(tag, str) else int(tag) for tag in tags]
    odd = [tag for tag in made if tag != _IGNORED and tag not in known.values()]
    problem = None
    if len(made) != words:
        problem = f"has {len(made)} labels for {words} words"
    elif odd:
        problem = f"has the label {odd[0]!r}, which is not one of the model's: {list(known)[:9]}"
    if problem is not None:
        error = DataError(problem, column=column)
        error.positions = [row]
        raise error
    return made


def entities(outputs: Sequence[Array], labels: Mapping[int, str]) -> list[list[dict[str, Any]]]:
    """Of each row, as the pipeline of transformers with `aggregation_strategy="simple"` finds them."""
    logits, carried = np.asarray(outputs[0], np.float32), outputs[-1]
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    best, scores = chances.argmax(-1), chances.max(-1)
    return [
        _grouped(json.loads(told.tobytes()), [labels.get(int(k), str(k)) for k in row], score)
        for told, row, score in zip(carried, best, scores, strict=True)
    ]


def _grouped(told: Any, names: Sequence[str], scores: Array) -> list[dict[str, Any]]:
    text, places = told
    groups: list[tuple[str, list[int]]] = []
    for k, (start, _) in enumerate(places):
        if start < 0:
            continue
        begins, tag = names[k].startswith("B-"), names[k][2:] if names[k][:2] in ("B-", "I-") else names[k]
        if groups and groups[-1][0] == tag and not begins:
            groups[-1][1].append(k)
        else:
            groups.append((tag, [k]))
    return [
        {
            "start": places[tokens[0]][0],
            "end": places[tokens[-1]][1],
            "label": tag,
            "score": float(np.mean(scores[tokens])),
            "text": text[places[tokens[0]][0] : places[tokens[-1]][1]],
        }
        for tag, tokens in groups
        if tag != "O"
    ]
