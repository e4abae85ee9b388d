"""Labels of words: what is learned from lists of words, and the entities that `predict` finds in texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast, pipeline

from kindler import Estimator
from kindler.errors import ConfigError, DataError

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
WORDS = ("an", "##na", "ber", "##lin", "met", "in", "lee", "the", "rain", "paris", "##is")


def words_tokenizer() -> Any:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    made = Tokenizer(WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def tagger(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=15, max_position_embeddings=32, **sizes, **names, **dropout, **options)
    return BertForTokenClassification(config).eval()


def sentences(rows: int) -> dict[str, Any]:
    """Words, and the label of each; "anna" and "lee" are people, "berlin" and "paris" places."""
    random = np.random.default_rng(0)
    known = {"anna": "B-PER", "lee": "I-PER", "berlin": "B-LOC", "paris": "B-LOC"}
    others = ["met", "in", "the", "rain", *known]
    words = [list(map(str, random.choice(others, random.integers(2, 8)))) for _ in range(rows)]
    return {"words": words, "tags": [[known.get(word, "O") for word in row] for row in words]}


TEXTS = [" ".join(words) for words in sentences(30)["words"]]


def made(model: Any, **options: Any) -> Estimator:
    return Estimator.from_huggingface(model, words_tokenizer(), task="token-classification", **options)


def test_entities_are_those_of_the_pipeline_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which the pipeline sets
    model = tagger(initializer_range=0.7)
    ask = pipeline(
        "token-classification", model=model, tokenizer=words_tokenizer(), aggregation_strategy="simple"
    )
    expected = [ask(text) for text in TEXTS]
    assert sum(map(len, expected)) > 20
    assert any(one["end"] - one["start"] > 6 for row in expected for one in row)

    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "texts.parquet")
    path = made(model, workers=2).predict(
        tmp_path / "texts.parquet", 8, output_path=tmp_path / "out", verbose=0
    )
    found = pq.read_table(path)["entities"].to_pylist()
    for text, row, wanted in zip(TEXTS, found, expected, strict=True):
        assert [(one["start"], one["end"], one["label"]) for one in row] == [
            (one["start"], one["end"], one["entity_group"]) for one in wanted
        ]
        assert all(one["text"] == text[one["start"] : one["end"]] for one in row)
        np.testing.assert_allclose([o["score"] for o in row], [o["score"] for o in wanted], atol=1e-5)

    words = pa.table({"words": [text.split() for text in TEXTS]})
    of_words = made(model, workers=1).predict(words, feature_cols="words", verbose=0)
    assert [[one["start"] for one in row] for row in of_words["entities"].to_pylist()] == [
        [one["start"] for one in row] for row in found
    ]


def test_two_workers_learn_what_one_learns_and_only_the_first_token_of_a_word_counts() -> None:
    data, trained = sentences(160), []
    numbers = [[LABELS.index(tag) for tag in row] for row in data["tags"]]
    for workers, tags in ((1, data["tags"]), (2, numbers)):
        est = made(
            tagger(), optimizer=partial(torch.optim.AdamW, lr=5e-3), metrics="accuracy", workers=workers
        )
        rows = pa.table({"words": data["words"], "tags": tags})
        est.fit(rows, epochs=4, batch_size=20, feature_cols="words", label_cols="tags", verbose=0)
        trained.append(est)
    assert trained[0].history["accuracy"][-1] > 0.95
    np.testing.assert_allclose(trained[0].history["loss"], trained[1].history["loss"], rtol=1e-3)
    np.testing.assert_allclose(trained[0].history["accuracy"], trained[1].history["accuracy"], atol=0.02)
    found = trained[1].predict({"text": ["lee met the paris rain"]}, feature_cols="text", verbose=0)
    assert [(one["label"], one["text"]) for one in found["entities"][0]] == [
        ("PER", "lee"),
        ("LOC", "paris"),
    ]

    collate = made(tagger())._prepare.collate
    batch = collate([{"words": ["anna", "met"], "tags": ["B-PER", "O"]}, {"words": ["lee"], "tags": [2]}])
    assert batch["tags"].tolist() == [[-100, 1, -100, 0, -100], [-100, 2, -100, -100, -100]]


def test_labels_that_do_not_fit_are_named_by_their_row() -> None:
    est = made(tagger(), workers=1)

    def fit(tags: Any) -> None:
        rows = pa.table({"words": [["anna"], ["lee", "met"]], "tags": tags})
        est.fit(rows, batch_size=2, feature_cols="words", label_cols="tags", verbose=0)

    with pytest.raises(DataError, match="row 1: has 1 labels for 2 words"):
        fit([["O"], ["O"]])
    with pytest.raises(DataError, match="row 1: has the label 'B-X', which is not one of the model's"):
        fit([["O"], ["O", "B-X"]])
    with pytest.raises(DataError, match="row 0: has the label 5"):
        fit([[5], [0, 1]])
    with pytest.raises(ConfigError, match="predicts one column, entities"):
        est.predict({"text": TEXTS}, output_cols=["a", "b"], verbose=0)
    with pytest.raises(DataError, match="a column of words and a column with the label of each word"):
        est.fit({"text": TEXTS, "tags": TEXTS}, feature_cols="text", label_cols="tags", verbose=0)
