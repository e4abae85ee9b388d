"""Fine-tune a Hugging Face classifier on a table of text: which chapter is a sentence from?

    python examples/howto/finetune_text.py
    python examples/howto/finetune_text.py --model distilbert/distilbert-base-uncased --lr 5e-5 --epochs 3

The table has the sentences of three chapters of Python's own manual, which every Python ships. Without
`--model`, a small model is created here and nothing is downloaded.
"""

import argparse
import re
import tempfile
from functools import partial
from pydoc_data.topics import topics

import pandas as pd
import torch
from pyspark.sql import functions as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

import kindler
from kindler import Estimator

CHAPTERS = ("compound", "debugger", "string-methods")


def sentences():
    """A row per sentence: `text`, and `label`, the number of its chapter."""
    rows = [
        (sentence, label)
        for label, chapter in enumerate(CHAPTERS)
        for sentence in re.split(r"(?<=[.:])\s+", " ".join(topics[chapter].split()))
        if 6 <= len(sentence.split()) <= 40
    ]
    return pd.DataFrame(rows, columns=["text", "label"])


def small_model(texts):
    """A vocabulary of these texts, and a BERT with two layers and random weights."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        num_labels=len(CHAPTERS),
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config), tokenizer


def main(name, lr, epochs):
    spark = kindler.init(cores=2)
    table = sentences()
    train, test = spark.createDataFrame(table).randomSplit([0.8, 0.2], seed=1)
    options = {"optimizer": partial(torch.optim.AdamW, lr=lr), "metrics": "accuracy", "workers": 2}
    if name:
        estimator = Estimator.from_huggingface(
            name, task="text-classification", config={"num_labels": len(CHAPTERS)}, **options
        )
    else:
        estimator = Estimator.from_huggingface(
            *small_model(table["text"]), task="text-classification", **options
        )
    estimator.fit(train, epochs=epochs, batch_size=32, feature_cols="text", label_cols="label", verbose=0)
    result = estimator.evaluate(test, verbose=0)
    print(f"test accuracy: {result['accuracy']:.3f} on {result['num_samples']} sentences")

    scored = estimator.predict(test, output_cols=["found", "score"])
    right = (F.col("found") == F.concat(F.lit("LABEL_"), "label")).cast("int")
    for row in scored.groupBy("label").agg(F.avg(right).alias("right")).orderBy("label").collect():
        print(f"{CHAPTERS[row['label']]}: {row['right']:.2f} right")

    with tempfile.TemporaryDirectory() as folder:
        estimator.get_model().save_pretrained(folder)  # an ordinary transformers model
        again = AutoModelForSequenceClassification.from_pretrained(folder)
    print(f"saved and loaded: {type(again).__name__}")
    kindler.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model of the Hugging Face hub, or a folder that has one")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    main(options.model, options.lr, options.epochs)
