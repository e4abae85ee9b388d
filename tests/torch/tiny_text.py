"""A tiny model of Hugging Face and a tokenizer, made in code, for sentences whose class a word decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

GOOD, BAD = ("fine", "lovely", "great"), ("awful", "dull", "poor")
OTHERS = ("the", "film", "was", "and", "its", "music", "quite", "very", "a", "story")


def sentences(rows: int, seed: int = 0) -> dict[str, Any]:
    """Texts of different lengths, and whether the one telling word in them is a good one."""
    random = np.random.default_rng(seed)
    label = random.integers(0, 2, rows)
    texts = []
    for kind in label:
        words = list(random.choice(OTHERS, random.integers(2, 9)))
        words.insert(int(random.integers(0, len(words))), str(random.choice(GOOD if kind else BAD)))
        texts.append(" ".join(map(str, words)))
    return {"text": texts, "label": label}


def tokenizer() -> Any:
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHERS]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


class Tokenize:
    """A collate function: the texts of a batch, padded to the longest of them."""

    def __init__(self, made: Any) -> None:
        self.tokenizer = made

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        return self.tokenizer([row["text"] for row in rows], padding=True, return_tensors="np")


def classifier(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=18,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=2,
    )
    return BertForSequenceClassification(config)
