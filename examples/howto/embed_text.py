"""Embed a text column of a Spark DataFrame into Parquet files, and search them.

    python examples/howto/embed_text.py
    python examples/howto/embed_text.py --model sentence-transformers/all-MiniLM-L6-v2

The texts are the paragraphs of Python's own manual. Without `--model`, a small encoder with random weights is
created here: its vectors are similar if texts share words, which is enough to try the program.
"""

import argparse
import re
import tempfile
from pydoc_data.topics import topics

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import kindler
from kindler import Estimator


def paragraphs():
    rows = [
        (chapter, " ".join(paragraph.split()))
        for chapter, text in topics.items()
        for paragraph in re.split(r"\n\s*\n", text)
        if 12 <= len(paragraph.split()) <= 80
    ]
    return pd.DataFrame(rows, columns=["chapter", "text"]).drop_duplicates("text")


def small_encoder(texts):
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
    )
    torch.manual_seed(0)
    return BertModel(config), tokenizer


def main(name, folder):
    spark = kindler.init(cores=2)
    table = paragraphs()
    if name:
        estimator = Estimator.from_huggingface(name, task="embedding")
    else:
        estimator = Estimator.from_huggingface(*small_encoder(table["text"]), task="embedding")
    frame = spark.createDataFrame(table).repartition(4)
    vectors = estimator.embed(frame, batch_size=128)  # lazy
    vectors.write.mode("overwrite").parquet(f"{folder}/embeddings")

    stored = pd.read_parquet(f"{folder}/embeddings").sort_values("text", ignore_index=True)
    matrix = np.stack(stored["embedding"])
    print(f"{len(stored)} paragraphs, {matrix.shape[1]} numbers each, columns {list(stored.columns)}")
    common = matrix.mean(axis=0)  # what all texts have in common

    def scaled(vectors):
        vectors = vectors - common
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    matrix, query = scaled(matrix), "return a copy of the string with leading characters removed"
    asked = scaled(estimator.embed({"text": [query]}, verbose=0)["embedding"])
    similar = matrix @ asked[0]  # the cosine
    print(f"most similar to {query!r}:")
    for row in np.argsort(-similar)[:3]:
        print(f"  {similar[row]:.2f} {stored['chapter'][row]}: {stored['text'][row][:60]}")
    kindler.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model of the Hugging Face hub, or a folder that has one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(options.model, scratch)
