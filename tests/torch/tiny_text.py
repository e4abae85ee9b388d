"""A tiny model of Hugging Face and a tokenizer, made in code, for sentences whose class a word decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

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


def moved(estimator: Any, seed: int = 1) -> Any:
    """As if it had been trained: new adapters have no effect."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in estimator.get_model().parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.5)
    return estimator


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


def ending_tokenizer() -> Any:
    """With a token that ends texts, number 18."""
    made = tokenizer()
    made.add_special_tokens({"eos_token": "[EOS]"})
    return made


def generator(kind: str, *, words: int = 19, end: int = 18, context: int = 64, **options: Any) -> Any:
    """A model that continues ("gpt2", "llama") or answers ("t5") texts, with large random weights."""
    torch.manual_seed(0)
    ends: dict[str, Any] = {"eos_token_id": end, "bos_token_id": None, "pad_token_id": 0, "vocab_size": words}
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=32, n_layer=2, n_head=2, n_positions=context, initializer_range=0.4, **ends
        )
        model: Any = GPT2LMHeadModel(config)
    elif kind == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        model = T5ForConditionalGeneration(
            T5Config(decoder_start_token_id=0, initializer_factor=3.0, **sizes, **ends)
        )
        torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        model = LlamaForCausalLM(
            LlamaConfig(
                num_attention_heads=2, max_position_embeddings=context, initializer_range=0.5, **sizes, **ends
            )
        )
    model.generation_config.update(**options)
    return model.eval()


def continued(model: Any, text: str, tokens: int) -> tuple[str, list[int]]:
    """What `model.generate` answers to one prompt."""
    made = ending_tokenizer()
    ids = made([text], return_tensors="pt")
    inputs = {name: ids[name] for name in ("input_ids", "attention_mask")}
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0]
    new = out[1:] if model.config.is_encoder_decoder else out[ids["input_ids"].shape[1] :]
    return made.decode(new, skip_special_tokens=True), new.tolist()


def json_tokenizer() -> Any:
    """Of bytes and a few longer tokens, so that it can spell all JSON; token 0 ends texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["[EOS]"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(['{"name": "café", "sizes": [[1, 2], [3]]}', *sentences(20)["text"]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[EOS]", pad_token="[EOS]")


def json_writer(kind: str, **options: Any) -> Any:
    """A `generator` for `json_tokenizer`, with more columns than that has tokens."""
    return generator(kind, words=320, end=0, context=512, **options)
