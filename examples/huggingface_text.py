"""A Hugging Face classifier on a string column of a Spark DataFrame, tokenized and padded in the workers.

    python examples/huggingface_text.py

The model and its vocabulary are tiny and created here, so nothing is downloaded. Load any other model with
`AutoModelForSequenceClassification.from_pretrained(...)` and `AutoTokenizer.from_pretrained(...)`.
"""

import argparse

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import kindler
from kindler import Prepare

GOOD, BAD = ("fine", "lovely", "great"), ("awful", "dull", "poor")
OTHERS = ("the", "film", "was", "and", "its", "music", "quite", "very", "a", "story")


def reviews(rows, seed):
    """Sentences of different lengths with one decisive word each."""
    random = np.random.default_rng(seed)
    label = random.integers(0, 2, rows)
    texts = []
    for kind in label:
        words = [str(word) for word in random.choice(OTHERS, random.integers(2, 12))]
        words.insert(int(random.integers(0, len(words))), str(random.choice(GOOD if kind else BAD)))
        texts.append(" ".join(words))
    return pa.table({"text": texts, "label": label})


def make_tokenizer():
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHERS]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def make_model():
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def make_optimizer(model):
    """The usual parameter groups: no weight decay for biases and norms."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def main(rows=400, epochs=4, master=None):
    """Train on that many sentences; returns the accuracy on 100 others."""
    spark = kindler.init(master, cores=None if master else 2)
    train, test = (spark.createDataFrame(reviews(*each)) for each in ((rows, 0), (100, 1)))
    tokenizer = make_tokenizer()

    def tokenize(batch):
        """The texts of a batch, padded to the longest one."""
        return tokenizer([row["text"] for row in batch], padding=True, return_tensors="np")

    estimator = kindler.Estimator.from_torch(
        model=make_model,
        optimizer=make_optimizer,
        loss="model",
        inputs="kwargs",
        metrics="accuracy",
        prepare=Prepare(collate=tokenize),
        workers=2,
    )
    estimator.fit(train, epochs=epochs, batch_size=32, feature_cols="text", label_cols="label")
    accuracy = estimator.evaluate(test)["accuracy"]
    print(f"test accuracy: {accuracy:.4f}")
    scored = estimator.predict(test)
    print(f"scored: {scored.columns}, {scored.count()} rows")
    kindler.stop()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--master", help="a Spark master; default: two cores of this machine")
    options = parser.parse_args()
    main(options.rows, options.epochs, options.master)
