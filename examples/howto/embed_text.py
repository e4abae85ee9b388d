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
from torch import nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

import kindler
from kindler import Prepare


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
    return tokenizer, BertModel(config)


class Embedder(nn.Module):
    """The mean over the tokens of a text, scaled to length 1, as sentence-transformers computes it."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids, attention_mask, **others):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return {"embedding": nn.functional.normalize(mean, dim=1)}  # the name of the new column


def main(name, folder):
    spark = kindler.init(cores=2)
    table = paragraphs()
    if name:
        tokenizer, encoder = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name)
    else:
        tokenizer, encoder = small_encoder(table["text"])

    def tokenize(rows):
        texts = [row["text"] for row in rows]
        return tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="np")

    # A model that only scores needs neither a loss nor an optimizer.
    estimator = kindler.Estimator.from_torch(
        model=Embedder(encoder), inputs="kwargs", prepare=Prepare(collate=tokenize)
    )
    frame = spark.createDataFrame(table).repartition(4)
    vectors = estimator.predict(frame, batch_size=128, feature_cols="text")  # lazy
    vectors.write.mode("overwrite").parquet(f"{folder}/embeddings")

    stored = pd.read_parquet(f"{folder}/embeddings").sort_values("text", ignore_index=True)
    matrix = np.stack(stored["embedding"])
    print(f"{len(stored)} paragraphs, {matrix.shape[1]} numbers each, columns {list(stored.columns)}")
    matrix -= matrix.mean(axis=0)  # remove what all texts have in common
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)

    similar = matrix @ matrix.T
    np.fill_diagonal(similar, -1)
    pair = np.unravel_index(similar.argmax(), similar.shape)
    print(f"the most similar two, {similar[pair]:.2f}:")
    for row in pair:
        print(f"  {stored['chapter'][row]}: {stored['text'][row][:80]}")
    kindler.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model of the Hugging Face hub, or a folder that has one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(options.model, scratch)
