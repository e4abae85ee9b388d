"""`TextSet`: texts as sequences of indices."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kindler.compat.zoo.feature.common import Sample
from kindler.compat.zoo.tfpark.rows import ArrayRows, Rows
from kindler.compat.zoo.tfpark.structures import Unpack
from kindler.errors import ConfigError

__all__ = ["TextSet"]

_WORD = re.compile(r"\S+")


class TextSet:
    """Texts with labels, on the driver; each step returns a new set.

    Args:
        texts: The texts.
        labels: Their labels, whole numbers; None for none.
    """

    def __init__(self, texts: Sequence[str], labels: Sequence[int] | None = None) -> None:
        if labels is not None and len(labels) != len(texts):
            raise ConfigError(f"TextSet: {len(texts)} texts and {len(labels)} labels.")
        self._texts = list(texts)
        self._labels = None if labels is None else [int(label) for label in labels]
        self._tokens: list[list[str]] | None = None
        self._indices: list[list[int]] | None = None
        self._word_index: dict[str, int] | None = None

    @classmethod
    def read(cls, path: str, sc: Any = None, min_partitions: int = 1, bigdl_type: str = "float") -> TextSet:
        """Read a folder with one folder a class; labels count from 0, in the order of names."""
        if not os.path.isdir(path):
            raise ConfigError(f"TextSet.read: there is no folder {path}.")
        classes = sorted(name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name)))
        texts, labels = [], []
        for number, name in enumerate(classes):
            for file in sorted(os.listdir(os.path.join(path, name))):
                with open(os.path.join(path, name, file), encoding="utf-8", errors="replace") as opened:
                    texts.append(opened.read())
                labels.append(number)
        if not texts:
            raise ConfigError(f"TextSet.read: there are no texts in the folders of {path}.")
        return cls(texts, labels)

    def tokenize(self) -> TextSet:
        """Split texts into words at spaces."""
        return self._with(_tokens=[_WORD.findall(text) for text in self._texts])

    def normalize(self) -> TextSet:
        """Lower the case of words, and leave only letters in them."""
        words = [
            [re.sub(r"[^a-z]", "", word.lower()) for word in text]
            for text in self._need("_tokens", "tokenize")
        ]
        return self._with(_tokens=[[word for word in text if word] for text in words])

    def word2idx(
        self,
        remove_topN: int = 0,
        max_words_num: int = -1,
        min_freq: int = 1,
        existing_map: Mapping[str, int] | None = None,
    ) -> TextSet:
        """Number words by how frequent they are, from 1; unknown words are left out."""
        tokens = self._need("_tokens", "tokenize")
        if existing_map is None:
            counted = Counter(word for text in tokens for word in text)
            ordered = sorted((w for w, n in counted.items() if n >= min_freq), key=lambda w: (-counted[w], w))
            chosen = ordered[remove_topN:][: max_words_num if max_words_num > 0 else None]
            index = {word: number for number, word in enumerate(chosen, start=1)}
        else:
            index = dict(existing_map)
        indices = [[index[word] for word in text if word in index] for text in tokens]
        return self._with(_indices=indices, _word_index=index)

    def shape_sequence(self, len: int, trunc_mode: str = "pre", pad_element: int = 0) -> TextSet:  # noqa: A002
        """Make all sequences equally long.

        Args:
            len: How long.
            trunc_mode: Whether longer ones lose their beginning ("pre") or their end ("post").
            pad_element: What shorter ones end with.
        """
        if trunc_mode not in ("pre", "post"):
            raise ConfigError(f"shape_sequence: trunc_mode must be 'pre' or 'post'; received {trunc_mode!r}.")
        cut = [row[-len:] if trunc_mode == "pre" else row[:len] for row in self._need("_indices", "word2idx")]
        return self._with(_indices=[row + [pad_element] * (len - row.__len__()) for row in cut])

    def generate_sample(self) -> TextSet:
        """The set itself: samples are made when it is used."""
        self._need("_indices", "word2idx")
        return self

    def transform(self, transformer: Any) -> TextSet:
        """The set with each text changed by a function, before it is tokenized."""
        return TextSet([transformer(text) for text in self._texts], self._labels)

    def get_word_index(self) -> dict[str, int] | None:
        return self._word_index

    def get_texts(self) -> list[str]:
        return list(self._texts)

    def get_labels(self) -> list[int]:
        """The labels; -1 for texts without one."""
        return [-1] * len(self._texts) if self._labels is None else list(self._labels)

    def get_samples(self) -> list[Sample]:
        labels: Sequence[Any] = self._labels if self._labels is not None else [None] * len(self._texts)
        rows = self._need("_indices", "word2idx")
        return [Sample(np.array(row), label) for row, label in zip(rows, labels, strict=True)]

    def sample_rows(self, unpack: Unpack, *, labelled: bool) -> Rows:
        if labelled and self._labels is None:
            raise ConfigError("the TextSet has no labels.")
        rows = self._need("_indices", "word2idx")
        pairs: list[Any] = list(zip(rows, self._labels or [], strict=True)) if labelled else rows
        made = [
            unpack.arrays((np.array(one[0]), np.array(one[1])) if labelled else np.array(one))
            for one in pairs
        ]
        return ArrayRows([np.stack(parts) for parts in zip(*made, strict=True)])

    def _need(self, name: str, step: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"call {step}() on the TextSet first.")
        return value

    def _with(self, **parts: Any) -> TextSet:
        made = TextSet(self._texts, self._labels)
        made.__dict__.update({**self.__dict__, **parts})
        return made
